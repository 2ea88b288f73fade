"""The control page: what one side writes the other reads, and a fork leaves it alone."""

import mmap
import os
import time

import pytest

from gpubridge.host_shm import Segment
from gpubridge.transport.control import LEASES, TICKETS, ControlPage


@pytest.fixture
def sides():
    server = ControlPage(Segment.create(0, ControlPage.SIZE))
    stub = ControlPage(Segment.open(0, os.dup(server.segment.fd), ControlPage.SIZE))
    yield server, stub
    server.close()
    stub.close()


def test_a_start_is_seen_with_its_time(sides):
    server, stub = sides
    assert server.started == 0
    before = time.monotonic_ns()
    told = stub.start(41)
    assert (server.started, server.started_at) == (41, told)
    assert before <= told <= time.monotonic_ns()


@pytest.mark.parametrize("part", ["lent", "cancelled", "outputs"])
def test_parts_are_shared_and_do_not_overlap(sides, part):
    server, stub = sides
    sizes = {"lent": TICKETS, "cancelled": TICKETS, "outputs": LEASES}
    for name, size in sizes.items():
        assert len(getattr(server, name)) == size
    getattr(stub, part)[:] = b"\xff" * sizes[part]
    for name in sizes:
        assert set(getattr(server, name)) == ({255} if name == part else {0})
    assert (server.started, server.started_at) == (0, 0)


def test_detached_it_writes_to_nobody(sides):
    server, stub = sides
    server.cancelled[3] = 1
    stub.detach()
    assert stub.cancelled[3] == 1
    stub.lent[0] = 1
    stub.start(9)
    assert (server.lent[0], server.started) == (0, 0)


def test_closed_it_can_still_be_asked(sides, monkeypatch):
    server, _ = sides
    server.start(5)
    # What gives memory back must not need any: none may be left.
    monkeypatch.setattr(mmap, "mmap", None)
    server.close()
    server.close()
    assert server.started == 0
    assert len(server.lent) == TICKETS
