"""Soak gpubridge: requests of every kind, cancels, hang-ups, killed stubs.

python -m benchmarks.soak [--seconds 600] [--kill-every 5] [--output FILE]
python -m benchmarks.soak --answered 500000 --kills 1000 --kill-every 1 --seconds 3600

Exit status 1 if a request had no outcome or two, failed for another reason than a killed stub, or
if the server holds more than before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.soak.run import Aim, soak


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long at the most")
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument(
        "--answered", type=int, default=0, help="requests: until there are so many, or fail"
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="stubs: until there are so many, or fail"
    )
    parser.add_argument("--output", type=Path, help="write the report here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpubridge-soak-") as folder:
        aim = Aim(options.seconds, options.answered, options.kills)
        report = soak(aim, options.kill_every, Path(folder) / "server.log")
    print(report.text())
    if options.output is not None:
        options.output.write_text(report.text() + "\n", encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
