"""Loads over gRPC: long files are views of their message, and all else is as protobuf says."""

import pytest
from tritonclient.grpc import service_pb2

from gpubridge.errors import BridgeError
from gpubridge.protocol.grpc.control import read_load
from gpubridge.protocol.grpc.load_message import read_load_message
from gpubridge.protocol.grpc.messages import parse_message

LONG = bytes(range(256)) * 1024


def message(name="m", config="{}", **files):
    made = service_pb2.RepositoryModelLoadRequest(model_name=name)
    if config is not None:
        made.parameters["config"].string_param = config
    for key, content in files.items():
        made.parameters[f"file:{key}"].bytes_param = content
    return bytes(made.SerializeToString())


def as_protobuf_says(data):
    parsed = parse_message("RepositoryModelLoadRequest", data)
    return parsed.model_name, read_load(parsed)


MESSAGES = {
    "empty": b"",
    "short": message(a=b"abc", b=b""),
    "long": message(a=LONG, b=b"abc", c=LONG[1:]),
    "no config": message(config=None, a=LONG),
    "a long configuration": message(config=" " * 100_000),
    "one name twice": message(a=LONG) + message(a=b"short"),
    "one name twice, long at last": message(a=b"short") + message(a=LONG[7:]),
    "unknown fields": message(a=LONG) + b"\x55abcd\x51abcdefgh\x58\x01\x5a\x03xyz",
    "a group": message(a=LONG) + b"\x5b\x58\x01\x5c",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_it_reads_what_protobuf_does(name):
    data = MESSAGES[name]
    for given in (data, memoryview(bytearray(data))):
        model, (config, files) = read_load_message(given)
        assert (model, (config, dict(files))) == as_protobuf_says(data)


def test_long_files_are_not_copied():
    data = memoryview(MESSAGES["long"])
    _, (_, files) = read_load_message(data)
    views = {name for name, content in files.items() if isinstance(content, memoryview)}
    assert views == {"file:a", "file:c"}
    assert all(files[name].obj is data.obj for name in views)


def wrong_kind(field):
    made = service_pb2.RepositoryModelLoadRequest(model_name="m")
    made.parameters["file:a"].bytes_param = LONG
    setattr(
        made.parameters["other" if field == "bytes_param" else "file:b"], field, field_value(field)
    )
    return bytes(made.SerializeToString())


def field_value(field):
    return {"string_param": "x" * 100_000, "int64_param": 7, "bytes_param": LONG}[field]


WRONG = {
    "cut": MESSAGES["long"][:-1],
    "cut within a number": MESSAGES["long"] + b"\xff",
    "an endless number": b"\x08" + b"\xff" * 11,
    "a name that is no text": message(abcdef=LONG).replace(b"abcdef", b"abc\xff\xfe\xfd"),
    "a repository": MESSAGES["long"] + b"\x0a\x01r",
    **{field: wrong_kind(field) for field in ("string_param", "int64_param", "bytes_param")},
}


@pytest.mark.parametrize("name", WRONG)
def test_it_words_what_is_wrong_as_ever(name):
    with pytest.raises(BridgeError) as expected:
        as_protobuf_says(WRONG[name])
    with pytest.raises(BridgeError) as caught:
        read_load_message(WRONG[name])
    assert (caught.value.code, caught.value.message) == (
        expected.value.code,
        expected.value.message,
    )


def test_any_cut_is_an_error_or_a_message():
    data = message("model", "{}", a=b"1", b=LONG[:70_000])
    for end in [*range(200), *range(len(data) - 200, len(data))]:
        try:
            expected = as_protobuf_says(data[:end])
        except BridgeError as error:
            with pytest.raises(BridgeError, match=error.message):
                read_load_message(data[:end])
        else:
            assert read_load_message(data[:end]) == expected
