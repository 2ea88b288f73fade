"""Clients that leave, do not read, or send too much: others do not notice, and nothing of them is left.

What single wrong requests are answered with is in `tests/conformance`.
"""

import json
import socket
import zlib
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.process.raw_http import connected, inference, read_answer
from tests.process.tried_server import BIG, MIB, fill, good, tried_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tried_server(tmp_path_factory.mktemp("models")) as server:
        yield server


@pytest.fixture(autouse=True)
def good_before_and_after(server):
    yield
    good(server)


A, B = ({"name": name, "shape": [2], "datatype": "FP32", "data": [1, 2]} for name in "AB")
PAIR = json.dumps([A, B]).encode()
UNREADABLE = {
    "deep": b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep without an end": b'{"inputs":' + b"[" * 100_000,
    "deep with a NaN": b'{"x":NaN,"inputs":' + b"[" * 100_000,
    "deep objects": b'{"inputs":' * 100_000,
    "lone surrogates with a NaN": b'{"x":NaN,"id":"\\ud800","inputs":' + PAIR + b"}",
    "a dim beyond 64 bits": json.dumps({"inputs": [{**A, "shape": [1 << 70]}, B]}).encode(),
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_documents_that_cannot_be_read(server, body):
    status, fields, answer = server.request("POST", "/v2/models/add/infer", body)
    assert (status, fields["Content-Type"]) == (400, "application/json")
    assert json.loads(answer)["error"]


def test_numbers_beyond_64_bits_beside_a_nan(server):
    body = b'{"inputs":' + PAIR.replace(b"[1, 2]", b"[NaN, 1%b]" % (b"0" * 400), 1) + b"}"
    status, _, answer = server.request("POST", "/v2/models/add/infer", body)
    assert (status, b"[NaN,Infinity]" in answer) == (200, True)


def test_a_header_length_that_is_longer_than_any_number(server):
    field = {"Inference-Header-Content-Length": "9" * 5000}
    assert server.request("POST", "/v2/models/add/infer", b"{}", field)[0] == 400


def test_a_body_that_never_comes_whole(server):
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", b"{", length=100))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1000) == b""


def test_a_body_beyond_the_limit_is_refused_while_the_client_still_sends(server):
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", b"", length=100 * MIB))
        sock.sendall(b"x" * (20 * MIB))
        status, fields, answer = read_answer(sock)
        assert (status, fields["Connection"]) == (413, "close")
        assert "--http-max-input-size" in json.loads(answer)["error"]


def memory(pid: int, kind: str) -> int:
    """Return the bytes of a process's memory: ``VmRSS`` now, ``VmHWM`` at most so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def test_threads_of_a_server_have_one_heap_beside_that_of_the_event_loop(server):
    # glibc reserves 64 MiB for each, of which it uses the first pages.
    lines = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    maps = [
        (*(int(end, 16) for end in line.split()[0].split("-")), line.split()[1]) for line in lines
    ]
    heaps = [
        used
        for used, rest in pairwise(maps)
        if rest[1] - used[0] == 64 * MIB and used[0] % (64 * MIB) == 0 and rest[2] == "---p"
    ]
    assert len(heaps) <= 1


@contextmanager
def no_growth(server):
    """Check that the memory of the server and its stubs, shared or not, has not grown much."""
    pids = [server.pid, *server.stubs()]
    before = [memory(pid, "VmRSS") for pid in pids]
    yield
    grown = [memory(pid, "VmRSS") - held for pid, held in zip(pids, before, strict=True)]
    assert max(grown) < 32 * MIB, grown


def bomb(coding):
    """Return less than a tenth of a megabyte that becomes 80: beyond the limit of 64."""
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(80)), packer.flush()])


def test_bombs_do_not_go_off(server):
    requests = [
        inference("add", bomb(coding), f"Content-Encoding: {coding}")
        for coding in ("gzip", "deflate")
    ]
    before = memory(server.pid, "VmHWM")
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(server.http_url)) for _ in range(8)]
        for number, sock in enumerate(socks):
            sock.sendall(requests[number % 2])
        # Others are served meanwhile, and those who come after a bomb, later.
        good(server)
        for sock in socks:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        for sock in socks:
            status, _, answer = read_answer(sock, more=True)
            assert status == 503
            error = json.loads(answer)["error"]
            assert "by decompression are refused" in error or "arena is full" in error
    assert memory(server.pid, "VmHWM") - before < 4 * 64 * MIB


def test_clients_that_leave_in_the_middle_of_a_body_leave_no_memory_behind(server):
    body = b"{" * (MIB - 1)
    with no_growth(server):
        for _ in range(150):
            with connected(server.http_url) as sock:
                sock.sendall(inference("add", body, length=MIB))


@pytest.mark.parametrize("read", [0, 1000])
def test_clients_that_leave_before_their_answer_leave_no_memory_behind(server, read):
    request = fill(1, MIB)
    with no_growth(server):
        for _ in range(80):
            with connected(server.http_url, receive_bytes=4096) as sock:
                sock.sendall(request)
                sock.recv(read)


def test_clients_that_never_read_disturb_nobody_and_get_their_own_bytes(server):
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(server.http_url, 4096)) for _ in range(3)]
        for number, sock in enumerate(slow):
            sock.sendall(fill(100 + number, BIG))
        with connected(server.http_url) as sock:
            for value in range(6):
                sock.sendall(fill(value, BIG))
                answer = read_answer(sock)[2]
                assert answer[-4 * BIG :] == np.full(BIG, value, np.float32).tobytes()
        # What they are owed was not overwritten by the answers of others meanwhile.
        for number, sock in enumerate(slow):
            answer = read_answer(sock)[2]
            assert answer[-4 * BIG :] == np.full(BIG, 100 + number, np.float32).tobytes()
