"""Ask every instance of a model where it runs.

python examples/instance_kind/client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.http as triton

INSTANCES = 3


def ask(url, wait_ms):
    """Return the name of the instance that answered, and its device."""
    tensor = triton.InferInput("WAIT_MS", [1], "UINT32")
    tensor.set_data_from_numpy(np.array([wait_ms], np.uint32))
    with triton.InferenceServerClient(url) as client:
        result = client.infer("instance_kind", [tensor])
    return tuple(result.as_numpy(name)[0].decode() for name in ("INSTANCE", "DEVICE"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    # As many requests at the same time as there are instances, each of them long: one for each.
    with ThreadPoolExecutor(INSTANCES) as threads:
        asked = [threads.submit(ask, options.url, 1000) for _ in range(INSTANCES)]
    for instance, device in sorted({answer.result() for answer in asked}):
        print(f"{instance}: {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
