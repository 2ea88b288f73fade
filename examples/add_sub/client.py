"""Ask add_sub over HTTP, and see what an error looks like.

python examples/add_sub/client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


def infer(client, **arrays):
    """Send float32 arrays by input name; returns the result."""
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return client.infer("add_sub", inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    minuend = np.arange(8, dtype=np.float32).reshape(2, 4)
    subtrahend = np.ones((2, 4), np.float32)
    with triton.InferenceServerClient(options.url) as client:
        result = infer(client, INPUT0=minuend, INPUT1=subtrahend)
        print("sum ", result.as_numpy("OUTPUT0").tolist())
        print("diff", result.as_numpy("OUTPUT1").tolist())
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), minuend + subtrahend)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), minuend - subtrahend)
        try:
            infer(client, INPUT0=minuend[:, :3], INPUT1=subtrahend)
        except InferenceServerException as error:
            print("three numbers where four belong:", error.message())
        else:
            raise RuntimeError("expected an error for a wrong shape, got an answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
