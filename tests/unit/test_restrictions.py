"""Flags that restrict groups of endpoints: how they are read, and that their values are never told."""

from dataclasses import replace

import pytest

from gpubridge.config.restrictions import read_grpc_restrictions, read_http_restrictions
from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.server_settings import server_settings

HTTP = ("--http-restricted-api", "api", read_http_restrictions)
GRPC = ("--grpc-restricted-protocol", "protocol", read_grpc_restrictions)


def test_groups_share_a_header():
    found = read_http_restrictions(["health,trace:Key=value", "metrics:other=a:b=c,d"])
    assert {group: (each.header, each.value) for group, each in found.items()} == {
        "health": ("Key", b"value"),
        "trace": ("Key", b"value"),
        "metrics": ("other", b"a:b=c,d"),
    }
    assert found["health"].name == b"key"
    assert found["health"].refusal == "This API is restricted, expecting header 'Key'"


def test_grpc_has_its_own_prefix_and_no_metrics():
    found = read_grpc_restrictions(["inference:Key=value"])["inference"]
    assert found.name == b"triton-grpc-protocol-key"
    assert found.refusal == (
        "This protocol is restricted, expecting header 'triton-grpc-protocol-Key'"
    )
    with pytest.raises(BridgeError, match=r"^unknown restricted protocol 'metrics': expected one"):
        read_grpc_restrictions(["metrics:key=value"])


@pytest.mark.parametrize("read", [read_http_restrictions, read_grpc_restrictions])
def test_settings_are_traces_and_logs(read):
    assert set(read(["settings:key=value"])) == {"trace", "logging"}


@pytest.mark.parametrize(
    "text",
    ["", "health", "health:key", ":key=secret", "health:=secret", "health:key=", "health=a:b"],
)
@pytest.mark.parametrize(("flag", "_", "read"), [HTTP, GRPC])
def test_malformed_restrictions_are_refused(flag, _, read, text):
    with pytest.raises(BridgeError) as caught:
        read([text])
    assert caught.value.message == f"{flag} option format is '<config name>:<setting>=<value>'"


@pytest.mark.parametrize("name", ["foo", "HEALTH", "", " metadata"])
@pytest.mark.parametrize(("_", "kind", "read"), [HTTP, GRPC])
def test_unknown_groups(_, kind, read, name):
    with pytest.raises(BridgeError) as caught:
        read([f"health,{name}:key=secret"])
    start = f"unknown restricted {kind} '{name}': expected one of health, metadata, "
    assert caught.value.message.startswith(start)


@pytest.mark.parametrize(
    ("texts", "group"),
    [
        (["health:k=secret", "health:k=secret"], "health"),
        (["health,health:k=secret"], "health"),
        (["settings:k=secret", "logging:k=secret"], "logging"),
    ],
)
@pytest.mark.parametrize(("_", "kind", "read"), [HTTP, GRPC])
def test_a_group_is_restricted_once(_, kind, read, texts, group):
    with pytest.raises(BridgeError) as caught:
        read(texts)
    assert caught.value.message == (
        f"restricted {kind} '{group}' can not be specified in multiple config groups"
    )


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("a key=secret", "expects the name of a header before '='"),
        ("kéy=secret", "expects the name of a header before '='"),
        ("key= secret", "no client can send a header"),
        ("key=secret ", "no client can send a header"),
        ("key=sec\nret", "no client can send a header"),
    ],
)
@pytest.mark.parametrize(("flag", "_", "read"), [HTTP, GRPC])
def test_headers_that_no_client_can_send(flag, _, read, pair, said):
    with pytest.raises(BridgeError) as caught:
        read([f"health:{pair}"])
    assert caught.value.code == ErrorCode.INVALID_ARG
    assert caught.value.message.startswith(flag)
    assert said in caught.value.message
    assert "sec" not in caught.value.message


def test_binary_headers_of_grpc_have_other_bytes_on_their_way():
    with pytest.raises(BridgeError, match="no client can send"):
        read_grpc_restrictions(["health:key-bin=secret"])
    assert read_http_restrictions(["health:key-bin=secret"])


def test_values_are_in_no_description_of_the_settings():
    settings = server_settings(
        {
            "http.restrictions": read_http_restrictions(["health:key=secret"]),
            "grpc.restrictions": read_grpc_restrictions(["health:key=secret"]),
        }
    )
    assert "secret" not in repr(settings)
    assert "secret" not in repr(replace(settings, http=replace(settings.http, port=1)))
