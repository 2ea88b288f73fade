"""Requests that load and unload models, as both protocols spell them; settings and configurations from clients."""

import base64
import json

import pytest
from tritonclient.grpc import service_pb2

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import control as http
from gpubridge.protocol.grpc import control as grpc


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"other":1}', b'{"parameters":{}}'])
def test_a_load_may_ask_for_nothing(body):
    assert http.read_load(body) == (None, {})
    assert http.read_unload(body) is False


def test_parameters_over_http():
    files = {"file:1/a": b"\0\xff", "file:1/b": b""}
    parameters = {key: base64.b64encode(value).decode() for key, value in files.items()}
    body = json.dumps({"parameters": {"config": "{}", **parameters}}).encode()
    assert http.read_load(body) == ("{}", files)
    assert http.read_unload(b'{"parameters":{"unload_dependents":true,"other":1}}') is True
    for body in (b'{"parameters":null}', b'{"parameters":{"unload_dependents":null}}'):
        assert http.read_unload(body) is False


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 57, 200, 3 << 19])
@pytest.mark.parametrize("blank", ["", "\n", "\r\n", " "])
@pytest.mark.parametrize("padding", [True, False])
def test_files_in_the_forms_of_base64_that_programs_write(nbytes, blank, padding):
    content = bytes(range(251)) * (nbytes // 251 + 1)
    text = base64.b64encode(content[:nbytes]).decode()
    lines = blank.join(text[at : at + 76] for at in range(0, len(text), 76)) + blank
    sent = lines if padding else lines.replace("=", "")
    body = json.dumps({"parameters": {"file:a": sent.replace("/", "\\/")}}).replace("\\\\/", "\\/")
    assert http.read_load(body.encode()).files["file:a"] == content[:nbytes]


@pytest.mark.parametrize(
    ("read", "body", "code", "text"),
    [
        ("load", "junk", "INVALID_ARG", "failed to parse the request JSON buffer: "),
        ("unload", "junk", "INVALID_ARG", "failed to parse the request JSON buffer: "),
        ("load", '{"parameters":3}', "INVALID_ARG", "attempt to get members for non-object"),
        ("load", '{"parameters":{"config":{}}}', "INVALID_ARG", "JSON non-string as string"),
        ("load", '{"parameters":{"file:a":null}}', "INVALID_ARG", "JSON non-string as string"),
        ("load", '{"parameters":{"foo":""}}', "INVALID_ARG", "on creating Triton parameter: unrec"),
        (
            "load",
            '{"parameters":{"file:a":"a"}}',
            "INVALID_ARG",
            "expected the content of 'file:a'",
        ),
        ("load", '{"parameters":{"file:a":"\\u00e9"}}', "INVALID_ARG", "in base64"),
        ("load", '{"parameters":{"file:a":"YWJj!"}}', "INVALID_ARG", "in base64"),
        ("load", '{"parameters":{"file:a":"YQ==YWJj"}}', "INVALID_ARG", "in base64"),
        (
            "unload",
            '{"parameters":{"unload_dependents":1}}',
            "INVALID_ARG",
            "non-boolean as boolean",
        ),
    ],
)
def test_bodies_that_are_refused(read, body, code, text):
    with pytest.raises(BridgeError) as raised:
        getattr(http, f"read_{read}")(body.encode())
    assert raised.value.code is ErrorCode[code]
    assert text in raised.value.message


def load_message(**parameters):
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    for name, (kind, value) in parameters.items():
        setattr(message.parameters[name.replace("__", ":")], kind, value)
    return message


def unload_message(**parameters):
    message = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    for name, (kind, value) in parameters.items():
        setattr(message.parameters[name], kind, value)
    return message


def test_settings_that_change_nothing():
    assert http.log_changes(b'{"log_file":null,"log_info":null}') == {}
    assert http.trace_changes(b'{"trace_level":[]}') == {}
    assert http.trace_changes(b'{"trace_level":["OFF"]}') == {"level": ()}


def test_parameters_over_grpc():
    message = load_message(config=("string_param", "{}"), file__1=("bytes_param", b"\xff"))
    assert grpc.read_load(message) == ("{}", {"file:1": b"\xff"})
    assert grpc.read_load(load_message()) == (None, {})
    assert grpc.read_unload(unload_message(other=("int64_param", 1))) is False
    assert grpc.read_unload(unload_message(unload_dependents=("bool_param", True))) is True


@pytest.mark.parametrize(
    ("read", "message", "text"),
    [
        (
            grpc.read_load,
            load_message(config=("int64_param", 1)),
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            grpc.read_load,
            load_message(file__1=("string_param", "")),
            "invalid value type for load parameter 'file:1', expected bytes_param.",
        ),
        (
            grpc.read_load,
            load_message(foo=("string_param", "")),
            "unrecognized load parameter 'foo'.",
        ),
        (
            grpc.read_unload,
            unload_message(unload_dependents=("string_param", "x")),
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
    ],
)
def test_messages_that_are_refused(read, message, text):
    with pytest.raises(BridgeError) as raised:
        read(message)
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARG, text)


def test_only_one_repository_can_be_meant():
    message = service_pb2.RepositoryModelLoadRequest(repository_name="r", model_name="m")
    with pytest.raises(BridgeError, match="'repository_name' specification is not") as raised:
        grpc.read_load(message)
    assert raised.value.code is ErrorCode.UNSUPPORTED
