"""Values of JSON arrays: packed by compiled code as orjson and NumPy pack them, or not at all."""

import json
import math

import numpy as np
import orjson
import pytest
from hypothesis import example, given, strategies as st

from gpubridge import dataplane
from gpubridge.errors import BridgeError
from gpubridge.protocol import infer_request
from gpubridge.protocol.json_tensor import JSON_DATATYPES, input_from_json
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import numpy_dtype
from tests.fuzz.budget import fuzzed
from tests.unit.guarded_pages import guarded_pages
from tests.unit.model_configs import model_config

SPELLINGS = """
    -0 -0.0 0e0 1E5 1.0E+5 1e400 -1e400 1e-400 01 1. .5 +1 1e 1e+ - 0x1 18446744073709551615
    9223372036854775808 0.1000000000000000055511151231257827021181583404541015625 123456789012345678
    1.7976931348623159e308 2.2250738585072011e-308 NaN Infinity 5e-324 2e-324 1e-329 1e-330 1e-331
    0.00000000000000000000000001e-310 1e99999999999999999999 0e99999999999999999999 -0e-400 12345678
    1e-99999999999999999999 9007199254740993 -9223372036854775809 -9223372036854775808 1.12345678
    0.00000000000000000000000000000000000000000000000000001 1.1234567/ 1.12345678: 18446744073709551616
"""
NUMBERS = st.one_of(
    st.integers(-(1 << 66), 1 << 66).map(str),
    st.floats().map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map(orjson.dumps).map(bytes.decode),
    st.sampled_from(SPELLINGS.split()),
)
STRINGS = st.one_of(
    st.text().map(orjson.dumps).map(bytes.decode),
    st.text().map(json.dumps),
    st.sampled_from(
        ['"\\ud83d\\ude00"', '"\\ud800"', '"\\udc00x"', '"\\x"', '"\t"', '"a', '"\\/"']
    ),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", "tru", "{}", ""])),
    lambda inner: st.lists(inner, max_size=4).map(lambda items: f"[{' , '.join(items)}]"),
    max_leaves=12,
)
ARRAYS = st.lists(VALUES, max_size=6).map(lambda items: f"[{','.join(items)}]".encode())


def reference(text, datatype, count):
    """Pack as Python does; None where that is an error."""
    try:
        entry = input_from_json("A", datatype, (count,), orjson.loads(text))
    except (BridgeError, orjson.JSONDecodeError):
        return None
    return None if entry.miscounted else entry.data


@pytest.mark.slow
@fuzzed(5)
@given(ARRAYS, st.sampled_from(sorted(JSON_DATATYPES)), st.integers(0, 6))
@example(b'["\xff"]', "BYTES", 1)
@example(b'["\xed\xa0\x80"]', "BYTES", 1)
@example(b'["\xf4\x90\x80\x80"]', "BYTES", 1)
@example(b"[1]x", "INT8", 1)
@example(b"[[1],[,2]]", "INT8", 2)
@example(b"[3e38, -1e39]", "FP32", 2)
@example(b"[41396444255383365e-10, 36361359135263772e10]", "FP64", 2)
def test_packed_values_are_those_of_the_reference(text, datatype, count):
    packed = dataplane.pack_json_values(text, 0, len(text), datatype, count)
    assert packed == reference(text, datatype, count)


def test_values_nested_deeper_than_any_tensor_are_left_to_python():
    text = b"[" * 65 + b"1" + b"]" * 65
    assert dataplane.pack_json_values(text, 0, len(text), "INT8", 1) is None


@given(st.sampled_from(sorted(JSON_DATATYPES - {"BYTES", "BOOL"})), st.binary(max_size=64))
def test_formatted_numbers_read_back_as_they_were(datatype, raw):
    dtype = numpy_dtype(datatype)
    values = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    text = dataplane.format_json_values(values.tobytes(), datatype, values.size)
    back = json.loads(text)
    assert len(back) == values.size
    for got, value in zip(back, values.tolist(), strict=True):
        assert got == value or (math.isnan(got) and math.isnan(value))
        assert type(got) is type(value)


AS_TRITON_WRITES_THEM = """
    0.0 -0.0 1.0 -5.0 0.1 100000.0 10000000000000000.0 100000000000000000000.0 1e21 1e22 1.5e21 0.0001
    0.000001 1e-7 0.0000015 1.5e-7 0.00000999999 -123456.789 1.7976931348623157e308 5e-324
    2.2250738585072014e-308 9007199254740992.0 9007199254740994.0 18446744073709552000.0
    123456789012345680000.0 1.2345678901234568e21 0.10000000149011612 9.999999974752427e-7 1.5e300 NaN Infinity -Infinity
"""


@pytest.mark.parametrize("text", AS_TRITON_WRITES_THEM.split())
def test_doubles_are_written_as_triton_writes_them(text):
    data = np.array([float(text)]).tobytes()
    assert dataplane.format_json_values(data, "FP64", 1) == b"[%b]" % text.encode()


@given(st.lists(st.text(), max_size=6))
def test_formatted_strings_are_those_of_orjson(texts):
    data = bytes_codec.encode(np.array([*texts, None], object)[:-1])
    assert dataplane.format_json_values(data, "BYTES", len(texts)) == orjson.dumps(texts)


@pytest.mark.parametrize("data", [b"\1\0\0", b"\2\0\0\0a", b"\0\0\0\0"])
def test_strings_that_are_none_are_not_formatted(data):
    count = 1 if data != b"\0\0\0\0" else 2
    assert dataplane.format_json_values(data, "BYTES", count) is None


def test_ranges_outside_the_document_are_refused():
    with pytest.raises(ValueError, match="inside the document"):
        dataplane.pack_json_values(b"[1]", 1, 3, "INT8", 1)


CONFIG = model_config("A FP32 [-1];B STRING [-1]")


def parsed(raw, without_values):
    """Return what a request's JSON says, by one of the two ways, or the error's text."""
    try:
        if without_values:
            return infer_request.parse_request(raw, CONFIG, 0)
        return infer_request._read_request(
            infer_request.parse_json(raw),
            CONFIG,
            0,
            infer_request.nothing_registered,
            infer_request.NO_LONG_STRINGS,
        )
    except BridgeError as error:
        return error.message


MEMBERS = r"""
    "data":[1,2] "data":["a","\u00e9"] "data":{"x":[1]} "data":[1,] "d\u0061ta":[1,2] "shape":[2]
    "shape":[0] "parameters":{"binary_data_size":0} "name":"A" "name":"B" "datatype":"FP32"
    "datatype":"BYTES"
"""
ENTRIES = st.lists(st.sampled_from(MEMBERS.split()), max_size=6).map(
    lambda members: "{" + ",".join(members) + "}"
)
WHOLE = st.sampled_from(
    [
        '{"name":"A","shape":[2],"datatype":"FP32","data":[1,2]}',
        '{"name":"B","datatype":"BYTES","data":[["x"],["\\n\\ud83d\\ude00"]],"shape":[2]}',
    ]
)
DOCUMENTS = st.tuples(
    st.lists(st.one_of(ENTRIES, WHOLE), max_size=3).map(
        lambda items: f'"inputs":[{",".join(items)}]'
    ),
    st.lists(
        st.sampled_from(['"id":"x"', '"inputs":[]', '"data":[3]', '"x":[{"data":[1}]', '"y":NaN']),
        max_size=2,
    ),
).map(lambda parts: ("{" + ",".join([parts[0], *parts[1]]) + "}").encode())


@fuzzed(5)
@given(DOCUMENTS)
def test_a_request_means_the_same_with_its_values_taken_out(raw):
    assert repr(parsed(raw, True)) == repr(parsed(raw, False))


@pytest.mark.parametrize("text", [*SPELLINGS.split(), "0." + "0" * 40, "0" * 40, '"a', "[0"])
def test_nothing_behind_a_text_is_read(text):
    """A request that is cut off within a number, at the end of its memory."""
    cut = b"[" + text.encode()
    with guarded_pages() as (memory, page):
        memory[2 * page - len(cut) : 2 * page] = cut
        whole = memoryview(memory)[page : 2 * page]
        assert dataplane.pack_json_values(whole, page - len(cut), len(cut), "FP64", 1) is None
        whole.release()
