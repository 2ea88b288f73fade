"""The requests at one stub: what the compiled `InFlightRequests` asks for, and what it tells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpubridge.dataplane import InFlightRequests, InstanceFeed, ModelCounters, SendTurn
from gpubridge.engine.busy_poll import descriptor_of_events
from gpubridge.engine.placed_response import PlacedResponse
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


class InFlightHooks(NamedTuple):
    """Callbacks for the requests at a stub.

    - ``free``: takes back a slot of the arena.
    - ``share``: makes what holds such a slot for several.
    - ``memory``: the stub's output memory.
    - ``owner``: the upper half of the ids of its regions.
    - ``counters``: the model's: batches are counted there.
    - ``announcements``: tell the stub of regions.
    - ``context``: returns the encoded context of a request that does not just lie in its slot, where
      the stub has a device or its client's own memory is used.
    - ``decode``: returns what a response out of the ordinary is, and why its request failed, if it
      has.
    - ``abandoned``: told when nobody waits any more for what the model does, and since when (ns) it
      does that.
    - ``send``: sends a message that cannot be sent at once.
    - ``send_long``: sends a message of which it gets pieces: bytes, or a record with the parameters that
      its context lacks.
    - ``receive``: takes a message of another kind, or with descriptors, which it then owns; gets
      its bytes, those, and whether something of it was cut off. Returns whether the channel is
      open.
    - ``failed``: gets the error or the text for which a message could not be taken further.
    - ``closed``: told when the other side of the channel is gone.
    - ``turn``: says when messages leave.
    - ``feed``: the instance's: hears of answered batches.
    """

    free: Callable[[Any], None]
    share: Callable[[Any], object]
    memory: BorrowedMemory
    owner: int
    counters: ModelCounters
    announcements: Any
    context: Callable[[InferRequest], bytes]
    decode: Callable[[Record, InferRequest], tuple[Outcome, str | None]]
    abandoned: Callable[[int], None]
    send: Callable[[bytes], None]
    send_long: Callable[[Sequence[Any]], None]
    receive: Callable[[bytes, list[int], bool], bool]
    failed: Callable[[Exception | str], None]
    closed: Callable[[], None]
    turn: SendTurn
    feed: InstanceFeed
    response: type[InferResponse] = InferResponse
    placed: type[PlacedResponse] = PlacedResponse
    batch: type[CompletedBatch] = CompletedBatch
    no_context: object = NO_CONTEXT


def send_turn() -> SendTurn:
    """Return what says when requests leave for the stubs of the event loop that runs."""
    loop = asyncio.get_running_loop()
    return SendTurn(loop.call_soon, descriptor_of_events(loop), len(os.sched_getaffinity(0)))


def requests_at_stub(
    control: ControlPage, hooks: InFlightHooks, descriptor: int
) -> InFlightRequests:
    """Return the requests at a stub, of which there are none yet; its channel has ``descriptor``."""
    reader = record_reader(ResponseContext)
    cells = control.lent, control.cancelled, control.passed_on, control.progress, control.claimed
    return InFlightRequests(*cells, reader, hooks, descriptor)
