"""Long messages of stubs: read beside the event loop, which runs on, and told as short ones are."""

import json
import threading
import time

import pytest
from hypothesis import example, given, strategies as st

from gpubridge import dataplane
from gpubridge.engine.ipc.long_messages import read_message
from gpubridge.request import EncodedParameters, LongParameters, merged_parameters
from gpubridge.schema import message_class
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.messages import encode_responses
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_signature

VALUES = st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text()
FIELDS = {"b": "bool_param", "i": "int64_param", "u": "uint64_param", "s": "string_param"}
LEAST_TURNS = 100
"""A thread gets more than that beside work of tenths of a second that holds no lock; one or two else."""


def turns_beside(work):
    """Return how often this thread ran while another one worked, and what that returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    return turns, results[0]


def message_of(context):
    record = record_encoder()(1, encode_signature(()), b"", [], 0, b"", context.encoded())
    return encode_responses([record], 0)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='"\\'))


@given(st.dictionaries(NAMES, VALUES), st.booleans())
@example({"a": "\x7f\u2028😀", "b": -1, "c": 1 << 63, "": True}, True)
def test_parameters_are_packed_as_protobuf_packs_them(parameters, ascii_only):
    wanted = message_class("ModelInferResponse")()
    for name, value in parameters.items():
        kind = "b" if isinstance(value, bool) else "s" if isinstance(value, str) else "i"
        kind = "u" if kind == "i" and value >= 1 << 63 else kind
        setattr(wanted.parameters[name], FIELDS[kind], value)
    text = json.dumps(parameters, ensure_ascii=ascii_only).encode()
    packed = dataplane.pack_json_parameters(text)
    if any(not name.isascii() or not name.isprintable() for name in parameters):
        assert packed is None or type(wanted).FromString(packed) == wanted
    else:
        assert type(wanted).FromString(packed) == wanted


NOT_PACKED = r"""
{
[]
{"a":1
{"a":1,}
{"a":1}{
{"a" 1}
{"a":1 2}
{"a":null}
{"a":1.5}
{"a":[1]}
{"a":{}}
{"a":18446744073709551616}
{"a":-9223372036854775809}
{"a":01}
{"a":tru}
{"a":"\ud800"}
{"a":"\x"}
{"a":"
{"a":1,"a":2}
{"\u0061":1}
"""
NOT_PACKED_EITHER = ["{} ", " {}", '{"a":"\t"}', '{"\t":1}', b'{"a":"\xff"}', b'{"\xff":1}']


@pytest.mark.parametrize("text", [*NOT_PACKED.split("\n"), *NOT_PACKED_EITHER])
def test_other_parameters_are_not_packed(text):
    data = text if isinstance(text, bytes) else text.encode()
    assert dataplane.pack_json_parameters(data) is None


@pytest.mark.parametrize("field", ["parameters", "error"])
def test_others_run_while_a_long_message_is_read(field):
    text = 'x\\"é' * 2_000_000
    if field == "parameters":
        text = json.dumps({"a": text, "b": "y" * 10_000_000})
    message = message_of(ResponseContext(**{field: text}))
    turns, read = turns_beside(lambda: read_message(message))
    assert turns > LEAST_TURNS
    assert len(read.message) < 1000
    assert len(read.texts) == 1


def test_short_parameters_are_decoded():
    text = json.dumps({"a": "x" * 100_000, "b": "\ud800", "c": 10**30, "d": None})
    (texts,) = read_message(message_of(ResponseContext(parameters=text))).texts
    assert texts.parameters == json.loads(text)


def encoded(text):
    data = text.encode()
    packed = dataplane.pack_json_parameters(data)
    return LongParameters([EncodedParameters(memoryview(data)[1:-1], packed)])


def test_parameters_of_several_responses_are_merged():
    assert merged_parameters([None, {}, None]) is None
    one, other = {"a": 1, "b": 1}, {"b": 2}
    assert merged_parameters([one, other, other]) == {"a": 1, "b": 2}
    assert merged_parameters([one, other, one]) == {"a": 1, "b": 1}
    assert one == {"a": 1, "b": 1}
    long = encoded('{"l":3}')
    assert merged_parameters([long, long]) == long
    last = encoded('{"m":4}')
    merged = merged_parameters([one, None, other, long, {"c": 1}, last, {"d": 1}, long])
    assert merged.parts == [{"a": 1, "b": 2, "c": 1}, *last.parts, {"d": 1}, *long.parts]
