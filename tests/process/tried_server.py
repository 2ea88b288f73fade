"""A server that clients try to harm: it must answer all others, and hold nothing of them in the end."""

import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import open_files, running_server, wait_until, write_model

MIB = 1 << 20
BIG = 4 * MIB
"""Elements of an output of 16 MiB: far beyond what sockets hold."""

_ADD = answering("return respond(OUT=value + request.inputs()[1].as_numpy())")

_STRINGS = answering("return respond(OUT=value)")

FILL = answering(
    "number, count = value; return respond(OUT=np.full(int(count), number, np.float32))"
)


@contextmanager
def tried_server(repository):
    """Serve "add", "strings" and "fill" with little memory; at the end it holds what it did before."""
    write_model(repository, "add", _ADD, tensors="A FP32 [-1]; B FP32 [-1]")
    write_model(repository, "strings", _STRINGS, tensors="IN STRING [-1] > OUT STRING [-1]")
    write_model(repository, "fill", FILL, tensors="IN INT64 [2]")
    # So little memory that a leak of a few bodies is the end of it.
    with running_server(repository, "--request-arena-limit", str(96 * MIB)) as server:
        _warm_up(server)
        held = _settled_holdings(server)
        yield server
        _warm_up(server)
        wait_until(
            lambda: _no_more(_holdings(server), held), f"{_holdings(server)} to be {held} again"
        )
        gauges = server.metrics()
        pending = [value for name, value in gauges.items() if "pending_request_count" in name]
        assert pending == [0] * 3
        assert not any(value for name, value in gauges.items() if "stub_restarts" in name)
        server.unload_all()
        assert "Traceback" not in server.log()


def post(server, model, body, field):
    """Send a request of a binary body and its header field; returns status, headers, body."""
    return server.request("POST", f"/v2/models/{model}/infer", body, dict([field.split(": ")]))


def good(server):
    """Send a request that must succeed."""
    array = np.arange(5, dtype=np.float32)
    field, body = binary_request(
        [("A", "FP32", [5], array.tobytes()), ("B", "FP32", [5], array.tobytes())]
    )
    status, fields, answer = post(server, "add", body, field)
    assert status == 200, answer
    binary = answer[
        int({k.lower(): v for k, v in fields.items()}["inference-header-content-length"]) :
    ]
    np.testing.assert_array_equal(np.frombuffer(binary, np.float32), array + array)


def _warm_up(server):
    """Use every model and every size, so that what is kept for the next time is there."""
    good(server)
    for count in (1, BIG):
        with connected(server.http_url) as sock:
            sock.sendall(fill(1, count))
            assert read_answer(sock)[0] == 200
    field, body = binary_request([("IN", "BYTES", [1], b"\1\0\0\0a")])
    status = post(server, "strings", body, field)[0]
    assert status == 200


def _holdings(server):
    """Sockets, pipes and threads of the server and its stubs, without the memory of the arenas."""
    return [
        (
            sum("memfd:" not in link for link in open_files(pid)),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
        )
        for pid in sorted([server.pid, *server.stubs()])
    ]


def _settled_holdings(server):
    """The same when the server has seen that the connections of a moment ago are closed."""
    before = None
    while (now := _holdings(server)) != before:
        before = now
        time.sleep(0.5)
    return now


def _no_more(now, before):
    """Return whether nothing new is held, except for threads that start at first need.

    A stub has one of them, the server two, for what is compressed.
    """
    return len(now) == len(before) and all(
        files <= files_before and threads <= threads_before + 2
        for (files, threads), (files_before, threads_before) in zip(now, before, strict=True)
    )


def fill(value, count):
    """Make a request that "fill" answers with a value so many times."""
    data = np.array([value, count], np.int64).tobytes()
    field, body = binary_request([("IN", "INT64", [2], data)])
    return inference("fill", body, field)
