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
    assert {group: each.header for group, each in found.items()} == {
        "health": "Key",
        "trace": "Key",
        "metrics": "other",
    }
    assert found["health"].name == b"key"
    assert found["trace"].admits(b"value")
    assert found["metrics"].admits(b"a:b=c,d")
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


@pytest.mark.parametrize(("_", "kind", "read"), [HTTP, GRPC])
def test_all_groups_at_once(_, kind, read):
    found = read(["all:key=value"])
    assert {"health", "inference", "logging", "model-repository", "trace"} < set(found)
    assert ("metrics" in found) == ("openai" in found) == (kind == "api")
    with pytest.raises(BridgeError, match="in multiple config groups"):
        read(["all:key=value", "health:other=value"])


def test_metrics_are_as_closed_as_statistics():
    found = read_http_restrictions(["statistics:key=value"])
    assert found["metrics"] is found["statistics"]
    found = read_http_restrictions(["statistics:key=value", "metrics:other=value"])
    assert found["metrics"].header == "other"
    found = read_http_restrictions(["metadata:key=value", "inference:other=value"])
    assert found["metrics"] is found["metadata"]


def notices(http=(), grpc=(), **changes):
    changes = {"http.restrictions": read_http_restrictions(http), **changes}
    changes = {"grpc.restrictions": read_grpc_restrictions(grpc), **changes}
    return [line for line in server_settings(changes).notices() if "restricted" in line]


def test_what_stays_open_beside_what_is_closed_is_said():
    http, grpc = notices(["inference,metadata:key=value"])
    assert http.startswith(
        "--http-restricted-api: every client may still use health, shared-memory"
    )
    assert "logging" in http
    assert "metadata" not in http
    assert "metrics" not in http
    assert grpc.startswith(
        "--grpc-restricted-protocol: every client may still use health, metadata"
    )
    closed = ["all:key=value"]
    assert notices(closed) == [grpc]
    assert notices(closed, **{"grpc.allow": False}) == []
    assert notices(closed, closed) == []
    assert notices() == []


def test_keys_are_the_lines_of_a_file_which_is_read_again(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_bytes(b"old\r\n\n  new \n")
    found = read_http_restrictions([f"health,trace:key=@{file}"])["trace"]
    assert [found.admits(key) for key in (b"old", b"new", b"", b"next", None)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    file.write_bytes(b"new\nnext")
    found.reload()
    assert [found.admits(key) for key in (b"old", b"new", b"next")] == [False, True, True]
    for broken in (b"", b"a\0b", b"a" * 70_000):
        file.write_bytes(broken)
        found.reload()
        assert found.admits(b"next")
    file.unlink()
    found.reload()
    assert found.admits(b"next")
    assert caplog.text.count("SIGHUP: the keys stay as they are: --http-restricted-api") == 4


def test_keys_are_in_the_environment(monkeypatch):
    monkeypatch.setenv("THE_KEYS", "one\ntwo")
    found = read_grpc_restrictions(["inference:key=@env:THE_KEYS"])["inference"]
    assert found.admits(b"one")
    assert found.admits(b"two")


@pytest.mark.parametrize("source", ["@/nowhere", "@/", "@env:NO_SUCH_VARIABLE", "@/dev/null"])
def test_keys_that_cannot_be_read_end_the_start(source):
    with pytest.raises(BridgeError, match=r"^--http-restricted-api: "):
        read_http_restrictions([f"health:key={source}"])
