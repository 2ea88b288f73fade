"""Ask two models that call add_sub on their own.

python examples/bls/client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


def infer(client, model, called, first, second):
    """Have ``model`` call ``called`` with two float32 arrays; returns the two outputs."""
    inputs = []
    for name, kind, array in (
        ("MODEL", "BYTES", np.array([called.encode()], np.object_)),
        ("INPUT0", "FP32", first),
        ("INPUT1", "FP32", second),
    ):
        tensor = triton.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs)
    return result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    first = np.array([[1, 2, 3, 4]], np.float32)
    second = np.array([[10, 20, 30, 40]], np.float32)
    with triton.InferenceServerClient(options.url) as client:
        total, difference = infer(client, "bls_sync", "add_sub", first, second)
        print(f"bls_sync:  a + b {total.tolist()}, a - b {difference.tolist()}")
        np.testing.assert_array_equal(total, first + second)
        np.testing.assert_array_equal(difference, first - second)
        twice_first, twice_second = infer(client, "bls_async", "add_sub", first, second)
        print(f"bls_async: 2 a {twice_first.tolist()}, 2 b {twice_second.tolist()}")
        np.testing.assert_array_equal(twice_first, 2 * first)
        np.testing.assert_array_equal(twice_second, 2 * second)
        for model in ("bls_sync", "bls_async"):
            try:
                infer(client, model, "no_such_model", first, second)
            except InferenceServerException as error:
                print(f"{model}: {error.message()}")
            else:
                raise RuntimeError(f"expected an error of {model} for an unknown model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
