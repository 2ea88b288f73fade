"""Program that reads a GPU's PCIe counters again and again: ``python -m gpubridge.bench.pcie_sampler UUID``.

A process of its own, so that nothing that the benchmark does delays it. Its first line is the link's bytes
per second, or ``-``, why there are no counters, and whether there is no other meter; each other
one is when it began and ended to read, and both counters. It ends when its input does.
"""

from __future__ import annotations

import json
import select
import sys
import time

from gpubridge.bench.nvml import NotCounted, PcieCounters

_INTERVAL = 0.01


def main() -> int:
    """Read until the reader has gone."""
    try:
        counters = PcieCounters(sys.argv[1])
        _tell(counters.fastest)
        while not select.select([sys.stdin], [], [], _INTERVAL)[0]:
            began = time.monotonic()
            received, sent = counters.read()
            _tell(began, time.monotonic(), received, sent)
    except NotCounted as error:
        _tell("-", str(error), error.unmetered)
        return 1
    except BrokenPipeError:
        return 1
    return 0


def _tell(*values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
