"""The channel: whole messages, descriptors, and what the other side may do wrong."""

import array
import os
import resource
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest

from gpubridge.tensor.native import absence, native
from gpubridge.transport import channel
from gpubridge.transport.channel import (
    FRAME_LIMIT,
    Channel,
    ChannelClosed,
    DescriptorsLost,
    MalformedMessage,
    pair,
)


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["compiled", "in Python"])
def ends(request, monkeypatch):
    if request.param == "in Python":
        monkeypatch.setattr(channel, "native", lambda: None)
    elif native() is None:
        pytest.skip(f"the compiled module is not there: {absence()}")
    before = open_fds()
    ours, theirs = (Channel(sock) for sock in pair())
    yield ours, theirs
    ours.close()
    theirs.close()
    assert open_fds() <= before


def memfd(data):
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


@pytest.mark.parametrize("size", [1, 100, FRAME_LIMIT, FRAME_LIMIT + 1, 5 * FRAME_LIMIT])
def test_messages_of_any_size_arrive_whole(ends, size):
    ours, theirs = ends
    message = (bytes(range(1, 256)) * (size // 255 + 1))[:size]
    assert ours.send(message)
    assert ours.send(b"next")
    got, fds = theirs.receive()
    assert bytes(got) == message
    assert fds == []
    assert bytes(theirs.receive()[0]) == b"next"


@pytest.mark.parametrize("size", [10, FRAME_LIMIT + 1])
def test_descriptors_arrive_with_their_message(ends, size):
    ours, theirs = ends
    mine = [memfd(b"one"), memfd(b"two")]
    ours.send(b"x" * size, mine)
    got, fds = theirs.receive()
    assert len(got) == size
    assert [os.pread(fd, 10, 0) for fd in fds] == [b"one", b"two"]
    # Passed on to children they would outlive their purpose.
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds + mine:
        os.close(fd)


def test_a_channel_that_was_closed_here_is_closed(ends):
    ours, _ = ends
    ours.close()
    with pytest.raises(ChannelClosed):
        ours.receive()


def test_a_signal_does_not_end_the_wait(ends):
    ours, theirs = ends
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: (seen.append(1), ours.send(b"then")))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert theirs.receive() == (b"then", [])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen


def test_an_exception_of_a_signal_handler_ends_the_wait(ends):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            ends[1].receive()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_others_go_on_while_one_waits(ends):
    ours, theirs = ends
    threading.Timer(0.02, ours.send, [b"from a thread"]).start()
    assert theirs.receive() == (b"from a thread", [])


def test_end_of_stream_is_told(ends):
    ours, theirs = ends
    theirs.send(b"last")
    theirs.close()
    assert bytes(ours.receive()[0]) == b"last"
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(b"x")
    with pytest.raises(ChannelClosed):
        ours.send(b"x" * (FRAME_LIMIT + 1))


def test_nothing_there_and_no_room_do_not_block(ends):
    ours, theirs = ends
    ours.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.receive()
    sent = 0
    while ours.send(b"x" * FRAME_LIMIT):
        sent += 1
    assert not ours.send(b"y" * FRAME_LIMIT)
    before = open_fds()
    assert not all(ours.send(b"y" * (FRAME_LIMIT + 1)) for _ in range(10_000))
    assert open_fds() <= before
    for _ in range(sent):
        assert bytes(theirs.receive()[0][:1]) == b"x"
    while True:
        theirs.socket.setblocking(False)
        try:
            assert bytes(theirs.receive()[0][:1]) == b"y"
        except BlockingIOError:
            break


def test_a_datagram_beyond_the_limit_is_malformed(ends):
    ours, theirs = ends
    ours.socket.send(b"x" * (FRAME_LIMIT + 1))
    with pytest.raises(MalformedMessage):
        theirs.receive()
    ours.send(b"good")
    assert bytes(theirs.receive()[0]) == b"good"


@pytest.mark.parametrize("size", [10, 5 * FRAME_LIMIT])
def test_descriptors_that_this_process_has_no_room_for_are_not_the_others_fault(ends, size):
    ours, theirs = ends
    fd = memfd(b"data")
    for _ in range(2):
        assert ours.send(b"m" * size, [fd, fd])
        assert ours.send(b"next")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(fd)
    os.close(free)
    try:
        # The kernel has room for none of them, or for one.
        for room in range(2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, limits[1]))
            with pytest.raises(DescriptorsLost, match="ulimit -n"):
                theirs.receive()
            assert bytes(theirs.receive()[0]) == b"next"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(fd)


def test_too_many_descriptors_are_closed_and_malformed(ends):
    ours, theirs = ends
    mine = memfd(b"x")
    before = open_fds()
    socket.send_fds(ours.socket, [b"x"], [mine] * 60)
    with pytest.raises(MalformedMessage):
        theirs.receive()
    assert open_fds() <= before
    os.close(mine)


def notice(size, kind=0):
    return struct.pack("<BxxxQ", kind, size)


@pytest.mark.parametrize(
    ("message", "data"),
    [
        (notice(10), None),
        (notice(10)[:-1], b"x" * 10),
        (b"\0", b"x"),
        (notice(10), b"x" * 9),
        (notice(10), b"x" * 11),
        (notice(0), b""),
        (notice(1 << 60), b"x"),
        (notice((1 << 64) - 1), b"x"),
    ],
)
def test_lying_notices_of_long_messages_are_malformed(ends, message, data):
    ours, theirs = ends
    mine = [] if data is None else [memfd(data), memfd(b"other")]
    before = open_fds()
    ours.socket.sendmsg(
        [message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", mine))] if mine else []
    )
    with pytest.raises(MalformedMessage):
        theirs.receive()
    assert open_fds() <= before
    for fd in mine:
        os.close(fd)


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket", "write-only"])
def test_descriptors_that_hold_no_message_are_malformed(ends, tmp_path, kind):
    ours, theirs = ends
    extra = []
    if kind == "directory":
        fd = os.open(tmp_path, os.O_RDONLY)
    elif kind == "pipe":
        fd, other = os.pipe()
        extra = [other]
    elif kind == "socket":
        fd = socket.socket().detach()
    else:
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x" * 4096)
    size = os.fstat(fd).st_size
    socket.send_fds(ours.socket, [notice(size)], [fd])
    with pytest.raises(MalformedMessage):
        theirs.receive()
    for end in (fd, *extra):
        os.close(end)
