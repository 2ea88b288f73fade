"""``gpubridge bench load URL MODEL``: a load test of a model that a server serves."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from urllib.parse import quote

import numpy as np

from gpubridge.bench.load import Bounds, Load, Request, Server
from gpubridge.bench.load_report import draw, figures, table
from gpubridge.config import ModelConfig
from gpubridge.config.load import complete_model_config, parse_config_override
from gpubridge.develop.requests import InputTensor, read_input
from gpubridge.errors import invalid, unsupported
from gpubridge.protocol.example_inputs import needed_inputs, smallest_shape
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import element_count, item_size

_MOST_SCHEDULED = 10_000_000
_MOST_CONNECTIONS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load test."""
    add = parser.add_argument_group("load").add_argument
    add(
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input, as of gpubridge run: JSON, or @FILE; else random numbers in the smallest shape; repeat it",
    )
    add("--connections", type=int, default=8, metavar="N", help="requests at a time, at most")
    add(
        "--rate",
        type=float,
        metavar="X",
        help="requests/s at random times of their own, from which latency counts (an open load); else each connection "
        "sends when it has its answer (a closed one)",
    )
    add("--duration", type=float, default=10.0, metavar="X", help="seconds of the load")
    add("--requests", type=int, metavar="N", help="end after so many requests")
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="X",
        help="seconds of a request until it has failed",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="of each request; repeat it",
    )
    add("--plot", type=Path, metavar="FILE", help="write a picture of latency by quantile")


def run(options: argparse.Namespace) -> int:
    """Load a model, print the figures; return 0 if all requests were answered. Raises BridgeError."""
    if len(options.target) != 2:
        raise invalid("gpubridge bench load expects the URL of a server and the name of a model")
    _check(options)
    url, model = options.target
    headers = dict(_header(text) for text in options.header)
    server = Server(url, options.timeout)
    path = f"/v2/models/{quote(model, safe='')}"
    config = _config(server.get(f"{path}/config", headers), model)
    request = _request(config, options.input, f"{path}/infer", headers)
    bounds = Bounds(options.duration, options.requests, options.timeout)
    load = Load(server, request, options.connections, bounds, options.rate)
    followed = load.run()
    found = figures(followed, load.failures, options.rate)
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if options.json else table(found) + "\n")
    if options.plot is not None:
        title = f"{model}: {found['rate']:,.0f}/s, {options.connections} connections"
        told = draw(followed, title, options.plot) or f"written: {options.plot}"
        sys.stderr.write(f"{told}\n")
    return int(load.failures.count > 0)


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.connections <= _MOST_CONNECTIONS:
        raise invalid(f"--connections expects 1 to {_MOST_CONNECTIONS}, got {options.connections}")
    for name in ("rate", "duration", "requests", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise invalid(f"--{name} expects a positive number, got {value:g}")
    if options.rate is not None and options.rate * options.duration > _MOST_SCHEDULED:
        raise invalid(
            f"--rate {options.rate:g} for {options.duration:g} s are more than {_MOST_SCHEDULED:,} requests"
        )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise invalid(f"--header expects NAME:VALUE, got {text!r}")
    return name.strip(), value.strip()


def _config(document: bytes, model: str) -> ModelConfig:
    """Return the inputs and outputs of a served configuration, whatever this machine has of its rest."""
    served = parse_config_override(document.decode())
    if served.model_transaction_policy.decoupled:
        raise unsupported(f"model '{model}' is decoupled: bench load measures one answer a request")
    if served.WhichOneof("scheduling_choice") == "sequence_batching":
        raise unsupported(
            f"model '{model}' takes sequences: bench load sends requests that stand alone"
        )
    bare = type(served)(name=model, backend="python", max_batch_size=served.max_batch_size)
    bare.input.extend(served.input)
    bare.output.extend(served.output)
    return complete_model_config(bare, Path(model), gpu_count=0)


def _request(config: ModelConfig, given: list[str], path: str, headers: dict[str, str]) -> Request:
    """Return a request with binary data; raises BridgeError for inputs that the model does not have."""
    tensors = {tensor.name: tensor for tensor in (read_input(text, config) for text in given)}
    for spec in needed_inputs(config):
        if spec.name not in tensors:
            tensors[spec.name] = _random(spec.name, spec.datatype, smallest_shape(spec, config))
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in tensors.values()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    body = b"".join([head, *(tensor.data for tensor in tensors.values())])
    return Request(path, body, {**headers, **length})


def _random(name: str, datatype: str, shape: list[int]) -> InputTensor:
    """Return an input of random numbers that any datatype has: 0 and 1; of strings, the word "text"."""
    count, size = element_count(shape), item_size(datatype)
    if size is None:
        data = bytes_codec.encode(np.array([b"text"] * count, object))
    elif datatype in ("FP16", "BF16", "FP32", "FP64"):
        wide = np.random.default_rng(0).random(count, np.float32)
        data = _floats(wide, datatype)
    else:
        kind = np.dtype(f"u{size}")
        data = np.random.default_rng(0).integers(0, 2, count, kind).tobytes()
    return InputTensor(name, datatype, tuple(shape), data)


def _floats(values: np.ndarray, datatype: str) -> bytes:
    if datatype == "BF16":
        # The upper half of a float's bits.
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"FP16": "f2", "FP32": "f4", "FP64": "f8"}[datatype]).tobytes()
