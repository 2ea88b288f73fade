"""Clients' POSIX shared memory: opened by the server, which never accesses it, and mapped by stubs.

Access to memory of an object that its owner has shrunk raises SIGBUS. So the server only keeps the
descriptor; each stub maps the object and continues with zeros in place of lost pages, which are never
sent as a response. It does the same if /dev/shm is full and a page is missing. Without the compiled
module the stub dies.
"""

from __future__ import annotations

import mmap
import os
import stat

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor.native import native

_DIRECTORY = b"/dev/shm/"
_OPEN = os.O_RDWR | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_NAME = 255


class ClientSegment:
    """A client's shared memory object, opened and checked but not mapped; owns its descriptor."""

    __slots__ = ("fd", "region", "size")

    def __init__(self, region: int, fd: int, size: int) -> None:
        self.region = region
        self.fd = fd
        self.size = size

    @classmethod
    def open(cls, region: int, key: str, offset: int, nbytes: int) -> ClientSegment:
        """Open the object named ``key``, to use ``nbytes`` of it from ``offset`` on.

        Opens only regular files directly in /dev/shm, follows no links, and requires that the file
        belongs to the server's user or is writable by everybody: a client must not reach other users'
        memory by the server's rights. Raises BridgeError: INTERNAL, in Triton's words, otherwise.
        """
        fd = _open_object(key)
        end = offset + nbytes
        if nbytes <= 0 or offset < 0 or end > os.fstat(fd).st_size:
            os.close(fd)
            raise BridgeError(f"Invalid shared memory region: '{key}'", ErrorCode.INTERNAL)
        return cls(region, fd, end)

    def has(self, end: int) -> bool:
        """Return whether the object still has at least ``end`` bytes."""
        return os.fstat(self.fd).st_size >= end

    def close(self) -> None:
        """Close the descriptor; idempotent. Mappings of stubs stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class ClientMapping:
    """Mapping of a client's object; views of its ``memory`` keep it mapped."""

    def __init__(self, mapped: mmap.mmap, fd: int) -> None:
        self._mapped = mapped
        self._renewed = 0
        compiled = native()
        self._watched = None if compiled is None else compiled.WatchedPages(mapped, fd)
        self.memory = memoryview(mapped if self._watched is None else self._watched)

    @property
    def lost(self) -> bool:
        """Return whether pages were accessed that the client had removed; they hold zeros now."""
        return self._watched is not None and self._watched.lost

    @property
    def starved(self) -> int:
        """Count of accesses to pages for which /dev/shm had no memory."""
        return 0 if self._watched is None else self._watched.starved

    def renew(self) -> None:
        """Map the object anew where such pages hold zeros."""
        if self._watched is not None and self.starved > self._renewed:
            self._renewed = self.starved
            self._watched.renew()

    def size(self) -> int:
        """Return the current size, which the client may have shrunk."""
        return 0 if self.lost else min(len(self.memory), self._mapped.size())


def map_client_region(fd: int, size: int) -> ClientMapping | None:
    """Map a client's object, writable; takes over ``fd``. None if it was shrunk or mapping fails."""
    try:
        return ClientMapping(mmap.mmap(fd, size), fd)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _open_object(key: str) -> int:
    """Open an object after checking that it is a regular file of a permitted owner."""
    name = key.removeprefix("/")
    refusal = BridgeError(f"Unable to open shared memory region: '{key}'", ErrorCode.INTERNAL)
    raw = name.encode(errors="surrogatepass")
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(raw) > _LONGEST_NAME:
        raise refusal
    try:
        # Checked before it is opened: opening a fifo or a device may have effects.
        found = os.open(_DIRECTORY + raw, _LOOK)
    except OSError as error:
        raise refusal from error
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise refusal
        if status.st_uid != os.geteuid() and status.st_mode & 0o006 != 0o006:
            raise BridgeError(
                f"Unable to open shared memory region: '{key}': it belongs to user {status.st_uid}, "
                f"the server is user {os.geteuid()}; run both as one user, or let everybody read and "
                "write the object",
                ErrorCode.INTERNAL,
            )
        return os.open(f"/proc/self/fd/{found}", _OPEN)
    except OSError as error:
        raise refusal from error
    finally:
        os.close(found)
