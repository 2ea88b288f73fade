"""PyTriton: arguments are the work and the ports of HTTP, gRPC and metrics."""

import signal
import sys

import numpy as np
import work
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def add_sub(requests):
    outputs = (work.add_sub(each.data["INPUT0"], each.data["INPUT1"]) for each in requests)
    return [{"OUTPUT0": total, "OUTPUT1": difference} for total, difference in outputs]


def means(requests):
    return [{"MEANS": work.means(each.data["IMAGE"][0])} for each in requests]


def tokens(requests):
    for each in requests:
        for token in work.tokens(each.data["text_input"][0].decode()):
            yield [{"text_output": np.array([token.encode()], np.object_)}]


NUMBERS = {"dtype": np.float32, "shape": (8,)}
MODELS = {
    "add_sub": (
        add_sub,
        [Tensor(name="INPUT0", **NUMBERS), Tensor(name="INPUT1", **NUMBERS)],
        [Tensor(name="OUTPUT0", **NUMBERS), Tensor(name="OUTPUT1", **NUMBERS)],
    ),
    "means": (
        means,
        [Tensor(name="IMAGE", dtype=bytes, shape=(1,))],
        [Tensor(name="MEANS", dtype=np.float32, shape=(3,))],
    ),
    "tokens": (
        tokens,
        [Tensor(name="text_input", dtype=bytes, shape=(1,))],
        [Tensor(name="text_output", dtype=bytes, shape=(1,))],
    ),
}


if __name__ == "__main__":
    # Without this its shared memory outlives it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    name, *ports = sys.argv[1:5]
    http, grpc, metrics = map(int, ports)
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=http,
        grpc_address="127.0.0.1",
        grpc_port=grpc,
        metrics_port=metrics,
    )
    function, inputs, outputs = MODELS[name]
    options = ModelConfig(batching=False, decoupled=name == "tokens")
    with Triton(config=config) as triton:
        triton.bind(name, function, inputs, outputs, config=options)
        triton.serve()
