"""A new shape misses no cache of a stub: answers and calls of all shapes have one signature."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from gpubridge.errors import BridgeError
from gpubridge.frontend.bls import requests
from gpubridge.frontend.bls.requests import CalledModels
from gpubridge.request import RequestOptions
from gpubridge.stub.response_encoder import OutputCheck, ResponseEncoder
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature, TensorSpec, encode_dims
from gpubridge.transport.stub_settings import StubModel, StubSettings
from tests.unit.model_configs import model_config


class Fitted(NamedTuple):
    signature: bytes
    dims: bytes
    batch_size: int
    options: RequestOptions


SHAPES = ((1,), (2,), (0,), (1000,), (2,))


def tensor(shape):
    return SimpleNamespace(
        _name="OUT", _datatype="FP32", _shape=shape, _place=None, _device_bytes=None
    )


def test_a_stub_makes_one_signature_for_all_shapes_of_an_answer():
    encoder = object.__new__(ResponseEncoder)
    encoder._states, encoder._signatures = None, {}
    settings = StubSettings(
        StubModel("m", 1, "python", "", "", ()), "m_0_0", {"model_config": "{}"}
    )
    check = OutputCheck(settings, None)
    encoder._identity = SimpleNamespace(outputs=frozenset(["OUT"]), check=check)
    record = Record(0, Signature((), ()), (), RequestContext(), 0, "", ())
    made = []
    for shape in SHAPES:
        response = SimpleNamespace(_error=None, _parameters="{}", _tensors=[tensor(shape)])
        made.append(encoder._form(record, response)[1:3])
    assert len({id(signature) for signature, _ in made}) == 1
    assert [len(dims) for _, dims in made] == [8] * len(SHAPES)
    assert len({dims for _, dims in made}) == len(set(SHAPES))


@pytest.fixture
def call():
    """Make a call of a model, of one input of some shape, in a server."""
    config = model_config("IN FP32 [-1]", more="max_batch_size: 8")
    about = {"name": "m", "config": config, "executed_by": ("m",), "submit": None}
    model = type("Called", (), about)()
    models = CalledModels(SimpleNamespace(find=lambda name, version: model))
    signature = Signature((TensorSpec("IN", "FP32", 2, 4),), ("OUT",), frozenset(["OUT"]))
    said = CallContext(model="m")
    form = models.form(Record(1, signature, (), said, 0, "", ()), "caller", "")

    def call(shape, nbytes):
        return Fitted(*form.fit(Record(1, signature, (shape,), said, 0, "me", ()), [nbytes]))

    return call


def test_a_server_makes_one_signature_for_all_shapes_of_a_call(call, monkeypatch):
    made = [call((1, 3), 12)]
    # Only the first one needs it.
    monkeypatch.setattr(requests, "encode_signature", None)
    shapes = [(2, 3), (8, 1), (1, 3)]
    made += [call(shape, shape[0] * shape[1] * 4) for shape in shapes]
    assert len({id(request.signature) for request in made}) == 1
    assert [request.dims for request in made[1:]] == [encode_dims([shape]) for shape in shapes]
    assert [request.batch_size for request in made[1:]] == [2, 8, 1]
    assert [tuple(request.options.shapes) for request in made[1:]] == [
        (("IN", shape),) for shape in shapes
    ]


@pytest.mark.parametrize(
    ("shape", "nbytes", "expected"),
    [
        ((9, 1), 36, "inference request batch-size must be <= 8 for 'm'"),
        ((1, 3), 8, "input byte size mismatch for input 'IN' for model 'm'. Expected 12, got 8"),
        ((2,), 8, "unexpected shape for input 'IN' for model 'm'. Expected [-1,-1], got [2]"),
    ],
)
def test_a_shape_or_size_that_is_wrong_is_refused_each_time(call, shape, nbytes, expected):
    call((1, 3), 12)
    for _ in range(2):
        with pytest.raises(BridgeError) as refused:
            call(shape, nbytes)
        assert refused.value.message.startswith(f"[request id: me] {expected}")
    assert call((1, 3), 12).batch_size == 1
