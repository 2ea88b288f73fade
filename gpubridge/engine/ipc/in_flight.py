"""The requests at one stub: the callbacks of the compiled `InFlightRequests`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gpubridge.dataplane import InFlightRequests, InstanceFeed, ModelCounters, SendTurn
from gpubridge.engine.ipc.busy_poll import descriptor_of_events
from gpubridge.engine.memory.placed_response import PlacedResponse, SharedSlot
from gpubridge.request import (
    NO_CONTEXT,
    CompletedBatch,
    InferRequest,
    InferResponse,
    Outcome,
)
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record, record_reader


@dataclass(frozen=True)
class InFlightHooks:
    """Callbacks for the requests at a stub.

    - ``free``: frees a slot of the arena.
    - ``memory``: the stub's output memory.
    - ``owner``: the upper half of the ids of its regions.
    - ``counters``: the model's counters of batches.
    - ``announcer``: announces regions to the stub.
    - ``context``: returns the encoded context of a request whose tensors lie outside its slot: on a
      device, or in its client's own memory.
    - ``decode``: decodes a response that is not plain; returns the outcome and the failure reason.
    - ``cancelled``: called when a request that the stub has started is cancelled, with its ticket, and
      with its batch if all requests of that are cancelled now, else 0.
    - ``send``: queues a message that cannot be sent at once.
    - ``send_long``: sends a message in pieces: bytes, or a record and its long parameters.
    - ``receive``: handles a message of another kind, or with descriptors, which it takes over; gets
      the bytes, the descriptors, and whether the message was truncated. Returns whether the channel
      is open.
    - ``failed``: gets the error that a message caused.
    - ``closed``: called when the other side of the channel is gone.
    - ``turn``: decides when messages leave.
    - ``feed``: the instance's feed, notified of completed batches.
    """

    free: Callable[[Any], None]
    memory: BorrowedMemory
    owner: int
    counters: ModelCounters
    announcer: Any
    context: Callable[[InferRequest], bytes]
    decode: Callable[[Record, InferRequest], tuple[Outcome, str | None]]
    cancelled: Callable[[int, int], None]
    send: Callable[[bytes], None]
    send_long: Callable[[Sequence[Any]], None]
    receive: Callable[[bytes, list[int], bool], bool]
    failed: Callable[[Exception | str], None]
    closed: Callable[[], None]
    turn: SendTurn
    feed: InstanceFeed

    # Constants for the compiled module, not fields.
    response: ClassVar = InferResponse
    placed: ClassVar = PlacedResponse
    batch: ClassVar = CompletedBatch
    no_context: ClassVar = NO_CONTEXT

    @property
    def share(self) -> Callable[[Any], SharedSlot]:
        """Return a function that shares a slot of the arena among several requests."""
        return partial(SharedSlot, self.free)


def send_turn() -> SendTurn:
    """Return the scheduler of sends to all stubs of the running event loop."""
    loop = asyncio.get_running_loop()
    return SendTurn(loop.call_soon, descriptor_of_events(loop), len(os.sched_getaffinity(0)))


def requests_at_stub(
    control: ControlPage, hooks: InFlightHooks, descriptor: int
) -> InFlightRequests:
    """Return the table of requests at a new stub; ``descriptor``: its channel."""
    reader = record_reader(ResponseContext)
    counts = control.passed_on, control.received, control.progress, control.claimed
    return InFlightRequests(control.lent, control.cancelled, *counts, reader, hooks, descriptor)
