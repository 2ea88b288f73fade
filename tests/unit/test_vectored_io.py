"""Frames whose payloads lie side by side cross a socket whole, whatever it takes at a time."""

from __future__ import annotations

import random
import socket

import pytest

from gpubridge.frontend.grpc import vectored_io
from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.tensor.native import native

HEADER = b"\x00\x40\x00\x00\x00\x00\x00\x00\x07"
SIZE = 1 << 14
BODY = memoryview(random.Random(1).randbytes(37 * SIZE + 5000))


@pytest.fixture(params=["compiled", "python"])
def engine(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(vectored_io, "native", lambda: None)
    elif native() is None:
        pytest.skip("the compiled module is absent")


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    yield pair
    for each in pair:
        each.close()


def vector(nbytes, lead=0):
    frames = -(-(nbytes - lead) // SIZE)
    return FrameVector(HEADER * frames, BODY[:nbytes], SIZE, lead)


def wire(nbytes, lead=0):
    """The same, said without a vector."""
    pieces = [bytes(BODY[:lead])]
    for start in range(lead, nbytes, SIZE):
        pieces += [HEADER, bytes(BODY[start : min(start + SIZE, nbytes)])]
    return b"".join(pieces)


def drain(source):
    try:
        return source.recv(1 << 22)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(("nbytes", "lead"), [(SIZE, 0), (3 * SIZE + 1, 0), (2 * SIZE + 77, 77)])
def test_a_vector_is_what_stands_on_the_wire(nbytes, lead):
    made = vector(nbytes, lead)
    assert bytes(made) == b"".join(made.pieces()) == wire(nbytes, lead)
    assert made.nbytes == len(wire(nbytes, lead))


def test_what_the_socket_does_not_take_is_left(engine, sockets):
    ours, theirs = sockets
    parts = [b"headers", vector(len(BODY)), memoryview(b"trailers")]
    expected = b"headers" + wire(len(BODY)) + b"trailers"
    came = b""
    sent = vectored_io.write_parts(ours.fileno(), parts)
    assert 0 < sent < len(expected)  # a socket's buffer is smaller than that
    came += drain(theirs)
    left = vectored_io.unsent(parts, sent)
    while left:
        sent = vectored_io.write_parts(ours.fileno(), left)
        left = vectored_io.unsent(left, sent)
        came += drain(theirs)
    assert came + drain(theirs) == expected


def test_unsent_cuts_anywhere():
    parts = [b"ab", vector(2 * SIZE + 9), b"cd"]
    whole = b"ab" + wire(2 * SIZE + 9) + b"cd"
    for sent in (0, 1, 2, 3, 10, 11, 12, SIZE + 11, SIZE + 12, len(whole) - 1, len(whole)):
        assert b"".join(vectored_io.unsent(parts, sent)) == whole[sent:]


@pytest.mark.parametrize("came", [1, 50, 100, 104, 109, 110, 5000, 100 + 9 + SIZE + 4, None])
def test_bytes_are_received_where_they_belong(engine, sockets, came):
    ours, theirs = sockets
    nbytes, lead = 100 + 2 * SIZE + 500, 100
    sent = wire(nbytes, lead)[:came]
    theirs.send(sent)
    place = bytearray(nbytes)
    headers = bytearray(4 * len(HEADER))
    into = FrameVector(memoryview(headers), memoryview(place), SIZE, lead)
    assert vectored_io.read_vector(ours.fileno(), into) == len(sent)
    assert bytes(into)[: len(sent)] == sent
    assert not any(bytes(into)[len(sent) :])


def test_a_socket_that_has_nothing_or_is_closed_moves_nothing(engine, sockets):
    ours, theirs = sockets
    into = FrameVector(memoryview(bytearray(9)), memoryview(bytearray(10)), SIZE)
    assert vectored_io.read_vector(ours.fileno(), into) == 0
    theirs.close()
    assert vectored_io.read_vector(ours.fileno(), into) == 0
    assert vectored_io.write_parts(ours.fileno(), [vector(100)]) == 0


def test_a_vector_with_too_few_headers_is_refused_by_the_compiled_path():
    compiled = native()
    if compiled is None:
        pytest.skip("the compiled module is absent")
    with pytest.raises(ValueError, match="a header per frame"):
        compiled.write_parts(1, [FrameVector(HEADER, BODY[: 2 * SIZE], SIZE)])
