"""Ask pytorch_addsub for a sum and a difference, and time it.

python examples/pytorch_addsub/client.py --url 127.0.0.1:8000 [--requests N --connections C]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.http as triton

MODEL = "pytorch_addsub"
Vector = npt.NDArray[np.float32]


class Measurement(NamedTuple):
    """Latency of every request in seconds, and how long all of them took together."""

    latencies_s: list[float]
    wall_s: float


def add_sub(
    client: triton.InferenceServerClient, minuend: Vector, subtrahend: Vector
) -> tuple[Vector, Vector]:
    """Return ``minuend + subtrahend`` and ``minuend - subtrahend``, each float32 of shape [4].

    Raises
    ------
    tritonclient.utils.InferenceServerException
        The server or the model refused the request; the message says why.
    """
    inputs = []
    for name, values in (("INPUT0", minuend), ("INPUT1", subtrahend)):
        tensor = triton.InferInput(name, list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    result = client.infer(MODEL, inputs)
    return result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")


def measure(url: str, connections: int, requests: int) -> Measurement:
    """Send `requests` requests over `connections` connections and check every answer.

    Each connection has a thread and a client of its own, since tritonclient's HTTP client belongs
    to the thread that made it. At most one request per connection is under way. `requests` is
    rounded up to a multiple of `connections`.

    Raises
    ------
    AssertionError
        An answer was not the sum and the difference of what was sent.
    tritonclient.utils.InferenceServerException
        The server or the model refused a request.
    """

    def one_connection(seed: int) -> tuple[float, list[float], float]:
        random = np.random.default_rng(seed)
        latencies = []
        with triton.InferenceServerClient(url) as client:
            add_sub(client, np.zeros(4, np.float32), np.zeros(4, np.float32))  # connects
            begin = time.perf_counter()
            for _ in range(math.ceil(requests / connections)):
                minuend, subtrahend = random.random((2, 4), np.float32)
                sent = time.perf_counter()
                total, difference = add_sub(client, minuend, subtrahend)
                latencies.append(time.perf_counter() - sent)
                np.testing.assert_array_equal(total, minuend + subtrahend)
                np.testing.assert_array_equal(difference, minuend - subtrahend)
            return begin, latencies, time.perf_counter()

    with ThreadPoolExecutor(connections) as threads:
        begins, latencies, ends = zip(*threads.map(one_connection, range(connections)), strict=True)
    return Measurement(list(itertools.chain(*latencies)), max(ends) - min(begins))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connections", type=int, default=1)
    options = parser.parse_args()

    minuend = np.array([1, 2, 3, 4], np.float32)
    subtrahend = np.array([10, 20, 30, 40], np.float32)
    with triton.InferenceServerClient(options.url) as client:
        total, difference = add_sub(client, minuend, subtrahend)
    print(f"INPUT0 {minuend}\nINPUT1 {subtrahend}\nsum    {total}\ndiff   {difference}")

    measured = measure(options.url, options.connections, options.requests)
    p50, p99 = np.percentile(measured.latencies_s, [50, 99]) * 1e6
    count = len(measured.latencies_s)
    print(
        f"{count} requests over {options.connections} connection(s), every answer checked: "
        f"p50 {p50:.0f} us, p99 {p99:.0f} us, {count / measured.wall_s:.0f} requests/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
