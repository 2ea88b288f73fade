"""Ask cupy_addsub, or jax_add_sub, for a sum and a difference.

python examples/add_sub_client.py --model cupy_addsub --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--model", default="cupy_addsub", help="name of the model")
    options = parser.parse_args()

    arrays = {
        "INPUT0": np.array([1, 2, 3, 4], np.float32),
        "INPUT1": np.array([0.5, 0.25, 0, -1], np.float32),
    }
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with triton.InferenceServerClient(options.url) as client:
        result = client.infer(options.model, inputs)
    print("sum ", result.as_numpy("OUTPUT0").tolist())
    print("diff", result.as_numpy("OUTPUT1").tolist())
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), arrays["INPUT0"] + arrays["INPUT1"])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), arrays["INPUT0"] - arrays["INPUT1"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
