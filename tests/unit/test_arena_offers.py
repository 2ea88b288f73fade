"""Memory offered to a stub, which takes it, or refuses it and gets the next offer."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from gpubridge.stub.device.regions import ArenaOffers
from gpubridge.transport.channel import Channel, ChannelClosed, pair
from gpubridge.transport.messages import Kind, control_message, decode_control


@pytest.fixture
def ends():
    """The server's end, and the stub's."""
    server, stub = map(Channel, pair())
    # What never comes fails, and does not hang.
    stub.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
    yield server, stub
    server.close()
    stub.close()


def opened():
    return os.open("/dev/null", os.O_RDONLY)


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_an_offer_that_is_not_taken_is_closed(ends):
    fd = opened()
    offers = ArenaOffers(ends[1], {"region": 1}, [fd])
    assert offers.fields == {"region": 1}
    offers.close()
    assert not is_open(fd)
    assert offers.take_fds() == []


def test_descriptors_that_are_taken_are_the_callers(ends):
    fd = opened()
    offers = ArenaOffers(ends[1], {}, [fd])
    assert offers.take_fds() == [fd]
    offers.close()
    assert is_open(fd)
    os.close(fd)


def test_who_refuses_hears_of_the_next_and_misses_nothing(ends):
    server, stub = ends
    first, second = opened(), opened()
    offers = ArenaOffers(stub, {"region": 1}, [first])
    # Another stub has completed the configuration of their model meanwhile.
    server.send(control_message(Kind.CONFIGURE, name="m"))
    server.send(control_message(Kind.ARENA, region=2), (second,))
    server.send(control_message(Kind.TRIM))
    offers.refuse("it cannot be opened")
    message, _ = server.receive()
    assert message[0] == Kind.ARENA_REFUSED
    assert decode_control(message) == {"reason": "it cannot be opened"}
    assert offers.fields == {"region": 2}
    (fd,) = offers.take_fds()
    assert os.path.sameopenfile(fd, second)
    kinds = [offers.next_message()[0][0] for _ in range(2)]
    assert kinds == [Kind.CONFIGURE, Kind.TRIM]
    for each in (fd, second):
        os.close(each)


def test_a_server_that_goes_ends_it(ends):
    server, stub = ends
    offers = ArenaOffers(stub, {}, [])
    server.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelClosed):
        offers.refuse("it cannot be opened")
