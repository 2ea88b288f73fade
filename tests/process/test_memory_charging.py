"""Clients that take memory and do not use it: others are served as if they were not there."""

import gzip
import json
import os
import socket
import struct
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.raw_http2 import open_stream, send_data
from tests.process.server import running_server, wait_until, write_model

triton = pytest.importorskip("tritonclient.grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

MIB = 1 << 20
SCALE = int(os.environ.get("GPUBRIDGE_CHARGING_SCALE", "16"))
"""The sizes of the issue divided by this: 1 for those themselves, once before a release."""

MODEL = answering("""
wanted = int(value[0])
return respond(OUT=value[:4] + 1 if wanted == 0 else np.zeros(wanted, np.float32))
""")


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "m", MODEL)
    limit = 1024 * MIB // SCALE
    flags = [f"--request-arena-limit={limit}", f"--output-arena-limit={limit}"]
    with running_server(repository, *flags) as server:
        yield server


def values(nbytes):
    """Return an input of some bytes whose answer is short."""
    array = np.zeros(nbytes // 4, np.float32)
    array[1] = 41
    return array


def request(array):
    fields, body = binary_request([("IN", "FP32", [array.size], array.tobytes())])
    return inference("m", body, fields)


def chunked_request(array):
    fields, body = binary_request([("IN", "FP32", [array.size], array.tobytes())])
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n{fields}\r\n\r\n"
    return b"%b%x\r\n%b\r\n0\r\n\r\n" % (head.encode(), len(body), body)


@contextmanager
def others(server, sizes=(16, 20_000, 300_000, 4 * MIB)):
    """Serve clients of all sizes, before and while something is done."""

    def serve():
        with connected(server.http_url) as sock:
            for _ in range(3):
                for nbytes in sizes:
                    sock.sendall(request(values(nbytes)))
                    status, _, body = read_answer(sock)
                    assert status == 200, body
                    assert body[-16:] == struct.pack("<4f", 1, 42, 1, 1)

    serve()
    yield
    serve()


def grpc_opening(promised):
    """Return the beginning of a message that promises an input of so many bytes."""
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="IN", datatype="FP32", shape=[promised // 4])
    head = message.SerializeToString()
    length, number = b"", promised
    while number > 127:
        length, number = length + bytes((number & 127 | 128,)), number >> 7
    head += b"\x3a" + length + bytes((number,))
    return b"\0" + (len(head) + promised).to_bytes(4, "big") + head


def test_a_large_promised_body_takes_little_memory_while_little_arrives(server):
    promised = 900 * MIB // SCALE
    with connected(server.grpc_url) as sock:
        with others(server):
            open_stream(sock, b"ModelInfer")
            send_data(sock, grpc_opening(promised))
            for _ in range(4):
                send_data(sock, bytes(600))
        with others(server):
            send_data(sock, bytes(600))


def test_a_message_above_the_limit_is_refused_with_both_numbers(server):
    limit = 1024 * MIB // SCALE
    with triton.InferenceServerClient(server.grpc_url) as client:
        given = triton.InferInput("IN", [limit // 4], "FP32")
        given.set_data_from_numpy(np.zeros(limit // 4, np.float32))
        with pytest.raises(triton.InferenceServerException) as caught:
            client.infer("m", [given])
    assert "too large" in caught.value.message()
    assert f"of the {limit} bytes that all requests together have" in caught.value.message()


def test_an_honest_large_message_gets_through(server):
    size = 500 * MIB // SCALE
    with triton.InferenceServerClient(server.grpc_url) as client:
        given = triton.InferInput("IN", [size // 4], "FP32").set_data_from_numpy(values(size))
        for _ in range(2):
            answer = client.infer("m", [given]).as_numpy("OUT")
            assert answer.tolist() == [1, 42, 1, 1]


@pytest.mark.parametrize("framed", [request, chunked_request])
def test_many_who_promise_much_and_send_little_take_little(server, framed):
    whole = framed(values(60 * MIB // SCALE))
    with ExitStack() as stack, others(server):
        socks = [stack.enter_context(connected(server.http_url)) for _ in range(24)]
        for sock in socks:
            sock.sendall(whole[:100_000])
        # Of sizes that were not there before: no memory that is still lent for others fits them.
        for more in range(1, 4):
            with others(server, sizes=(16, 20_000, 600_000 * more, (4 + 2 * more) * MIB)):
                for sock in socks:
                    sock.sendall(whole[100_000:100_600])


def test_decompressed_bodies_are_charged(server):
    size = 60 * MIB // SCALE
    fields, body = binary_request([("IN", "FP32", [size // 4], values(size).tobytes())])
    packed = inference("m", gzip.compress(body, 1), fields, "Content-Encoding: gzip")
    with ExitStack() as stack, others(server):
        socks = [stack.enter_context(connected(server.http_url)) for _ in range(24)]
        for sock in socks:
            sock.sendall(packed)
        with others(server):
            pass
        for sock in socks:
            status, _, answer = read_answer(sock)
            assert status == 200 or (status == 503 and b"arena is full" in answer), answer


def test_at_the_limit_who_holds_most_is_refused_and_others_are_served(server):
    # Bodies that fill all of the memory, but for their last byte, of two clients by many streams.
    part = 60 * MIB // SCALE
    with ExitStack() as stack, others(server):
        socks = []
        for _ in range(24):
            sock = stack.enter_context(connected(server.http_url))
            whole = request(values(part))
            sock.sendall(whole[:-1])
            socks.append(sock)
        refused = 0
        for sock in socks:
            sock.sendall(b"\0")
            status, _, body = read_answer(sock)
            assert status in (200, 503), body
            if status == 503:
                refused += 1
                assert b"arena is full" in body
        assert 0 < refused < 24


def test_answers_that_nobody_reads_leave_room_for_others(server):
    wanted = 60 * MIB // SCALE // 4
    array = values(64)
    array[0] = wanted
    with ExitStack() as stack, others(server, sizes=(16, 20_000, 300_000)):
        socks = []
        for _ in range(20):
            sock = stack.enter_context(connected(server.http_url, 4096))
            sock.sendall(request(array))
            socks.append(sock)
        for sock in socks:
            # It has been answered: the beginning is there.
            assert sock.recv(8, socket.MSG_PEEK) == b"HTTP/1.1"
        with others(server, sizes=(16, 20_000, 300_000)), connected(server.http_url) as sock:
            # Answers that are not small, too.
            medium = values(64)
            medium[0] = 75_000
            for _ in range(5):
                sock.sendall(request(medium))
                assert read_answer(sock)[0] == 200
    # When they are gone, so is what they held.
    with connected(server.http_url) as sock:

        def served():
            sock.sendall(request(array))
            return read_answer(sock)[0] == 200

        wait_until(served, "memory for a large answer", server)


@contextmanager
def container(nbytes, pids):
    """Give processes so many bytes for what they allocate from now on."""
    groups = Path("/sys/fs/cgroup/memory")
    first = groups.exists()
    lines = Path(f"/proc/{pids[0]}/cgroup").read_text().splitlines()
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    root, path = (groups, paths["memory"]) if first else (groups.parent, paths[""])
    folder = root / path.lstrip("/") / f"gpubridge-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(nbytes))
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"control groups of memory cannot be made here: {error}")
    try:
        yield
    finally:
        wait_until(lambda: dissolved(folder), "a control group to be left")


def dissolved(folder):
    """Move a group's processes, also those that were started in it, to the one above, and remove it."""
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
    return not folder.exists()


def test_a_container_that_holds_what_the_limits_say_holds_what_comes(server):
    def statuses(nbytes):
        with ExitStack() as stack:
            socks = [stack.enter_context(connected(server.http_url)) for _ in range(24)]
            array = values(nbytes)
            array[0] = nbytes // 4
            whole = request(array)
            for sock in socks:
                sock.sendall(whole[:-1])
            for sock in socks:
                sock.sendall(whole[-1:])
            answers = [read_answer(sock) for sock in socks]
        assert all(b"arena is full" in body for status, _, body in answers if status != 200)
        return [status for status, *_ in answers]

    processes = [server.pid, *server.stubs()]
    limit = 1024 * MIB // SCALE
    # Connections of earlier tests may be closing, with what they hold.
    wait_until(lambda: statuses(limit // 32) == [200] * 24, "the memory of earlier tests", server)
    # The requests, the outputs, and what the model makes and the heap keeps.
    with container(2 * limit + 32 * MIB, processes):
        assert statuses(limit // 32) == [200] * 24
        assert 503 in statuses(limit // 10)
        assert statuses(limit // 32) == [200] * 24
    assert [server.pid, *server.stubs()] == processes


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_answers_in_json_that_nobody_reads_are_charged(server, path):
    wanted = 320 * MIB // SCALE // 4
    asked = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [wanted]}]}
    body = json.dumps(asked if path == "infer" else {"IN": [wanted]}).encode()
    head = f"POST /v2/models/m/{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(server.http_url, 4096)) for _ in range(12)]
        refused = 0
        for sock in socks:
            sock.sendall(head.encode() + body)
            if sock.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 503":
                assert b"there is no memory for an answer of" in read_answer(sock)[2]
                refused += 1
        assert 0 < refused < 12

    def served():
        with connected(server.http_url) as sock:
            sock.sendall(head.encode() + body)
            return read_answer(sock)[0] == 200

    # When the others are gone, so is what they held.
    wait_until(served, "memory for a long answer", server)
