"""Forms as inference requests: what parts become, and that no body whatever is anything but an error."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.multipart import form_boundary, parse_form
from gpubridge.tensor.bytes_codec import encode
from tests.unit.model_configs import model_config

TYPES = "IMAGE STRING [1]; MASK UINT8 [-1] optional: true; K FP32 [2] optional: true"
ONE = model_config(TYPES)
BATCH = model_config("IMAGE STRING [1]", "", "max_batch_size: 4")


def part(name, content, more=b"", disposition=b'form-data; name="%b"'):
    return b"Content-Disposition: " + disposition % name + more + b"\r\n\r\n" + content


def form(*parts, boundary=b"xx", end=b"--\r\n"):
    return b"".join(b"--%b\r\n%b\r\n" % (boundary, each) for each in parts) + b"--" + boundary + end


FILE = b'; filename="a.jpg"\r\nContent-Type: image/jpeg'
IMAGE = part(b"IMAGE", b"\0\xff\r\n--x\r\n", FILE)


def parsed(body, config=ONE):
    inputs = parse_form(body, config, b"xx").inputs
    return {entry.name: (entry.shape, bytes(entry.data)) for entry in inputs}


def strings(*values):
    return bytes(encode(np.array(values, object)))


@pytest.mark.parametrize(
    ("config", "parts", "expected"),
    [
        (ONE, [IMAGE], {"IMAGE": ((1,), strings(b"\0\xff\r\n--x\r\n"))}),
        (ONE, [part(b"IMAGE", b"")], {"IMAGE": ((1,), strings(b""))}),
        (BATCH, [IMAGE] * 2, {"IMAGE": ((2, 1), strings(*[b"\0\xff\r\n--x\r\n"] * 2))}),
        (
            ONE,
            [IMAGE, part(b"MASK", b"\1\2\3", FILE), part(b"K", b"[1, 2.5]")],
            {"MASK": ((3,), b"\1\2\3"), "K": ((2,), np.float32([1, 2.5]).tobytes())},
        ),
        (
            ONE,
            [part(b"K", b"1"), part(b"K", b" 2.5 "), IMAGE],
            {"K": ((2,), np.float32([1, 2.5]).tobytes())},
        ),
        (
            ONE,
            [IMAGE, part(b"K", np.float32([1, 2]).tobytes(), FILE)],
            {"K": ((2,), np.float32([1, 2]).tobytes())},
        ),
    ],
)
def test_parts_are_inputs(config, parts, expected):
    inputs = parsed(form(*parts), config)
    assert {name: inputs[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            [part(b"WRONG", b"x")],
            "unexpected inference input 'WRONG' for model 'm': its inputs are 'IMAGE', ",
        ),
        ([], "a line that begins with its boundary goes on"),
        ([IMAGE, IMAGE], "expected as many elements as the shape [1] has, got 2"),
        ([IMAGE, part(b"K", b"x")], "failed to parse the request JSON buffer"),
        ([IMAGE, part(b"K", b'["a", 2]')], "for element 0 of input 'K' (FP32), got \"a\""),
        (
            [IMAGE, part(b"K", b"abc", FILE)],
            "expected a file of elements of 4 bytes (FP32), got 3 bytes",
        ),
        ([IMAGE, part(b"K", b"a" * 8, FILE), part(b"K", b"1")], "expected one file, got 2 parts"),
        ([b"\r\n\r\nx"], "a part lacks Content-Disposition"),
        ([part(b"", b"x", b"", b"form-data%b")], "a part lacks Content-Disposition"),
        ([part(b"IMAGE", b"x", b"", b"attachment; name=%b")], "a part lacks Content-Disposition"),
        ([part(b"IMAGE", b"x", b'; name="K"')], "a part lacks Content-Disposition"),
        ([b"no head"], "a part has no empty line after a head"),
        ([part(b"IMAGE", b"x", b"; a=" + b"a" * 5000)], "a part has no empty line after a head"),
        (
            [part(b"IMAGE", b"x", b"\r\nContent-Transfer-Encoding: base64")],
            "has a Content-Transfer-Encoding",
        ),
        ([part(b"IMAGE", b"x")] * 1025, "expected a form of at most 1024 parts, got more"),
        ([part(b"IMAGE", b"x\r\n--xxx")], "a line that begins with its boundary goes on"),
    ],
)
def test_what_is_wrong_with_a_form_is_told(parts, text):
    end = b"--" if parts else b""
    with pytest.raises(BridgeError) as caught:
        parse_form(form(*parts, end=end), ONE, b"xx")
    assert text in caught.value.message
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_form_that_is_cut_short_anywhere_is_refused():
    body = form(IMAGE, part(b"K", b"[1, 2]"), end=b"--")
    parsed(body)
    for length in range(len(body)):
        with pytest.raises(BridgeError):
            parsed(body[:length])


@given(
    st.lists(
        st.sampled_from(
            [b"--xx", b"\r\n", b"--", b'"', b";", b"name=", b"\\", b":", b" ", b"form-data", b"x"]
        )
    )
)
def test_any_bytes(pieces):
    with suppress(BridgeError):
        parsed(b"--xx\r\nContent-Disposition: form-data" + b"".join(pieces))


@pytest.mark.parametrize(
    ("value", "boundary"),
    [
        (None, None),
        (b"application/json", None),
        (b"multipart/form-data; boundary=----a_b", b"----a_b"),
        (b'Multipart/Form-Data; charset=utf-8; BOUNDARY="a \\"b"', b'a "b'),
        *(
            (b"multipart/form-data" + rest, BridgeError)
            for rest in (
                b"",
                b"; boundary=",
                b'; boundary=""',
                b"; boundary=" + b"a" * 71,
                b"; boundary=\xe9",
                b"; boundary=a; boundary=b",
                b"boundary=a",
            )
        ),
    ],
)
def test_the_boundary_is_that_of_the_header(value, boundary):
    if boundary is BridgeError:
        with pytest.raises(BridgeError, match="boundary of 1 to 70 ASCII characters"):
            form_boundary(value)
    else:
        assert form_boundary(value) == boundary


def test_the_form_of_a_request_has_json_outputs():
    request = parse_form(form(IMAGE), ONE, b"xx")
    assert (request.identifier, request.outputs, request.binary_default) == ("", None, False)
    assert request.packed
