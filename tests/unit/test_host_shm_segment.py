"""Segments: sealed against the peer, refused when they are not what was announced."""

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from gpubridge.engine.memory.regions import StubMemory
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.transport.channel import DescriptorsLost

SIZE = 3 * 4096


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def no_fd_is_left():
    before = open_fds()
    yield
    assert open_fds() <= before


@pytest.fixture
def segment():
    segment = Segment.create(5, SIZE)
    yield segment
    segment.close()


def test_two_mappings_show_the_same_bytes(segment):
    other = Segment.open(5, os.dup(segment.fd), SIZE)
    segment.view[100:104] = b"abcd"
    assert bytes(other.view[100:104]) == b"abcd"
    other.view[SIZE - 1] = 7
    assert segment.view[SIZE - 1] == 7
    other.close()


def test_it_starts_zeroed_and_is_not_inherited(segment):
    assert bytes(segment.view) == bytes(SIZE)
    assert not os.get_inheritable(segment.fd)


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_it_cannot_be_resized(segment, size):
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)


def test_its_seals_are_sealed(segment):
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def unsealed(size, seals=0):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    return os.open(path, os.O_RDWR)


FOREIGN = {
    "not sealed": lambda _: unsealed(SIZE),
    "sealed against growing only": lambda _: unsealed(SIZE, fcntl.F_SEAL_GROW),
    "smaller": lambda _: unsealed(SIZE - 4096, fcntl.F_SEAL_SHRINK),
    "larger": lambda _: unsealed(SIZE + 4096, fcntl.F_SEAL_SHRINK),
    "empty": lambda _: unsealed(0, fcntl.F_SEAL_SHRINK),
    "a file": a_file,
    "a directory": lambda path: os.open(path, os.O_RDONLY),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_descriptors_are_refused_and_closed(make, tmp_path):
    fd = make(tmp_path)
    with pytest.raises(BridgeError, match="region 5") as caught:
        Segment.open(5, fd, SIZE)
    assert caught.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("size", [0, -1])
def test_no_size_is_refused(size):
    with pytest.raises(BridgeError):
        Segment.open(5, unsealed(4096, fcntl.F_SEAL_SHRINK), size)


def test_a_write_sealed_region_is_refused_not_mapped():
    fd = unsealed(SIZE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    with pytest.raises(BridgeError, match="cannot map"):
        Segment.open(5, fd, SIZE)


def test_a_region_for_which_there_is_no_descriptor_is_not_malformed():
    fds = [unsealed(SIZE, fcntl.F_SEAL_SHRINK) for _ in range(2)]
    memory = StubMemory(1, SIZE, memoryview(bytearray(8)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The mapping takes one of its own.
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 1, limits[1]))
    try:
        with pytest.raises(DescriptorsLost, match=r"Too many open files; .*ulimit -n"):
            memory.announce(1 << 32, SIZE, fds, "")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    memory.announce(1 << 32, SIZE, fds, "")
    memory.close()


def mappings():
    return sum(
        "memfd:gpubridge" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_memory_is_given_back_when_the_last_view_goes():
    segment = Segment.create(5, SIZE)
    before = mappings()
    view = segment.view[10:20]
    segment.close()
    segment.close()
    assert segment.fd == -1
    view[0] = 1
    assert mappings() == before
    del view
    assert mappings() == before - 1


def test_impossible_sizes_are_unavailable():
    with pytest.raises(BridgeError) as caught:
        Segment.create(1, 1 << 62)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_the_size_is_that_of_the_mapping(segment):
    assert segment.size == SIZE == os.fstat(segment.fd).st_size
    assert mmap.PAGESIZE <= SIZE


def test_a_descriptor_for_readers_gives_no_right_to_write(segment):
    fd = os.dup(segment.read_only_fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    reader = Segment.open(5, fd, SIZE, writable=False)
    segment.view[100:104] = b"abcd"
    assert bytes(reader.view[100:104]) == b"abcd"
    assert reader.view.readonly
    reader.close()


def test_holes_give_pages_back(segment):
    segment.view[:] = b"x" * SIZE
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE
    assert segment.punch(4096, 4096)
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE - 4096
    assert bytes(segment.view) == b"x" * 4096 + bytes(4096) + b"x" * 4096
