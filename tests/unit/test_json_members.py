"""JSON of more parts than a parser takes in a moment: none is parsed, whatever has them."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from gpubridge.dataplane import count_json_parts
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import fields
from gpubridge.protocol.fields import MOST_ARRAYS, MOST_DIMS, MOST_MEMBERS, MOST_VALUES, parse_json
from gpubridge.protocol.grpc import infer_request
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.multipart import parse_form
from gpubridge.protocol.openai import OpenAiRequest
from tests.unit.model_configs import model_config

MANY = 2 * MOST_MEMBERS
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def parts(value):
    """Return how many members and objects, arrays and commas a value has."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    own = (1 + len(value), 0) if isinstance(value, dict) else (0, 1)
    inner = map(parts, value.values() if isinstance(value, dict) else value)
    return tuple(map(sum, zip((*own, max(len(value) - 1, 0)), *inner, strict=True)))


@given(DOCUMENTS, st.booleans(), st.sampled_from([(",", ":"), (" ,\n", "\t: ")]))
def test_they_are_counted_outside_of_strings(value, ascii_only, separators):
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    text = text.encode(errors="surrogatepass")
    assert count_json_parts(text) == count_json_parts(memoryview(text)) == parts(value)


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'{"a', b"{{{", b"\0:", b"[,"])
def test_a_document_need_not_be_valid(text):
    members = text.count(b"{") + text.count(b":")
    assert count_json_parts(text) == (members, text.count(b"["), text.count(b","))


@pytest.fixture
def parsed(monkeypatch):
    """Sizes of the documents that reach a parser."""
    sizes = []
    parse = fields.orjson.loads
    monkeypatch.setattr(fields.orjson, "loads", lambda body: sizes.append(len(body)) or parse(body))
    return sizes


def keys():
    return {f"k{number}": 1 for number in range(MANY)}


INPUT = {"name": "A", "datatype": "FP32", "shape": [1], "data": [1]}


@pytest.mark.parametrize(
    "document",
    [
        lambda: {"inputs": [INPUT], "parameters": keys()},
        lambda: {"inputs": [{**INPUT, **keys()}]},
        lambda: {"inputs": [INPUT], "outputs": [{}] * MANY},
        keys,
    ],
)
def test_too_many_members_are_refused_unparsed(parsed, document):
    body = json.dumps(document()).encode()
    told = rf"expected at most {MOST_MEMBERS} members and objects .* got [1-9]\d{{5}}"
    with pytest.raises(BridgeError, match=told) as caught:
        parse_json(body)
    assert caught.value.code == ErrorCode.INVALID_ARG
    assert parsed == []


@pytest.mark.parametrize(
    ("value", "most", "what"),
    [(b"[]", MOST_ARRAYS, "arrays"), (b"1", MOST_VALUES, "values"), (b'""', MOST_VALUES, "values")],
)
def test_too_many_values_are_refused_unparsed(parsed, value, most, what):
    told = rf"expected at most {most} {what} in the JSON of a request, got {most // 100}\d\d:"
    body = b'{"inputs":[%b]}' % b",".join([value] * (most + 1))
    with pytest.raises(BridgeError, match=told):
        parse_json(body)
    half = b"[%b]" % b",".join([value] * (most // 2 + 1))
    part = b'--b\r\nContent-Disposition: form-data; name="A"\r\n\r\n%b\r\n' % half
    with pytest.raises(BridgeError, match=told):
        parse_form(part + part + b"--b--", model_config("A INT32 [-1]"), b"b")
    assert parsed == []


@pytest.mark.parametrize(
    ("endpoint", "given"),
    [
        ("chat", lambda: {"messages": [{"role": "user", "content": "a"}] * MANY}),
        ("embeddings", lambda: {"input": ["a"] * MOST_VALUES}),
        ("embeddings", lambda: {"input": [12345] * MOST_VALUES}),
    ],
)
def test_too_much_for_openai_is_refused_unparsed(parsed, endpoint, given):
    body = json.dumps({"model": "m", **given()})
    with pytest.raises(BridgeError, match=r"expected at most \d+ .* got \d+"):
        OpenAiRequest(body.encode(), endpoint)
    assert parsed == []


@pytest.mark.parametrize("given", [["a"] * 65537, [7] * 65537, [[7], [7] * 65537], [[7]] * 65537])
def test_each_array_of_openai_has_a_limit(given):
    told = "Invalid value for 'input': expected arrays of at most 65536 elements, got 65537."
    with pytest.raises(BridgeError, match=told):
        OpenAiRequest(json.dumps({"model": "m", "input": given}).encode(), "embeddings")
    allowed = {"model": "m", "input": [[12345] * 8192] * 36}
    assert OpenAiRequest(json.dumps(allowed).encode(), "embeddings").rows == 36


@pytest.mark.parametrize("sent", [{"data": [1]}, {"parameters": {"binary_data_size": 4}}])
def test_a_shape_has_few_dims(sent):
    """The product of a million costs the square of their number."""
    tensor = {"name": "A", "datatype": "FP32", "shape": [2] * (MOST_DIMS + 1), **sent}
    told = f"expected a shape of at most {MOST_DIMS} dims for input 'A', got {MOST_DIMS + 1} dims"
    with pytest.raises(BridgeError, match=told):
        parse_request(json.dumps({"inputs": [tensor]}).encode(), model_config("A FP32 [-1]"), 4)
    given = SimpleNamespace(HasField=lambda _: False, **tensor)
    with pytest.raises(BridgeError, match=told):
        infer_request._input(given, SimpleNamespace(sizes=[4]), "m", iter([4]), None)


def test_as_many_as_are_allowed_and_long_texts_are_parsed(parsed):
    document = dict(list(keys().items())[: MOST_MEMBERS - 1])
    assert len(parse_json(json.dumps(document).encode())) == MOST_MEMBERS - 1
    text = '{"a:":{,' * MANY
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}
    assert len(parsed) == 2
