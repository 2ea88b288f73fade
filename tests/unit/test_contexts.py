"""Contexts: both codecs write the same bytes, read the same fields, and refuse the same bytes."""

import struct

import pytest
from hypothesis import example, given, strategies as st

from gpubridge.tensor.native import native
from gpubridge.transport.context import (
    FIELDS,
    CallContext,
    FieldKind,
    PythonContextCodec,
    RequestContext,
    ResponseContext,
    context_codec,
)

KINDS = (RequestContext, CallContext, ResponseContext)
needs_module = pytest.mark.skipif(native() is None, reason="no compiled module")

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
_VALUES = {
    FieldKind.U64: st.integers(0, (1 << 64) - 1),
    FieldKind.I64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldKind.TEXT: st.text(max_size=20),
    FieldKind.JSON: _JSON,
    FieldKind.FLAG: st.booleans(),
}


@st.composite
def contexts(draw):
    kind = draw(st.sampled_from(KINDS))
    values = {}
    for field, default in kind.layout():
        values[field.name] = draw(st.just(default) | _VALUES[field.kind])
    return kind(**values)


def codecs(kind):
    compiled = context_codec(kind)
    assert type(compiled) is not PythonContextCodec
    return compiled, PythonContextCodec(kind)


def outcome(function, argument):
    """Return a function's result, or ValueError if it raises that."""
    try:
        return function(argument)
    except ValueError:
        return ValueError


@needs_module
def test_both_tables_are_one():
    assert [tuple(field) for field in native().CONTEXT_FIELDS] == [tuple(f) for f in FIELDS]
    assert [field.tag for field in FIELDS] == list(range(len(FIELDS)))
    named = {field.name for kind in KINDS for field, _ in kind.layout()}
    assert named == {field.name for field in FIELDS}
    for kind in KINDS:
        assert {field.name for field, _ in kind.layout()} == set(kind.__dataclass_fields__)


@needs_module
@given(contexts())
@example(RequestContext(parameters="\ud800"))
@example(CallContext(version=-(1 << 63)))
@example(RequestContext(state=[0, False]))
def test_both_codecs_write_and_read_the_same(context):
    compiled, python = codecs(type(context))
    raw = python.encode(context)
    assert compiled.encode(context) == raw
    assert raw == context.encoded()
    for codec in (compiled, python):
        again = codec.decode(raw)
        assert type(again) is type(context)
        assert again.encoded() == raw
        if context.parameters != "\ud800":
            assert again == context


@needs_module
@given(st.data())
def test_both_codecs_refuse_the_same_bytes(data):
    kind = data.draw(st.sampled_from(KINDS))
    raw = bytearray(data.draw(contexts()).encoded() or data.draw(st.binary(max_size=40)))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3)
    ):
        if at < len(raw):
            raw[at] = value
    raw = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    compiled, python = codecs(kind)
    found = outcome(compiled.decode, raw)
    assert repr(found) == repr(outcome(python.decode, raw))


@needs_module
@given(st.sampled_from(KINDS), st.data())
def test_both_codecs_refuse_the_same_values(kind, data):
    odd = st.sampled_from([-1, 1 << 63, 1 << 64, 1.5, "x", b"x", None, True, object()])
    field, _ = data.draw(st.sampled_from(kind.layout()))
    if field.kind != FieldKind.JSON:
        context = kind(**{field.name: data.draw(odd)})
        compiled, python = codecs(kind)
        assert outcome(compiled.encode, context) == outcome(python.encode, context)


@pytest.fixture(params=["native", "python"])
def codec(request):
    if request.param == "native" and native() is None:
        pytest.skip("no compiled module")
    return context_codec if request.param == "native" else PythonContextCodec


def mask_of(*names):
    return struct.pack("<I", sum(1 << field.tag for field in FIELDS if field.name in names))


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\0", "ends in the middle"),
        (b"\0\0\0", "ends in the middle"),
        (mask_of("timeout"), "ends in the middle"),
        (mask_of("timeout") + bytes(7), "ends in the middle"),
        (mask_of("timeout") + bytes(9), "1 bytes after its end"),
        (mask_of("shared") + b"\0", "1 bytes after its end"),
        (mask_of("parameters") + bytes(3), "ends in the middle"),
        (mask_of("parameters") + struct.pack("<I", 3) + b"ab", "ends in the middle"),
        (mask_of("parameters") + struct.pack("<I", 0xFFFF_FFFF) + b"ab", "ends in the middle"),
        (mask_of("model"), "unknown fields"),
        (struct.pack("<I", 1 << 31), "unknown fields"),
        (mask_of("parameters") + struct.pack("<I", 1) + b"\xff", "UTF-8|utf-8"),
        (mask_of("parameters") + struct.pack("<I", 2) + b"\xc0\x80", "UTF-8|utf-8"),
        (mask_of("parameters") + struct.pack("<I", 3) + b"\xed\xa0\x80", "UTF-8|utf-8"),
        (mask_of("client") + struct.pack("<I", 1) + b"{", "Expecting property name"),
        (mask_of("client") + struct.pack("<I", 0), "Expecting value"),
        (mask_of("client") + struct.pack("<I", 99_999) + b"[" * 99_999, "too deep"),
    ],
)
def test_malformed_contexts_are_refused(codec, raw, error):
    with pytest.raises(ValueError, match=error):
        codec(RequestContext).decode(raw)


def test_a_context_without_fields_has_no_bytes(codec):
    for kind in KINDS:
        assert codec(kind).encode(kind()) == b""
        assert codec(kind).decode(b"") == kind()


def test_a_context_is_encoded_once():
    context = RequestContext(flags=1)
    assert context.encoded() is context.encoded()
    changed = context.changed(trace=7)
    assert (changed.flags, changed.trace, context.trace) == (1, 7, 0)
    assert changed.encoded() != context.encoded()
    with pytest.raises(AttributeError):
        context.changed(no_field=1)
