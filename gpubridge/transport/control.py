"""Control page: a small segment of memory that the server shares with one stub.

Map (bytes)::

    0   u64  started   sequence number of the batch whose execute runs or ran last   stub writes
    8   u64  started_at  CLOCK_MONOTONIC nanoseconds of that start                  stub writes
    16  u8   log_levels  bits of the levels of ``pb_utils.Logger`` that are logged  server writes
    17  u8   events_used  1 while other stubs may wait for this stub's events       server writes
    24  u64  claimed   number of the last batch that the stub began or the server withdrew;
                       bit 63: the stub must claim each batch before it begins      both, atomically
    64  u8[TICKETS]  lent       1 while the stub may use the ticket's memory          server 1, stub 0
    ..  u8[TICKETS]  cancelled  ABANDONED, CANCELLED or GIVEN_UP: it is cancelled     server writes
    ..  u8[LEASES]   outputs    1 while the server may use an output slot             stub 1, server 0
    ..  u32[TICKETS] passed_on  responses of the ticket's request that have left      server writes
    ..  u32[TICKETS] received   responses of this run of the request that the server has  server writes
    ..  u64[7] device_work  counters of the stub's GPU work: bytes h2d, d2h, d2d,
                            copies h2d, d2h, d2d, completion waits                    stub writes
    ..  u8[EVENTS] pending  1 from when an event is sent until its work has completed  stub writes
    ..  u64  looked   CLOCK_MONOTONIC nanoseconds of the last check of the streams' waits; 0 while
                      no stream waits                                               stub writes
    ..  u64[AWAITED] awaited  other stubs' events that streams wait for, by `event_name`  stub writes
    ..  u64  gathered_word  bytes of ``gathered``, and in the upper half its number of batches;
                            0 once they are sent                                      stub writes
    ..  u8[GATHERED_BYTES] gathered  a RESULTS message that is being gathered; its head is
                            written when it is sent                                   stub writes

A *ticket* names a request at the stub, and the memory that the stub borrows for it; a *lease* names
a slot of the stub's output memory that the server borrows. The lender sets the byte before it sends
the message that names it and the borrower clears it when its last view is deleted, so each byte has
one writer at a time and returning memory costs no message. When the borrower dies, the lender
reclaims all leases, and the server reads the results that a dead stub had gathered.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

from gpubridge.host_shm import Segment
from gpubridge.transport.channel import FRAME_LIMIT

TICKETS = 1 << 20
LEASES = 1 << 20
"""Cells take memory once they are used."""
LARGEST_BATCH = 4096
EVENTS = 64
"""This many responses and calls of a stub can be in flight to other stubs of its GPU."""
AWAITED = 64
"""The server sees at most this many events that a stub's streams wait for at once."""
FRAME_HEAD = 8
"""Bytes of a RESULTS message before the results."""
GATHERED_BYTES = FRAME_LIMIT // 2
"""A RESULTS message is sent once it is longer than this."""
NO_LEASE = 0xFFFF_FFFF
ABANDONED = 1
"""The request is cancelled, and further responses are discarded."""
CANCELLED = 2
"""The request is cancelled by a caller that reads further responses."""
GIVEN_UP = 3
"""The request is cancelled as its model is to end; no response waits for a client."""

_LENT_AT = 64
_CANCELLED_AT = _LENT_AT + TICKETS
_OUTPUTS_AT = _CANCELLED_AT + TICKETS
_PASSED_ON_AT = _OUTPUTS_AT + LEASES
_RECEIVED_AT = _PASSED_ON_AT + 4 * TICKETS
_DEVICE_WORK_AT = _RECEIVED_AT + 4 * TICKETS
_DEVICE_WORDS = 9
_PENDING_AT = _DEVICE_WORK_AT + 8 * _DEVICE_WORDS
_LOOKED_AT = _PENDING_AT + EVENTS
_AWAITED_END = _LOOKED_AT + 8 * (1 + AWAITED)
_GATHERED_WORD_AT = _AWAITED_END + -_AWAITED_END % 64
_GATHERED_AT = _GATHERED_WORD_AT + 8
_SIZE = _GATHERED_AT + GATHERED_BYTES


class EventCells(NamedTuple):
    """Cells by which stubs on a GPU wait for each other; see the map."""

    pending: memoryview
    used: memoryview
    awaited: memoryview
    """``looked``, then ``awaited``."""


class ControlPage:
    """Views of the parts of the control page; owns the segment."""

    SIZE = _SIZE

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        # Made at once, so that `close` cannot fail where memory is short.
        self._own = _zeros()
        self._attach(segment.view)

    def _attach(self, view: memoryview) -> None:
        self.progress = view[:16].cast("Q")
        self._log_levels = view[16:17]
        self.claimed = view[24:32].cast("Q")
        self.lent = view[_LENT_AT:_CANCELLED_AT]
        self.cancelled = view[_CANCELLED_AT:_OUTPUTS_AT]
        self.outputs = view[_OUTPUTS_AT:_PASSED_ON_AT]
        self.passed_on = view[_PASSED_ON_AT:_RECEIVED_AT].cast("I")
        self.received = view[_RECEIVED_AT:_DEVICE_WORK_AT].cast("I")
        self.device_work = view[_DEVICE_WORK_AT:_PENDING_AT].cast("Q")
        self.events = EventCells(
            view[_PENDING_AT:_LOOKED_AT], view[17:18], view[_LOOKED_AT:_AWAITED_END].cast("Q")
        )
        self.gathered_word = view[_GATHERED_WORD_AT:_GATHERED_AT].cast("Q")
        self.gathered = view[_GATHERED_AT:_SIZE]
        self._clock = time.monotonic_ns

    def start(self, sequence: int) -> int:
        """Record that ``execute`` starts with this batch (stub); returns the time in ns."""
        now = self._clock()
        # The time first: a reader of the new number must not see the old time.
        self.progress[1] = now
        self.progress[0] = sequence
        return now

    @property
    def started(self) -> int:
        """Sequence number of the batch started last; 0 before the first."""
        return self.progress[0]

    @property
    def started_at(self) -> int:
        """Start time of that batch, in CLOCK_MONOTONIC nanoseconds."""
        return self.progress[1]

    @property
    def gathered_results(self) -> tuple[int, bytes]:
        """Number of batches whose results a dead stub had gathered, and the results."""
        count, size = divmod(self.gathered_word[0], 1 << 32)
        return count, bytes(self.gathered[FRAME_HEAD:size])

    @property
    def log_levels(self) -> int:
        """Bits of the levels of ``pb_utils.Logger`` that are logged."""
        return self._log_levels[0]

    @log_levels.setter
    def log_levels(self, levels: int) -> None:
        self._log_levels[0] = levels

    def detach(self) -> None:
        """Use a private copy from now on: for a forked child, which must not write here."""
        copy = self._own
        source, end = self.segment.fd, 0
        # Only what is in memory: to read other pages would allocate them for all.
        while (begin := _next_data(source, end)) is not None:
            end = os.lseek(source, begin, os.SEEK_HOLE)
            os.preadv(source, [copy[begin:end]], begin)
        self._attach(copy)

    def close(self) -> None:
        """Release the views and the segment."""
        self._attach(self._own)
        self.segment.close()


def _zeros() -> memoryview:
    """Return private memory of a page's size, which is allocated on first access."""
    return memoryview(mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _next_data(fd: int, at: int) -> int | None:
    """Return where a sparse file has data, from an offset on; None if nowhere."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        return None
