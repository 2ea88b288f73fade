"""The control page: one small segment that a server and one stub share for as long as both live.

Map (bytes)::

    0   u64  started   sequence number of the batch whose execute runs or ran last   stub writes
    8   u64  started_at  CLOCK_MONOTONIC nanoseconds of that start                  stub writes
    16  u8   log_levels  bits of the levels of ``pb_utils.Logger`` that are logged  server writes
    17  u8   events_used  1 while the stub may let others wait for its events       server writes
    24  u64  claimed   up to which batch the stub has begun, or the server has withdrawn;
                       bit 63: the stub claims each batch here before it begins     both, atomically
    64  u8[TICKETS]  lent       1 while the stub may look at the ticket's memory      server 1, stub 0
    ..  u8[TICKETS]  cancelled  NOBODY_WAITS or STILL_READ: the request is cancelled  server writes
    ..  u8[LEASES]   outputs    1 while the server may look at an output slot         stub 1, server 0
    ..  u32[TICKETS] passed_on  responses of the ticket's request that have left      server writes
    ..  u64[7] device_work  what the stub has done on its GPU: bytes h2d, d2h, d2d,
                            copies h2d, d2h, d2d, completion waits                    stub writes
    ..  u8[EVENTS] pending  1 from when an event is named until its work is seen done  stub writes
    ..  u64  looked   CLOCK_MONOTONIC nanoseconds of the last look at what streams wait for; 0 while
                      none has been told to wait                                    stub writes
    ..  u64[AWAITED] awaited  events of others that streams wait for, by `event_name`    stub writes
    ..  u64  gathered_word  bytes of ``gathered``, and in the upper half the number of batches
                            whose results they are; 0 once they are sent              stub writes
    ..  u8[GATHERED_BYTES] gathered  a RESULTS message that is being gathered; its head is
                            written when it is sent                                   stub writes

A *ticket* names a request at the stub, and the memory that the stub borrows for it; a *lease* names
a slot of the stub's output memory that the server borrows. The lender sets the byte before it sends
the message that names it and the borrower clears it when its last view is gone, so each byte has
one writer at a time and handing memory back costs no message. When the borrower died, the lender
takes everything back. What a dead stub had gathered, and perhaps sent, too, the server reads here.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from gpubridge.host_shm import Segment
from gpubridge.transport.channel import FRAME_LIMIT

TICKETS = 4096
LEASES = 4096
EVENTS = 64
"""As many responses and calls of a stub can be under way to other stubs of its GPU with no wait."""
AWAITED = 64
"""Where a stub's streams wait for more events than that at once, the server knows no more than this."""
FRAME_HEAD = 8
"""Bytes of a RESULTS message before the results."""
GATHERED_BYTES = FRAME_LIMIT // 2
"""A RESULTS message that grows longer is sent."""
NO_LEASE = 0xFFFF_FFFF
NOBODY_WAITS = 1
"""A request is cancelled, and what its model still sends is of no use."""
STILL_READ = 2
"""A request is cancelled by a caller that reads what its model still sends."""

_LENT_AT = 64
_CANCELLED_AT = _LENT_AT + TICKETS
_OUTPUTS_AT = _CANCELLED_AT + TICKETS
_PASSED_ON_AT = _OUTPUTS_AT + LEASES
_DEVICE_WORK_AT = _PASSED_ON_AT + 4 * TICKETS
_DEVICE_WORDS = 9
_PENDING_AT = _DEVICE_WORK_AT + 8 * _DEVICE_WORDS
_LOOKED_AT = _PENDING_AT + EVENTS
_AWAITED_END = _LOOKED_AT + 8 * (1 + AWAITED)
_GATHERED_WORD_AT = _AWAITED_END + -_AWAITED_END % 64
_GATHERED_AT = _GATHERED_WORD_AT + 8
_SIZE = _GATHERED_AT + GATHERED_BYTES


class EventCells(NamedTuple):
    """The cells by which stubs on a GPU wait for each other, as the map says."""

    pending: memoryview
    used: memoryview
    awaited: memoryview
    """``looked``, then ``awaited``."""


class ControlPage:
    """Views of the control page's parts; owns the segment."""

    SIZE = _SIZE

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._attach(segment.view)

    def _attach(self, view: memoryview) -> None:
        self.progress = view[:16].cast("Q")
        self._log_levels = view[16:17]
        self.claimed = view[24:32].cast("Q")
        self.lent = view[_LENT_AT:_CANCELLED_AT]
        self.cancelled = view[_CANCELLED_AT:_OUTPUTS_AT]
        self.outputs = view[_OUTPUTS_AT:_PASSED_ON_AT]
        self.passed_on = view[_PASSED_ON_AT:_DEVICE_WORK_AT].cast("I")
        self.device_work = view[_DEVICE_WORK_AT:_PENDING_AT].cast("Q")
        self.events = EventCells(
            view[_PENDING_AT:_LOOKED_AT], view[17:18], view[_LOOKED_AT:_AWAITED_END].cast("Q")
        )
        self.gathered_word = view[_GATHERED_WORD_AT:_GATHERED_AT].cast("Q")
        self.gathered = view[_GATHERED_AT:_SIZE]
        self._clock = time.monotonic_ns

    def start(self, sequence: int) -> int:
        """Stub: say that ``execute`` starts with this batch; returns the time, in ns."""
        now = self._clock()
        # The time first: who sees the new number must not see the old time.
        self.progress[1] = now
        self.progress[0] = sequence
        return now

    @property
    def started(self) -> int:
        """Sequence number of the batch that started last; 0 before the first."""
        return self.progress[0]

    @property
    def started_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds at which it started."""
        return self.progress[1]

    @property
    def gathered_results(self) -> tuple[int, bytes]:
        """Return how many batches' results a dead stub had gathered, and these."""
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
        """Look at a private copy from now on: for a forked child, which must not write here."""
        self._attach(memoryview(bytearray(self.segment.view[:_SIZE])))

    def close(self) -> None:
        """Let go of the views and the segment."""
        self._attach(memoryview(bytearray(_SIZE)))
        self.segment.close()
