"""Ask two models that call a model with several responses.

python examples/bls_decoupled/client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


def sums(client, model, numbers):
    """Return what the model makes of some numbers: their squares."""
    array = np.array(numbers, np.int32)
    tensor = triton.InferInput("IN", list(array.shape), "INT32")
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor]).as_numpy("SUM").tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        for model in ("bls_decoupled_sync", "bls_decoupled_async"):
            numbers = [3, 0, 1, 12]
            squares = sums(client, model, numbers)
            print(f"{model}: {numbers} -> {squares}")
            assert squares == [number * number for number in numbers]
            try:
                sums(client, model, [2, -5])
            except InferenceServerException as error:
                print(f"{model}: [2, -5] -> {error.message()}")
            else:
                raise RuntimeError("expected an error for a negative number, got an answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
