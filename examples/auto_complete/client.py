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


def ask(client, model, **arrays):
    """Send arrays to a model, by the names of its inputs; returns the result."""
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return client.infer(model, inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        show(client.get_model_config("described"))
        values = np.arange(4, dtype=np.float32)
        result = ask(client, "described", INPUT0=values, INPUT1=np.ones_like(values))
        print("  sum ", result.as_numpy("OUTPUT0").tolist())
        print("  diff", result.as_numpy("OUTPUT1").tolist())
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values + 1)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), values - 1)

        show(client.get_model_config("described_batched"))
        batch = np.arange(8, dtype=np.float32).reshape(2, 4)
        squares = ask(client, "described_batched", VALUES=batch).as_numpy("SQUARES")
        print("  squares", squares.tolist())
        np.testing.assert_array_equal(squares, batch * batch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
