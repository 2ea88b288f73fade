"""Documents with long strings: what they say, and what is wrong with them, is what the whole says."""

import base64
import json

import pytest

from gpubridge import dataplane
from gpubridge.errors import BridgeError
from gpubridge.protocol import control, infer_request
from gpubridge.protocol.control import read_load
from gpubridge.protocol.infer_request import parse_request
from tests.unit.model_configs import model_config

CONFIG = model_config("A FP32 [-1] optional: true;S STRING [-1] optional: true")
LONG = 'é\n"\\/\u2028\U0001f600' * 10_000
TENSOR = {"name": "A", "datatype": "FP32", "shape": [2], "data": [1, 2.5]}


def said(read, *given):
    try:
        return read(*given)
    except BridgeError as error:
        return error.code, error.message


def agree(monkeypatch, read, *given):
    """Return what is said of a document, which is what is said of it where nothing is taken out."""
    found = said(read, *given)
    with monkeypatch.context() as patch:
        patch.setattr(dataplane, "split_long_strings", lambda _: None)
        whole = said(read, *given)
    if isinstance(found, tuple) or isinstance(whole, tuple):
        assert found == whole
    return found


def parameters_of(form):
    return json.loads(bytes(form.context.parameters))


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("inputs", [[], [TENSOR]], ids=["none", "one"])
def test_long_parameters_reach_the_model(monkeypatch, ascii_only, inputs):
    given = {"one": LONG, "n": 1, "short": "\0" if ascii_only else "x", "two": LONG + "2", "f": 2.5}
    document = {"id": "i", "inputs": inputs, "parameters": {**given, "timeout": 7}}
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    parsed = []
    parse = infer_request.parse_json
    monkeypatch.setattr(
        infer_request, "parse_json", lambda text: parsed.append(text) or parse(text)
    )
    form = parse_request(body, CONFIG, 0)
    assert parameters_of(form) == given
    assert (form.identifier, form.options.timeout_us) == ("i", 7)
    # An escaped NUL could stand for a long string: nothing is taken out then.
    assert bool(parsed) == (ascii_only and not inputs)


WRONG = [
    '{"inputs":[],"parameters":{"a":"%s\\x"}}',
    '{"inputs":[],"parameters":{"a":"%s\\ud800"}}',
    '{"inputs":[],"parameters":{"a":"%s\n"}}',
    '{"inputs":[],"parameters":{"a":"%s}}',
    '{"inputs":[],"parameters":{"a":["%s"]}}',
    '{"inputs":[],"parameters":{"sequence_id":"%s"}}',
    '{"inputs":[],"parameters":{"timeout":"%s"}}',
    '{"inputs":[],"parameters":{"triton_a":"%s"}}',
    '{"inputs":[],"parameters":"%s"}',
    '{"inputs":[],"outputs":[{"name":"%s"}]}',
    '{"inputs":"%s"}',
    '{"id":"%s"}',
]


@pytest.mark.parametrize("text", WRONG)
def test_errors_equal_those_of_the_whole_document(monkeypatch, text):
    found = agree(monkeypatch, parse_request, (text % ("x" * 70_000)).encode(), CONFIG, 0)
    assert isinstance(found, tuple)


@pytest.mark.parametrize(
    "text",
    [
        '{"inputs":[],"parameters":{"a":"%s","a":1}}',
        '{"inputs":[],"parameters":{"%s":1}}',
        '{"inputs":[],"parameters":{"a":1,"a":"%s"}}',
        '{"inputs":[],"parameters":{"a":1},"note":"%s"}',
        '{"inputs":[],"note":["%s"],"parameters":{"a":"\\u00001"}}',
        '{"inputs":[],"id":"%s"}',
        '{"inputs":[],"parameters":{"a":"%s"}}\0"',
    ],
)
def test_unusual_documents_say_what_the_whole_says(monkeypatch, text):
    body = (text % ("x" * 70_000)).encode()
    form = agree(monkeypatch, parse_request, body, CONFIG, 0)
    document = json.loads(body.partition(b"\0")[0])
    assert form.identifier == document.get("id", "")
    raw = form.context.parameters
    text = raw if isinstance(raw, str) else bytes(raw)
    assert json.loads(text or "{}") == document.get("parameters", {})


@pytest.mark.parametrize("size", [100_000, 3_000_000, 3_000_001])
@pytest.mark.parametrize("escaped", [False, True])
def test_long_files_are_loaded(size, escaped):
    data = bytes(range(256)) * (size // 256) + b"\xff" * (size % 256)
    config = json.dumps({"parameters": {"a": {"string_value": LONG}}})
    parameters = {"config": config, "file:1/a": base64.b64encode(data).decode(), "file:b": ""}
    body = json.dumps({"parameters": parameters}).encode()
    if escaped:
        body = body.replace(b"/", b"\\/")
    load = read_load(body)
    assert load.config == config
    assert load.files == {"file:1/a": data, "file:b": b""}


@pytest.mark.parametrize("text", ["%s=AAA", "%sAA==" * 2, "%s*", "%sA", '%s","config":1,"b":"'])
@pytest.mark.parametrize("count", [70_000, control._PIECE, 2 * control._PIECE])
def test_malformed_base64_is_reported(monkeypatch, text, count):
    filled = text.replace("%s", "A" * count)
    body = b'{"parameters":{"file:1/a":"%b"}}' % filled.encode()
    assert isinstance(agree(monkeypatch, read_load, body), tuple)
