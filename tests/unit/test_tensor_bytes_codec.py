"""The BYTES codec: one behaviour, with the compiled module and without."""

import enum
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import bytes_codec, native, strings


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "python":
        for module in (bytes_codec, strings):
            monkeypatch.setattr(module, "native", lambda: None)
    elif native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    return request.param


def serialised(*items):
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def objects(*items):
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array


STRINGS = [b"", b"a", b"\0\0", b"trailing\0", bytes(range(256)), b"x" * 70000]


def test_bytes_survive_both_ways():
    encoded = bytes_codec.encode(objects(*STRINGS))
    assert encoded == serialised(*STRINGS)
    decoded = bytes_codec.decode(encoded, len(STRINGS))
    assert decoded.dtype == np.object_
    assert decoded.shape == (len(STRINGS),)
    assert decoded.tolist() == STRINGS
    assert {type(item) for item in decoded} == {bytes}


def test_other_elements_go_through_str_and_utf8():
    class Label(str, enum.Enum):
        CAT = "cat"

    items = [
        "grün",
        "日本",
        Label.CAT,
        7,
        2.5,
        None,
        True,
        np.bytes_(b"nb"),
        np.str_("ns"),
        bytearray(b"x"),
    ]
    expected = [b"nb" if isinstance(i, bytes) else str(i).encode() for i in items]
    assert bytes_codec.encode(objects(*items)) == serialised(*expected)


def test_lone_surrogate_has_no_utf8_form():
    with pytest.raises(UnicodeEncodeError):
        bytes_codec.encode(objects("ok", "\ud800"))


def test_an_element_whose_str_fails_fails_the_call():
    class Sour:
        def __str__(self):
            raise RuntimeError("sour")

    with pytest.raises(RuntimeError, match="sour"):
        bytes_codec.encode(objects(b"ok", Sour()))


def test_an_element_may_replace_others_while_it_is_encoded():
    array = objects(b"first" * 10, None, b"last")

    class Meddler:
        def __str__(self):
            array[0] = array[2] = b"replaced"
            array.resize(1, refcheck=False)
            return "meddler"

    array[1] = Meddler()
    decoded = bytes_codec.decode(bytes_codec.encode(array), 3)
    assert decoded.tolist() == [b"first" * 10, b"meddler", b"last"]


@pytest.mark.parametrize(
    "items", [objects("a", "bc", ""), [b"ab", b"c", b""], [b"ab", b"cd"], ["ä", "bc", ""]]
)
def test_arrays_of_text_or_bytes_only(items):
    expected = [each if isinstance(each, bytes) else each.encode() for each in items]
    assert bytes_codec.encode(np.asarray(items)) == serialised(*expected)
    assert strings.encode_strings(list(items)) == serialised(*expected)


@pytest.mark.parametrize("dtype", ["O", "S2", "U2"])
def test_shape_is_flattened_in_c_order(dtype):
    array = np.array([[b"a", b"bb", b"c"], [b"d", b"e", b"ff"]]).astype(dtype)
    expected = [item if isinstance(item, bytes) else item.encode() for item in array.ravel()]
    assert bytes_codec.encode(array) == serialised(*expected)
    assert bytes_codec.encode(np.asfortranarray(array)) == serialised(*expected)
    assert bytes_codec.encode(array[:, ::2]) == serialised(*[expected[i] for i in (0, 2, 3, 5)])
    assert bytes_codec.encode(array[0, 0:1].reshape(())) == serialised(expected[0])


def test_no_elements_no_bytes():
    for dtype in ("O", "S3", "U3"):
        assert bytes_codec.encode(np.empty((0, 4), dtype)) == b""
    assert bytes_codec.decode(b"", 0).shape == (0,)
    assert bytes_codec.decode(b"").dtype == np.object_
    strings.validate(b"", 0)


def test_numbers_are_not_strings():
    with pytest.raises(BridgeError, match=r"expected an array of dtype object, S or U.*float64"):
        bytes_codec.encode(np.zeros(3))


MALFORMED = [
    (b"\1", strings.INCOMPLETE_LENGTH),
    (serialised(b"ab") + b"\0\0\0", strings.INCOMPLETE_LENGTH),
    (b"\1\0\0\0", strings.STRING_BEYOND_BUFFER),
    (serialised(b"ab", b"cde")[:-1], strings.STRING_BEYOND_BUFFER),
    (b"\xff\xff\xff\xff" + b"x" * 10, strings.STRING_BEYOND_BUFFER),
]


@pytest.mark.parametrize(("data", "text"), MALFORMED)
def test_malformed_data(data, text):
    for call in (bytes_codec.decode, strings.validate):
        with pytest.raises(BridgeError) as caught:
            call(data, 2)
        assert caught.value.message == text
        assert caught.value.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_count_than_the_shape_asks_for(count):
    data = serialised(b"a", b"bc")
    for call in (bytes_codec.decode, strings.validate):
        with pytest.raises(BridgeError, match=f"expected {count} strings .* got 2"):
            call(data, count)
    strings.validate(data, 2)


# The other one decodes a copy.
@pytest.mark.parametrize("implementation", ["native"], indirect=True)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_strings_that_change_between_counting_and_decoding(implementation, monkeypatch, count):
    decode = native.native().bytes_decode
    counted = SimpleNamespace(bytes_count=lambda _: count, bytes_decode=decode)
    monkeypatch.setattr(bytes_codec, "native", lambda: counted)
    with pytest.raises(BridgeError, match=r"too (few|many) strings"):
        bytes_codec.decode(serialised(b"a", b"bc"))


def test_views_of_foreign_memory_are_copied_out():
    memory = bytearray(serialised(b"abc", b"de"))
    decoded = bytes_codec.decode(memoryview(memory), 2)
    memory[:] = b"\xff" * len(memory)
    assert decoded.tolist() == [b"abc", b"de"]


def test_decoded_strings_are_freed(implementation):
    decoded = bytes_codec.decode(serialised(b"unique string 1", b"unique string 2"))
    # One reference in the array, one in `item`, one in the call.
    item = decoded[0]
    assert sys.getrefcount(item) == 3


def test_encoding_keeps_no_reference():
    item = b"held by the array and by this name"
    array = objects(item, "text")
    before = sys.getrefcount(item)
    bytes_codec.encode(array)
    assert sys.getrefcount(item) == before
