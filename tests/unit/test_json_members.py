"""JSON of more members than a parser takes in a moment: none is parsed, whatever has them."""

import json

import pytest
from hypothesis import given, strategies as st

from gpubridge.dataplane import count_json_members
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import fields
from gpubridge.protocol.fields import MOST_MEMBERS, parse_json
from gpubridge.protocol.openai import OpenAiRequest

MANY = 2 * MOST_MEMBERS
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def members(value):
    """Return how many members and objects a value has."""
    if isinstance(value, dict):
        return 1 + sum(1 + members(each) for each in value.values())
    return sum(map(members, value)) if isinstance(value, list) else 0


@given(DOCUMENTS, st.booleans(), st.sampled_from([(",", ":"), (" ,\n", "\t: ")]), st.integers(0, 9))
def test_they_are_counted_outside_of_strings(value, ascii_only, separators, most):
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    text = text.encode(errors="surrogatepass")
    count = members(value)
    assert count_json_members(text, 1 << 62) == count
    assert count_json_members(memoryview(text), most) == min(count, most + 1)


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'{"a', b"{{{", b"\0:"])
def test_a_document_need_not_be_valid(text):
    assert count_json_members(text, 100) == text.count(b"{") + (text == b"\0:")


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
    with pytest.raises(BridgeError, match=f"expected at most {MOST_MEMBERS} members") as caught:
        parse_json(body)
    assert caught.value.code == ErrorCode.INVALID_ARG
    assert parsed == []


def test_too_many_messages_are_refused_unparsed(parsed):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * MANY})
    with pytest.raises(BridgeError, match="expected at most"):
        OpenAiRequest(body.encode(), "chat")
    assert parsed == []


def test_as_many_as_are_allowed_and_long_texts_are_parsed(parsed):
    document = dict(list(keys().items())[: MOST_MEMBERS - 1])
    assert len(parse_json(json.dumps(document).encode())) == MOST_MEMBERS - 1
    text = '{"a:":{,' * MANY
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}
    assert len(parsed) == 2
