"""Show what two models have said of themselves, and ask them.

python examples/auto_complete/client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton


def show(config):
    """Print the parts of a configuration that the model has completed."""
    print(f"{config['name']}: max_batch_size {config['max_batch_size']}", end="")
    print(", dynamic batching" if "dynamic_batching" in config else "")
    for kind in ("input", "output"):
        for tensor in config[kind]:
            dims = [int(size) for size in tensor["dims"]]
            print(f"  {kind:6} {tensor['name']} {tensor['data_type']} {dims}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        for model, shape in (("described", [4]), ("described_batched", [2, 4])):
            show(client.get_model_config(model))
            minuend = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            inputs = []
            for name, array in (("INPUT0", minuend), ("INPUT1", np.ones(shape, np.float32))):
                tensor = triton.InferInput(name, shape, "FP32")
                tensor.set_data_from_numpy(array)
                inputs.append(tensor)
            result = client.infer(model, inputs)
            print("  sum ", result.as_numpy("OUTPUT0").tolist())
            print("  diff", result.as_numpy("OUTPUT1").tolist())
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), minuend + 1)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), minuend - 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
