"""Everything over gRPC that is no inference: documents as messages, versions, status, health."""

import urllib.parse
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.status import MESSAGE_LIMIT, grpc_message, grpc_status
from gpubridge.protocol import metadata as documents
from gpubridge.protocol.grpc import control
from gpubridge.protocol.grpc.messages import encode_message, parse_message
from gpubridge.schema import message_class
from gpubridge.telemetry.statistics import ModelStatistics
from tests.unit.model_configs import model_config

CONFIG = model_config("A FP32 [4]", "X FP32 [-1]", "max_batch_size: 8")


def encoded(name, /, **fields):
    """The message that clients read."""
    return message_class(name).FromString(encode_message(name, **fields))


def test_server():
    message = encoded("ServerMetadataResponse", **documents.server_metadata("triton"))
    assert message.name == "triton"
    assert {"statistics", f"gpubridge({message.version})"} < set(message.extensions)
    assert encode_message("ServerReadyResponse", ready=True) == b"\x08\x01"
    assert encode_message("ModelReadyResponse", ready=False) == b""


def test_model_metadata():
    message = encoded("ModelMetadataResponse", **documents.model_metadata(CONFIG, [1, 3]))
    assert (message.name, list(message.versions), message.platform) == ("m", ["1", "3"], "python")
    assert [(t.name, t.datatype, list(t.shape)) for t in message.inputs] == [("A", "FP32", [-1, 4])]
    assert [(t.name, t.datatype, list(t.shape)) for t in message.outputs] == [
        ("X", "FP32", [-1, -1])
    ]


def test_model_statistics():
    statistics = ModelStatistics("m", 2)
    statistics.executed(2, 4, (2, 100, 10), (1, 2, 3))
    statistics.failed("OTHER", 5)
    (message,) = encoded(
        "ModelStatisticsResponse", **documents.model_statistics([statistics])
    ).model_stats
    assert (message.name, message.version) == ("m", "2")
    assert (message.inference_count, message.execution_count) == (8, 2)
    stats = message.inference_stats
    assert (stats.success.count, stats.success.ns, stats.queue.ns) == (2, 100, 10)
    assert (stats.fail.count, stats.fail.ns) == (1, 5)
    assert stats.HasField("cache_hit")
    assert [
        (b.batch_size, b.compute_infer.count, b.compute_infer.ns) for b in message.batch_stats
    ] == [(4, 2, 2)]


@dataclass
class Row:
    name: str
    version: int | None
    state: str
    reason: str


def test_repository_index():
    rows = [Row("a", 1, "READY", ""), Row("b", None, "", ""), Row("c", 2, "UNAVAILABLE", "why")]
    found = encoded("RepositoryIndexResponse", models=documents.repository_index(rows)).models
    assert [(m.name, m.version, m.state, m.reason) for m in found] == [
        ("a", "1", "READY", ""),
        ("b", "", "", ""),
        ("c", "2", "UNAVAILABLE", "why"),
    ]


def test_an_index_of_one_repository_is_refused():
    control.refuse_repository_name(parse_message("RepositoryIndexRequest", b"\x10\x01"))
    with pytest.raises(
        BridgeError, match="'repository_name' specification is not supported"
    ) as refused:
        control.refuse_repository_name(parse_message("RepositoryIndexRequest", b"\x0a\x01x"))
    assert refused.value.code == ErrorCode.UNSUPPORTED


def test_bytes_that_are_no_message():
    with pytest.raises(BridgeError, match="Unable to parse request") as refused:
        parse_message("ModelReadyRequest", b"\xff")
    assert refused.value.code == ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", None),
        ("1", 1),
        (" 1", 1),
        ("1x", 1),
        ("+1", 1),
        ("01", 1),
        ("0", 0),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_versions_as_triton_reads_them(text, version):
    assert control.model_version(text) == version


@pytest.mark.parametrize("text", ["abc", "x1", "99999999999999999999", "9" * 10_000, "\u0661"])
def test_versions_that_are_none(text):
    with pytest.raises(BridgeError) as refused:
        control.model_version(text)
    assert refused.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )
    assert refused.value.code == ErrorCode.INVALID_ARG


def test_a_negative_version():
    with pytest.raises(
        BridgeError, match="invalid model version specified '-2' , version should be"
    ):
        control.model_version("-2")


def test_health():
    assert control.health_answer(True) == b"\x08\x01"
    assert control.health_answer(False) == b"\x08\x02"
    assert control.health_answer(None) == b"\x08\x03"
    for request, service in ((b"", ""), (b"\x0a\x01x", "x"), (b"\x3a\x01x", "")):
        assert control.health_service(request) == service
    with pytest.raises(BridgeError, match="Unable to parse request"):
        control.health_service(b"\x0a\x05x")


def test_status_numbers_are_grpcs():
    grpc = pytest.importorskip("grpc")
    names = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}
    for code in ErrorCode:
        expected = getattr(grpc.StatusCode, names.get(code.name, code.name))
        assert grpc_status(code) == expected.value[0]


@given(st.text(max_size=300))
def test_messages_are_percent_encoded(text):
    encoded = grpc_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert urllib.parse.unquote(encoded.decode()) == text


def test_only_what_must_be_is_encoded():
    assert grpc_message('it\'s a "text": ~100% [ä]\n') == b'it\'s a "text": ~100%25 [%C3%A4]%0A'
    assert grpc_message("\ud800") == b"?"


@pytest.mark.parametrize("text", ["a" * 10_000, "ä" * 3000, "☃%" * 2000])
def test_long_messages_are_cut_after_a_whole_character(text):
    encoded = grpc_message(text)
    assert MESSAGE_LIMIT - 12 < len(encoded) <= MESSAGE_LIMIT
    assert encoded.endswith(b"...")
    assert text.startswith(urllib.parse.unquote(encoded[:-3].decode()))
