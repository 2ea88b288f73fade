"""The registry of clients' shared memory: rules, texts, and that nothing else can be reached."""

import gc
import os
import stat
import uuid
from functools import partial
from pathlib import Path

import pytest

from gpubridge.engine.client_regions import ClientRegions, RegionUse
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import ClientSegment, map_client_region

SHM = Path("/dev/shm")
SIZE = 4096


class Stub:
    """The part of a stub's connection that the regions use."""

    def __init__(self):
        self.dropped = []
        self.kept = []
        self.done = False

    def drop_region(self, region):
        self.dropped.append(region)

    def release_kept(self):
        if self.done:
            self.kept.clear()


@pytest.fixture
def key():
    """An object of SIZE bytes."""
    path = SHM / f"gpubridge-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(SIZE))
    yield "/" + path.name
    path.unlink(missing_ok=True)


@pytest.fixture
def all_regions():
    regions = Regions(1 << 20)
    yield regions
    regions.close()


@pytest.fixture
def registry(all_regions):
    registry = ClientRegions(all_regions, DeviceManager(0), allowed=True, most=4)
    yield registry
    registry.close()


def refused(code, call, *arguments):
    with pytest.raises(BridgeError) as caught:
        call(*arguments)
    assert caught.value.code == code
    return caught.value.message


def open_files():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_it_is_off_unless_allowed(all_regions, key):
    registry = ClientRegions(all_regions, DeviceManager(0), allowed=False, most=4)
    text = refused(ErrorCode.UNSUPPORTED, registry.register, "r", key, 0, SIZE)
    assert "--allow-client-shm=true" in text
    assert registry.status() == []
    registry.unregister("r")


@pytest.mark.parametrize("names", ["one", "all"])
def test_a_region_that_a_stub_released_is_no_longer_in_use(registry, all_regions, key, names):
    registry.register("r", key, 0, SIZE)
    place = registry.place("r", 0, 8)
    stub = Stub()
    stub.kept.append(RegionUse([place], ()))
    all_regions.join(place.region.segment.region, stub)
    forget = partial(registry.unregister, "" if names == "all" else "r")
    refused(ErrorCode.INTERNAL, forget)
    stub.done = True
    forget()
    assert registry.status() == []


def test_only_so_many_at_once(registry, key):
    for number in range(4):
        registry.register(str(number), key, 0, SIZE)
    text = refused(ErrorCode.UNAVAILABLE, registry.register, "one more", key, 0, SIZE)
    assert "at most 4 regions" in text
    assert "--client-shm-max-regions" in text
    refused(ErrorCode.ALREADY_EXISTS, registry.register, "0", key, 0, SIZE)
    registry.unregister("2")
    registry.register("one more", key, 0, SIZE)


def test_no_file_in_a_folder_is_reached(registry):
    folder = SHM / f"gpubridge-test-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        (folder / "file").write_bytes(bytes(SIZE))
        for bad in (f"/{folder.name}/file", f"{folder.name}/file", f"/../shm/{folder.name}/file"):
            text = refused(ErrorCode.INTERNAL, registry.register, "a", bad, 0, 8)
            assert text == f"Unable to open shared memory region: '{bad}'"
    finally:
        (folder / "file").unlink()
        folder.rmdir()


def make_fifo(path, key):
    os.mkfifo(path)


def make_directory(path, key):
    path.mkdir()


def make_link(path, key):
    path.symlink_to(SHM / key[1:])


def make_link_out(path, key):
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [make_fifo, make_directory, make_link, make_link_out])
def test_only_regular_files_are_opened(registry, key, make):
    path = SHM / f"gpubridge-test-{uuid.uuid4().hex}"
    make(path, key)
    files = open_files()
    try:
        text = refused(ErrorCode.INTERNAL, registry.register, "a", "/" + path.name, 0, 8)
    finally:
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()
    assert text == f"Unable to open shared memory region: '/{path.name}'"
    assert open_files() == files


def test_another_users_object_is_not_opened_by_the_servers_rights(registry, key, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    (SHM / key[1:]).chmod(0o600)
    text = refused(ErrorCode.INTERNAL, registry.register, "a", key, 0, SIZE)
    assert f"belongs to user {mine}" in text
    # Its owner lets everybody write it.
    (SHM / key[1:]).chmod(0o666)
    registry.register("a", key, 0, SIZE)


def test_a_shrunk_object_is_refused_before_anybody_touches_it(registry, key):
    registry.register("a", key, 0, SIZE)
    os.truncate(SHM / key[1:], 100)
    assert "was shrunk" in refused(ErrorCode.INVALID_ARG, registry.place, "a", 0, 101)
    assert registry.place("a", 0, 100).nbytes == 100
    os.truncate(SHM / key[1:], 2 * SIZE)
    assert registry.place("a", 0, SIZE).nbytes == SIZE


def test_a_region_that_was_shrunk_is_revoked_whoever_uses_it(registry, all_regions, key):
    registry.register("a", key, 0, SIZE)
    registry.register("b", key, 0, 100)
    use = RegionUse([registry.place("a", 0, 8)], [])
    (segment,) = use.segments
    stub = Stub()
    all_regions.join(segment.region, stub)
    assert not all_regions.revoke_shrunk({segment.region})
    os.truncate(SHM / key[1:], 100)
    assert not all_regions.revoke_shrunk({segment.region + 1})
    assert stub.dropped == [segment.region]
    assert [region.name for region in registry.status()] == ["b"]
    # Whatever its client does with it now.
    os.truncate(SHM / key[1:], SIZE)
    assert "was revoked: the object" in refused(ErrorCode.INVALID_ARG, registry.place, "a", 0, 8)
    registry.register("a", key, 0, SIZE)
    assert registry.place("a", 0, 8).nbytes == 8
    del use


def test_a_stub_that_used_a_shrunk_region_did_not_die_by_itself(registry, all_regions, key):
    registry.register("a", key, 0, SIZE)
    region = registry.place("a", 0, 8).region.segment.region
    stub, known = Stub(), {region, 5}
    # It is told to unmap the region by then.
    stub.drop_region = known.discard
    all_regions.join(region, stub)
    os.truncate(SHM / key[1:], 0)
    assert all_regions.revoke_shrunk(known)
    assert known == {5}
    assert not all_regions.revoke_shrunk({region, 5})
    registry.unregister("a")
    refused(ErrorCode.NOT_FOUND, registry.place, "a", 0, 8)


def test_a_region_in_use_is_not_unregistered(registry, key):
    registry.register("a", key, 0, SIZE)
    registry.register("b", key, 0, SIZE)
    use = RegionUse([registry.place("a", 0, 8), registry.place("a", 8, 8)], ["OUT"])
    text = refused(ErrorCode.INTERNAL, registry.unregister, "a")
    assert text == "Cannot unregister shared memory region 'a', it is currently in use."
    text = refused(ErrorCode.INTERNAL, partial(registry.unregister, ""))
    assert text == "Failed to unregister the following system shared memory regions: a ,"
    assert [r.name for r in registry.status()] == ["a"]
    del use
    registry.unregister("a")
    assert registry.status() == []


def test_unregistering_tells_the_stubs_and_closes_the_object(registry, all_regions, key):
    files = open_files()
    registry.register("a", key, 0, SIZE)
    stub = Stub()
    place = registry.place("a", 0, 8)
    region = place.region.segment.region
    all_regions.join(region, stub)
    registry.unregister("a")
    assert stub.dropped == [region]
    # The place is still held: the object stays open until it is released.
    assert open_files() == files + 1
    del place
    assert open_files() == files


def test_an_unlinked_object_is_used_on(registry, key):
    registry.register("a", key, 0, SIZE)
    (SHM / key[1:]).unlink()
    assert registry.place("a", 0, SIZE).nbytes == SIZE
    assert refused(ErrorCode.INTERNAL, registry.register, "b", key, 0, SIZE)


def test_a_mapping_shows_the_clients_bytes_both_ways(key):
    segment = ClientSegment.open(7, key, 0, SIZE)
    mapping = map_client_region(os.dup(segment.fd), segment.size)
    assert mapping is not None
    mapping.memory[10:13] = b"abc"
    assert (SHM / key[1:]).read_bytes()[10:13] == b"abc"
    assert mapping.size() == SIZE
    os.truncate(SHM / key[1:], 100)
    assert mapping.size() == 100


def test_a_shrunk_object_is_not_mapped(key):
    files = open_files()
    segment = ClientSegment.open(7, key, 0, SIZE)
    os.truncate(SHM / key[1:], 0)
    assert map_client_region(os.dup(segment.fd), segment.size) is None
    segment.close()
    assert open_files() == files
