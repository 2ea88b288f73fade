"""The output memory that one stub makes: what it announces is checked like any foreign input."""

from __future__ import annotations

from gpubridge.errors import BridgeError
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import BorrowedMemory, is_read_only


class StubMemory:
    """Maps the regions that a stub makes, within its limit; owns the mappings.

    - ``owner``: upper half of the ids of the stub's regions.
    - ``limit``: bytes that all of them together may have.
    - ``table``: the lease bytes by which the server says that it is done with a slot.

    Attribute ``borrowed``: gives views of it.
    """

    def __init__(self, owner: int, limit: int, table: memoryview) -> None:
        self.owner = owner
        self.limit = limit
        self.borrowed = BorrowedMemory(table)
        self._sizes: dict[int, int] = {}

    def announce(self, region: int, size: int, fds: list[int], home: str) -> None:
        """Map a region, made for who is named by ``home``; its descriptor is the last of ``fds``.

        Raises MalformedMessage when it is not the stub's to announce, too large, or no sealed
        memory of that size.
        """
        total = sum(self._sizes.values()) + size
        own = region >> 32 == self.owner and not is_read_only(region)
        if not own or region in self._sizes or not fds:
            raise MalformedMessage(f"region {region:#x} is not the stub's to announce")
        if total > self.limit:
            raise MalformedMessage(f"{total} bytes of output memory (limit {self.limit})")
        try:
            self.borrowed.announce(region, fds.pop(), size, home)
        except BridgeError as error:
            raise MalformedMessage(error.message) from error
        self._sizes[region] = size

    def drop(self, region: int) -> None:
        """Unmap a region.

        Raises MalformedMessage when it is not the stub's: nobody takes others' memory away, from
        them or from stubs.
        """
        if self._sizes.pop(region, None) is None:
            raise MalformedMessage(f"region {region:#x} is not the stub's to drop")
        self.borrowed.drop(region)

    def regions(self) -> list[int]:
        """The regions that are mapped."""
        return self.borrowed.regions()

    def close(self) -> None:
        """Unmap every region."""
        self.borrowed.close()
