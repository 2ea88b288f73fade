"""Device memory announced to a stub, and the time at which it may be freed."""

import asyncio
import gc

import pytest

from gpubridge.engine.memory.device_region import DeviceRegion
from gpubridge.engine.memory.region_announcer import OpenDeviceRegions, RegionAnnouncer
from gpubridge.engine.memory.regions import Regions
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import Kind, decode_control

REGION = 5 << 32 | 1 << 31


class Segment:
    """A segment of device memory that says when it is given back."""

    region, size, uuid, handle, pointer = REGION, 4096, "GPU-0", bytes(64), 0
    fds: tuple[int, ...] = ()


class Connection:
    """A connection to a stub that unmaps what it is told to."""

    uploads = False

    def drop_region(self, region):
        self.announcer.drop(region)

    def pin_range(self, region, offset, nbytes):
        pass


@pytest.fixture
def freed():
    return []


@pytest.fixture
def arena(freed):
    return DeviceRegion(Segment(), freed.append)


@pytest.fixture
def told():
    return []


@pytest.fixture
def opened():
    return OpenDeviceRegions()


@pytest.fixture
def connection():
    return Connection()


@pytest.fixture
def regions():
    made = Regions(8 << 20)
    while made.new_owner() < REGION >> 32:
        pass
    return made


@pytest.fixture
def announcer(regions, connection, opened, told):
    connection.announcer = RegionAnnouncer(
        Kind, regions, connection, opened, lambda message, fds=(): told.append((message, fds))
    )
    return connection.announcer


def test_a_region_is_told_by_its_handle_and_without_a_descriptor(announcer, arena, told):
    announcer.announce(arena)
    ((message, fds),) = told
    assert message[0] == Kind.DEVICE_REGION
    assert fds == ()
    assert decode_control(message) == {
        "region": REGION,
        "size": 4096,
        "handle": "00" * 64,
        "events": "",
        "uuid": "GPU-0",
        "client": False,
    }


def test_a_region_without_a_handle_is_told_with_its_descriptor(announcer, freed, told):
    segment = Segment()
    segment.handle, segment.fds = b"", (11,)
    announcer.announce(DeviceRegion(segment, freed.append))
    ((message, fds),) = told
    assert fds == (11,)
    assert decode_control(message)["handle"] == ""


def test_memory_that_a_stub_has_open_is_not_freed_before_it_is_closed(
    announcer, opened, arena, freed
):
    announcer.announce(arena)
    announcer.drop(REGION)
    # It is told again, while what the stub says of the first time is on its way.
    announcer.announce(arena)
    assert not opened.closed(REGION, 1)
    assert opened.closed(REGION, 1)
    with pytest.raises(MalformedMessage):
        opened.closed(REGION, 1)
    assert freed == []


def test_a_region_that_nobody_refers_to_is_freed(freed):
    opened = OpenDeviceRegions()
    opened.announced(DeviceRegion(Segment(), freed.append))
    gc.collect()
    assert freed == []
    opened.close()
    gc.collect()
    assert len(freed) == 1


@pytest.mark.parametrize(("region", "announcements"), [(REGION, 2), (REGION + 1, 1)])
def test_a_stub_closes_only_what_it_was_told_of(opened, arena, region, announcements):
    opened.announced(arena)
    with pytest.raises(MalformedMessage, match=rf"region {region:#x} closed after"):
        opened.closed(region, announcements)


def test_shared_memory_is_announced_read_only_by_its_own_id(announcer, regions, told):
    arena = regions.arena("m")
    slot = arena.allocate(100)
    region = slot.segment.region
    assert announcer.name(slot.segment, read_only=False) == region
    shared = announcer.name(slot.segment, read_only=True)
    assert shared == announcer.name(slot.segment, read_only=True) != region
    fds = [fds for _, (fds) in told]
    assert fds == [(slot.segment.fd,), (slot.segment.read_only_fd,)]
    assert [decode_control(message)["region"] for message, _ in told] == [region, shared]
    # Both go with the memory.
    arena.free(slot)
    arena.trim(0.0)
    dropped = told[2:]
    assert {message[0] for message, _ in dropped} == {Kind.DROP_REGION}
    assert {decode_control(message)["region"] for message, _ in dropped} == {region, shared}


def test_memory_that_is_in_use_is_pinned_by_who_uploads_it(announcer, connection, regions):
    pinned = []
    connection.pin_range = lambda *what: pinned.append(what)
    arena = regions.arena("m")
    region = arena.allocate(100).segment.region
    announcer.name(arena.segments()[0], read_only=False)
    # No stub pins it: it goes back as ever.
    assert (pinned, arena.budget.used) == ([], 4096)
    announcer.drop(region)
    connection.uploads = True
    announcer.name(arena.segments()[0], read_only=True)
    assert pinned == []
    announcer.name(arena.segments()[0], read_only=False)
    arena.free(arena.allocate(100_000))
    assert [what[0] for what in pinned] == [region, region]
    assert pinned[0][1] + pinned[0][2] == pinned[1][1]
    arena.trim(0.0)
    assert arena.budget.used == pinned[0][2] + pinned[1][2]
    # With the stub goes what pinned it.
    regions.leave(connection, [region])
    arena.trim(0.0)
    assert arena.budget.used == 4096


async def test_memory_that_is_needed_elsewhere_is_unpinned_behind_the_message_being_made(
    announcer, connection, regions, told
):
    connection.uploads, connection.pin_range = True, lambda *_: None
    slot = regions.arena("m").allocate(100)
    announcer.name(slot.segment, read_only=False)
    regions.arena("other").allocate(7 << 20)
    assert len(told) == 1
    await asyncio.sleep(0)
    assert [message[0] for message, _ in told] == [Kind.REGION, Kind.DROP_REGION]
    # What is still sent in it is not pinned again.
    connection.pin_range = None
    announcer.name(slot.segment, read_only=False)
    assert told[-1][0][0] == Kind.REGION
