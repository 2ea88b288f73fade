"""A new shape misses no cache of a stub: answers and calls of all shapes have one signature."""

from __future__ import annotations

from types import SimpleNamespace

from gpubridge.stub.answers import AnswerEncoder
from gpubridge.stub.bls_records import CallForms
from gpubridge.transport.context import RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature

SHAPES = ((1,), (2,), (0,), (1000,), (2,))


def tensor(shape):
    return SimpleNamespace(
        _name="OUT", _datatype="FP32", _shape=shape, _place=None, _device_bytes=None
    )


def test_a_stub_makes_one_signature_for_all_shapes_of_an_answer():
    encoder = object.__new__(AnswerEncoder)
    encoder._states, encoder._signatures = None, {}
    encoder._identity = SimpleNamespace(outputs=frozenset(["OUT"]))
    record = Record(0, Signature((), ()), (), RequestContext(), 0, "", ())
    made = []
    for shape in SHAPES:
        response = SimpleNamespace(_error=None, _parameters="{}", _tensors=[tensor(shape)])
        made.append(encoder._form(record, response)[1:3])
    assert len({id(signature) for signature, _ in made}) == 1
    assert [len(dims) for _, dims in made] == [8] * len(SHAPES)
    assert len({dims for _, dims in made}) == len(set(SHAPES))


def test_a_stub_makes_one_signature_for_all_shapes_of_a_call():
    forms = CallForms()
    made = []
    for shape in SHAPES:
        request = SimpleNamespace(
            _inputs=[tensor(shape)],
            _requested_output_names=["OUT"],
            _model_name="m",
            _model_version=-1,
            _correlation_id=0,
            _flags=0,
            _timeout=0,
            _trace=SimpleNamespace(_identifier=0),
            _parameters="{}",
            _preferred_memory=None,
        )
        made.append(forms.encode(request, False))
    assert len({(id(signature), id(context)) for signature, _, context in made}) == 1
    assert len({dims for _, dims, _ in made}) == len(set(SHAPES))
