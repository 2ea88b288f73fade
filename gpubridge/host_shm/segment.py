"""Segment: a sealed memfd and this process's mapping of it.

A memfd has no name, so it leaves nothing in /dev/shm and ends with the last process that uses it. Its
size is sealed before other processes get it: a process that shrank it would kill all readers
(SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from gpubridge.errors import BridgeError, invalid, unavailable

_ADVICE = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "close files that other processes have open",
    errno.ENOMEM: "free memory, or raise this process's limit of addresses (ulimit -v)",
    errno.EFBIG: "raise this process's limit of a file's size (ulimit -f)",
}
"""What to do where this process lacks something."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A mapped memfd, made (`create`) or opened (`open`), which owns ``fd`` and the mapping.

    :meth:`close` releases both, but memory with views stays mapped until the last view is deleted. A
    deleted object closes itself: the memory of a dead process can be passed on as long as its segment
    is referred to.

    - ``home``: the model, or ensemble of models, that may map the memory writable; empty for memory of
      the server, which others may only read.
    - ``pinned``: whether this process pins the memory; it is then released only if memory is short.
    """

    __slots__ = ("_map", "_read_only_fd", "fd", "home", "pinned", "region", "size", "view")

    def __init__(
        self, region: int, fd: int, size: int, home: str = "", *, writable: bool = True
    ) -> None:
        # The object owns the descriptors only once nothing can fail any more.
        self.fd = self._read_only_fd = -1
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map: mmap.mmap | None = mmap.mmap(fd, size, prot=access)
        self.region = region
        self.size = size
        self.home = home
        self.pinned = False
        self.view = memoryview(self._map)
        self.fd = fd

    @classmethod
    def create(cls, region: int, size: int, home: str = "") -> Segment:
        """Make a new sealed segment of zeros, whose pages are allocated on first access."""
        try:
            fd = os.memfd_create("gpubridge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _unavailable(size, error) from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(region, fd, size, home)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise _unavailable(size, error) from error

    @classmethod
    def open(
        cls, region: int, fd: int, size: int, home: str = "", *, writable: bool = True
    ) -> Segment:
        """Map a segment that another process made; takes over ``fd`` (closed on failure).

        Unless ``writable``, a write to the mapping ends this process. Raises BridgeError: INVALID_ARG
        unless it is a memfd of this size, sealed against shrinking; UNAVAILABLE if this process has no
        descriptor or memory left for the mapping.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            actual = os.fstat(fd).st_size
            if seals & fcntl.F_SEAL_SHRINK == 0 or actual != size or size <= 0:
                raise invalid(
                    f"region {region}: expected a memfd of {size} bytes sealed against shrinking, "
                    f"got {actual} bytes with seals {seals:#x}"
                )
            return cls(region, fd, size, home, writable=writable)
        except BridgeError:
            os.close(fd)
            raise
        except (OSError, ValueError) as error:
            os.close(fd)
            text = f"region {region}: cannot map {size} bytes: {error}"
            advice = _ADVICE.get(getattr(error, "errno", 0))
            if advice is not None:
                # The mapping takes a descriptor of its own.
                raise unavailable(f"{text}; {advice}") from error
            raise invalid(text) from error

    @property
    def read_only_fd(self) -> int:
        """Descriptor by which another process can map this memory read-only."""
        if self._read_only_fd < 0:
            try:
                self._read_only_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise unavailable(
                    f"region {self.region}: cannot be opened for reading: {error}"
                ) from error
        return self._read_only_fd

    def punch(self, offset: int, nbytes: int) -> bool:
        """Release the pages of an unpinned range; return whether that succeeded."""
        assert self._map is not None
        try:
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close descriptors and mapping; idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._read_only_fd >= 0:
            os.close(self._read_only_fd)
            self._read_only_fd = -1
        self.view.release()
        # Existing views keep the mapping.
        self._map = None

    def __del__(self) -> None:
        self.close()


def _unavailable(size: int, error: Exception) -> BridgeError:
    advice = _ADVICE.get(getattr(error, "errno", 0), "free memory, or raise this process's limits")
    return unavailable(f"cannot create a shared memory segment of {size} bytes: {error}; {advice}")
