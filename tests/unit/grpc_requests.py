"""Fixtures of the tests of gRPC messages: models, an arena, and requests for them."""

from dataclasses import dataclass, field

import pytest

from gpubridge.config import ModelConfig
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import HostArena
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.protocol.grpc.receiver import whole_request
from gpubridge.schema import message_class
from gpubridge.telemetry.statistics import ModelStatistics
from tests.unit.model_configs import model_config

__all__ = [
    "BATCHED",
    "IDENTITY",
    "MODEL",
    "Model",
    "Request",
    "cache",
    "inputs_of",
    "make",
    "raw",
    "refusal",
    "two_inputs",
    "typed",
]

Request = message_class("ModelInferRequest")


@dataclass(eq=False)
class Model:
    config: ModelConfig
    statistics: ModelStatistics = field(default_factory=lambda: ModelStatistics("m", 1))

    def submit(self, request, origin=None):
        """Take a request over: never asked here."""


MODEL = Model(model_config("A FP32 [4];B FP32 [4]", "X FP32 [4];Y FP32 [4]"))


ARENA = HostArena(1, 1 << 24)


def cache(model=MODEL, arena=ARENA):
    """A form cache that knows one model, by the name of its configuration."""

    def find(name, version):
        if name != model.config.name:
            raise BridgeError(f"no {name!r}", ErrorCode.NOT_FOUND)
        return model

    return FormCache(find, lambda _: arena)


def raw(*inputs, **fields):
    """A request of (name, datatype, shape, bytes), as tritonclient makes it."""
    request = Request(model_name="m", **fields)
    for name, datatype, shape, data in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


def two_inputs(**fields):
    return raw(("A", "FP32", [4], b"a" * 16), ("B", "FP32", [4], b"b" * 16), **fields)


def make(request, model=MODEL, forms=None):
    """Take a request as a whole; returns what is known, the engine's request and its inputs."""
    try:
        known, made, _ = whole_request(
            request.SerializeToString(), forms or cache(model), lambda _: None
        )
        inputs = inputs_of(made)
        ARENA.free(made.slot)
    finally:
        assert ARENA.lent() == (0, 0)
    return known, made, inputs


def inputs_of(made):
    return [
        bytes(made.slot.memory[made.start + at : made.start + at + nbytes])
        for at, nbytes in made.places
    ]


DATATYPES = "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64 BF16 BYTES"
IDENTITY = Model(
    model_config(
        ";".join(
            f"{kind} {'STRING' if kind == 'BYTES' else kind} [-1] optional: true"
            for kind in DATATYPES.split()
        )
    )
)
BATCHED = Model(model_config("A FP32 [4];S STRING [1] optional: true", more="max_batch_size: 8"))


def typed(datatype, field, values, count=None):
    request = Request(model_name="m")
    entry = request.inputs.add(name=datatype, datatype=datatype)
    entry.shape.append(len(values) if count is None else count)
    entry.contents.SetInParent()
    getattr(entry.contents, field).extend(values)
    return request


def refusal(request, model=MODEL):
    with pytest.raises(BridgeError) as refused:
        make(request, model)
    return refused.value.code.name, refused.value.message
