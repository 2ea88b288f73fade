"""The limit of descriptors follows the limits of connections, and the last ones are not for clients."""

import json
import resource
import ssl
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpubridge.frontend import tls_connection
from gpubridge.frontend.connection_limits import Room, allow_connections, room_for
from gpubridge.frontend.grpc import connection as grpc_connection
from tests.fuzz.grpc_endpoint import GrpcEndpoint
from tests.unit.http_endpoint import GET, Endpoint, Transport

# A hard limit that was lowered stays so: each case has a process.
CODE = """
import json, logging, os, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from gpubridge.frontend.connection_limits import allow_connections
for soft, hard, limits in json.loads(sys.argv[1]):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        backlog = allow_connections(limits)
        print("got", resource.getrlimit(resource.RLIMIT_NOFILE)[0], backlog, flush=True)
        os._exit(0)
    os.wait()
"""
CASES = [
    # Soft limit, hard limit, limits of connections; soft limit after it, backlog, whether it warns.
    (256, 4096, [100, 200], 3372, 1024, False),
    (3500, 4096, [100, 200], 3500, 1024, False),
    (256, 2048, [4096, 4096], 2048, 64, True),
    (256, 2048, [0], 2048, 128, False),
    (2048, 2048, [0, 100], 2048, 64, False),
    (256, 2048, [], 1024, 1024, False),
    (160, 160, [4096, 4096, 4096], 160, 3, True),
]


def test_it_is_raised_as_far_as_needed_and_allowed():
    command = [sys.executable, "-c", CODE, json.dumps([case[:3] for case in CASES])]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    said, got = "", []
    for line in finished.stdout.splitlines():
        if line.startswith("got "):
            got.append((*map(int, line.split()[1:]), "--http-max-connections" in said))
            said = ""
        else:
            said += line
    assert got == [case[3:] for case in CASES]


@pytest.fixture
def limit(monkeypatch):
    """The process may have 400 descriptors: those from 300 on are for its models."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 4096))


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(
    ("descriptor", "connections", "room"),
    [
        (299, 200, Room.FREE),
        (300, 200, Room.SHORT),
        (349, 200, Room.SHORT),
        (350, 200, Room.NONE),
        (399, 5, Room.FREE),
        (399, 6, Room.NONE),
    ],
)
def test_the_last_descriptors_are_for_models(descriptor, connections, room):
    assert room_for(SimpleNamespace(fileno=lambda: descriptor), connections) is room


@pytest.mark.parametrize("limit", [64, 128, 256, 1024, 4096])
@pytest.mark.parametrize("endpoints", [1, 3])
def test_clients_that_come_all_at_once_leave_descriptors_for_models(monkeypatch, limit, endpoints):
    """In one turn a backlog of connections is accepted at each endpoint, before any is looked at."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    backlog = allow_connections([0] * endpoints)
    assert backlog > 0
    used, before, counts = 24, 0, [0] * endpoints
    while used != before:
        before = used
        for number in range(min(backlog * endpoints, limit - before)):
            sock = SimpleNamespace(fileno=lambda descriptor=before + number: descriptor)
            if room_for(sock, counts[number % endpoints]) is not Room.NONE:
                counts[number % endpoints] += 1
                used += 1
    # Also while the next ones are accepted, to be closed.
    assert used + backlog * endpoints < limit


@pytest.mark.usefixtures("limit")
def test_a_connection_with_one_of_the_last_descriptors_is_refused_with_the_reason():
    others = [Endpoint()]
    others += [Endpoint(beside=others[0]) for _ in range(15)]
    late = others[0]
    short = Endpoint(beside=late, descriptor=320)
    ((status, body),) = short.answers()
    assert (status, b"limit of 400 descriptors" in body) == (503, True)
    assert Endpoint(beside=late, descriptor=360).transport.state == "closed"
    # Those that were there go on.
    late.receive(GET)
    assert late.answers() == [(200, b"")]


@pytest.mark.parametrize("room", [Room.SHORT, Room.NONE])
async def test_a_grpc_connection_without_room_is_told_or_cut_off(monkeypatch, room):
    monkeypatch.setattr(grpc_connection, "room_for", lambda *_: room)
    endpoint = GrpcEndpoint()
    endpoint.regions.close()
    assert endpoint.closed
    assert (b"ulimit -n" in bytes(endpoint.sent)) == (room is Room.SHORT)


async def test_a_handshake_without_room_is_not_begun(monkeypatch):
    monkeypatch.setattr(tls_connection, "room_for", lambda *_: Room.NONE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listener = tls_connection.TlsListener(lambda: context, most=0, seconds=0)
    transport = Transport()
    tls_connection.TlsConnection(listener, None).connection_made(transport)
    assert transport.state == "closed"
