"""The server's side of one stub: sends it batches, takes its results.

A link lives as long as one stub process. When the process dies, the link says which requests it had
started (they fail) and which it had not (they are sent elsewhere).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.dataplane import InFlightRequests, ModelCounters, SendTurn
from gpubridge.engine.announcements import Announcements, OpenDeviceRegions
from gpubridge.engine.busy_poll import BusyPoll
from gpubridge.engine.decode_response import decode_response, failure_reason
from gpubridge.engine.devices.edge_events import StubEvents, tell_waits
from gpubridge.engine.devices.region import ClientDeviceSegment, DeviceRegion
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.in_flight import InFlightHooks, requests_at_stub
from gpubridge.engine.lent_memory import SharedSlot
from gpubridge.engine.long_messages import LongMessages, LongTexts, ReadMessage, read_message
from gpubridge.engine.regions import Regions
from gpubridge.engine.send_queue import SendQueue
from gpubridge.engine.stub_memory import StubMemory
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, unavailable
from gpubridge.host_shm import ClientSegment, Segment
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.request import InferRequest, MemoryRange, Outcome
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    MalformedMessage,
    close_all,
    is_unread,
)
from gpubridge.transport.control import TICKETS, ControlPage
from gpubridge.transport.messages import (
    FALLBACKS,
    Kind,
    control_message,
    decode_control,
    results_message,
)
from gpubridge.transport.records import Record, with_long_text
from gpubridge.transport.short_waits import busy_poll_ns

if TYPE_CHECKING:
    from gpubridge.engine.devices.memory import DeviceMemory
    from gpubridge.engine.stub_run import StubRun


class StubConnection:
    """Speaks with one stub process; owns the channel, the control page and the views of its memory.

    - ``sock``: the server's end of the channel; owned from now on.
    - ``regions``: memory that stubs are handed.
    - ``arena``: the model's: slots of requests go back there.
    - ``counters``: the model's: batches are counted there.
    - ``workers``: read messages of more than `HEAVY_BYTES`.
    - ``turn``: says when requests leave, those to other stubs, too.

    Its attributes:

    - ``requests``: those at the stub.
    - ``regions``: as given.
    - ``open_devices``: the device memory that the stub has open.
    - ``device``: the UUID of the GPU whose memory the stub can be handed.
    - ``uploads``: whether it copies its requests' memory to the GPU, and so pins what is in use of that.
    - ``arena``: makes the stub's own memory there, if it has a GPU.
    """

    def __init__(  # noqa: PLR0913  (what it connects)
        self,
        sock: socket.socket,
        regions: Regions,
        arena: RequestArena,
        counters: ModelCounters,
        output_limit: int,
        owner: StubRun,
        workers: Workers,
        turn: SendTurn,
    ) -> None:
        sock.setblocking(False)
        self._channel = Channel(sock)
        self.regions = regions
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._control = ControlPage(Segment.create(0, ControlPage.SIZE))
        self._outputs = StubMemory(regions.new_owner(), output_limit, self._control.outputs)
        self.open_devices = OpenDeviceRegions()
        self.device: str | None = None
        self.uploads = False
        self.arena: StubArena | None = None
        self._announcements = Announcements(Kind, regions, self, self.open_devices, self._tell)
        self._announced = self._announcements.known
        hooks = InFlightHooks(
            free=arena.free,
            share=partial(SharedSlot, arena.free),
            memory=self._outputs.borrowed,
            owner=self._outputs.owner,
            counters=counters,
            announcements=self._announcements,
            context=self._context,
            decode=self._decode,
            abandoned=self._abandon,
            send=self._send,
            send_long=self._send_long,
            receive=self._receive,
            failed=self._fail,
            closed=self._close_early,
            turn=turn,
            feed=owner.feed,
        )
        self.requests = requests_at_stub(self._control, hooks, self._channel.fileno())
        self._device_events: StubEvents | None = None
        self._send_queue = SendQueue(self._channel, workers, self._close_early, self.requests.block)
        self.busy_poll = BusyPoll(self._loop, 0)
        # Told when nobody waits any more for what the model does, and since when (ns) it does that.
        self.on_abandoned: Callable[[int], None] | None = None
        self._open = True
        self._trusted = True
        self._watch = _ExecuteWatch(self._control, self.requests)
        self.workers = workers
        self._long = LongMessages(workers, read_message, self._take_long)
        # Of the message that is being taken.
        self._texts: Sequence[LongTexts] = ()
        self._heard_out: Callable[[], None] | None = None
        self._listen(True)

    # -- what the owner asks -------------------------------------------------------------------

    def initialize(self, settings: dict[str, Any], calls: int) -> None:
        """Send the stub its settings, the control page, and its end of the calls' channel."""
        self.uploads = "device" in settings and settings["input_placement"] == "device"
        awake_ns = busy_poll_ns(settings["busy_poll_us"])
        self.busy_poll = BusyPoll(self._loop, awake_ns)
        self.requests.poll_with(self.busy_poll if awake_ns else None)
        message = control_message(
            Kind.INITIALIZE, owner=self._outputs.owner, output_limit=self._outputs.limit, **settings
        )
        self._send_queue.send(message, (self._control.segment.fd, calls))

    def give_device(self, arena: StubArena, uuid: str, devices: DeviceMemory) -> None:
        """Let the stub be handed memory of its GPU, and have its own when it asks for it."""
        self.device = uuid
        self.arena = arena
        borrowed, in_flight = self._outputs.borrowed, self.requests
        events = self._device_events = StubEvents(
            uuid,
            borrowed,
            self._control,
            devices,
            in_flight.settle_kept,
            in_flight.all_kept,
            self._owner.kill,
        )
        in_flight.watch(
            events.keep,
            lambda kept: events.let_go(kept, in_flight.left, self._control.started),
        )

    def give_segment(self, segment: DeviceRegion, *, first: bool) -> None:
        """Let the stub put outputs into a segment of its arena, which it is told of elsewhere."""
        if not self._open or self._device_events is None:
            return
        if first:
            self._device_events.begin(segment)
        self._outputs.borrowed.know(segment)
        self.open_devices.told(segment)

    def tell(self, kind: int, *fds: int, **fields: Any) -> None:
        """Send a message of a rare kind, with descriptors."""
        self._send_queue.send(control_message(kind, **fields), fds)

    @property
    def announced(self) -> Collection[int]:
        """The regions that the stub was told of to read its requests and write its outputs."""
        return self._announced

    @property
    def owner(self) -> int:
        """The upper half of the ids of the stub's own regions."""
        return self._outputs.owner

    def _context(self, request: InferRequest) -> bytes:
        """Return the context of a request that has to do with a device or its client's memory."""
        if request.client is not None:
            self._announcements.tell_all(request.client.segments, self.device)
        context = request.context
        if self._device_events is not None:
            ranges = (request.pattern or request).ranges or ()
            context = tell_waits(context, ranges, self._announcements)
        return context.encoded()

    def _abandon(self, since: int) -> None:
        if self.on_abandoned is not None:
            self.on_abandoned(since)

    def called(self, ranges: list[MemoryRange], record: Record) -> list[MemoryRange]:
        """Return the inputs of a call of a stub with a device, with the event that they wait for."""
        events = self._device_events
        return ranges if events is None else events.called(ranges, record, self.requests.all_kept())

    def catch_up(self) -> None:
        """Take what the stub has sent: what it says elsewhere may follow from that."""
        while self._open and (self._long.finish() or self.requests.receive()):
            pass

    def distrust(self, what: str) -> None:
        """The stub has sent something, elsewhere, that no stub sends."""
        self._trusted = False
        self._break(what)

    def lend(self, ranges: Sequence[MemoryRange]) -> int:
        """Lend the outputs of an answer to the stub until its last view is gone; returns the ticket.

        Raises BridgeError: UNAVAILABLE when there is no ticket left.
        """
        ticket = self.requests.lend(ranges)
        if ticket is None:
            raise unavailable(
                f"the model holds the memory of {self.requests.lent_answers} answers to its calls: "
                "it must let go of some before it gets others"
            )
        return ticket

    def describe_kept(self, instance: str) -> str:
        """Return what a model keeps that can be sent no request any more, for the log."""
        requests = self.requests
        return (
            f"requests wait: model instance '{instance}' keeps the inputs of "
            f"{requests.kept_requests} answered requests and the memory of {requests.lent_answers} "
            f"answers to its calls, and has {requests.open_requests} requests not finished, so that it "
            f"can be sent none of the next batch; {TICKETS} is the most of all of them. It must finish "
            "requests, or drop references to their tensors: it may keep copies"
        )

    def device_work(self) -> list[int]:
        """Return what the stub has done on its GPU so far, as the control page has it."""
        return list(self._control.device_work)

    def tell_log_levels(self, levels: int) -> None:
        """Have the stub know which levels are logged: bits by the numbers of `pb_utils.Logger`."""
        self._control.log_levels = levels

    def drop_region(self, region: int) -> None:
        """Tell the stub to unmap a region that is not its own."""
        if region in self._announced:
            self._announcements.drop(region)

    def tell_ahead(self, segment: ClientDeviceSegment) -> None:
        """Have the stub open memory of a client before a request needs it."""
        self._announcements.tell_all([segment], self.device)

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Have the stub pin a range of its model's memory."""
        if region in self._announced:
            self._tell(control_message(Kind.PIN, region=region, offset=offset, nbytes=nbytes))

    def settle_kept(self) -> None:
        """Take back the memory that the stub has let go of since its requests were answered."""
        self.requests.settle_kept()

    def housekeep(self, idle_seconds: float) -> None:
        """Settle memory that models kept, and have the stub give idle memory back."""
        self.settle_kept()
        if self.requests.idle:
            self.tell(Kind.TRIM, idle_seconds=idle_seconds)

    def overdue(self, seconds: float) -> str | None:
        """Say what the stub has taken longer than ``seconds`` for, if anything."""
        return self._watch.overdue(seconds)

    def hear_out(self, then: Callable[[], None]) -> None:
        """Take what the stub, now dead, had sent: why it failed, answers; then call ``then``."""
        self._mute()
        self._heard_out = then
        self._hear_rest()

    def _hear_rest(self) -> None:
        # Twice: when the stub left messages unread, the kernel first reports a reset connection, and
        # only then hands out what is there.
        ends = 0
        while ends < 2 and self._trusted and not self._long.reading:
            more = self.requests.receive()
            if more is None:
                ends += 1
            elif not more:
                break
        then = self._heard_out
        if then is not None and not self._long.reading:
            self._heard_out = None
            if self._trusted:
                self.requests.take_gathered(results_message(*self._control.gathered_results))
            then()

    def close(self) -> tuple[list[InferRequest], list[InferRequest]]:
        """Give everything back, the stub being dead and heard out.

        Returns: requests without an outcome: those whose batch had started, and the others, in
        order. The slots of the unstarted are theirs again; all other memory has been taken back.
        """
        self._mute()
        self._long.close()
        self._channel.close()
        started, unstarted = self.requests.close(self._control.started)
        if self._device_events is not None:
            # They hold the dead stub's arena.
            self._device_events.close()
            self._device_events = None
        if self.arena is not None:
            self.arena.close()
        self._announcements.close()
        self.open_devices.close()
        self.regions.retire(self._outputs.owner, self._outputs.regions())
        self._outputs.close()
        self._control.close()
        return started, unstarted

    # -- sending -------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        self._send_queue.send(message)

    def _send_long(self, pieces: Sequence[bytes | tuple[bytes, memoryview]]) -> None:
        message: list[bytes | memoryview] = []
        for piece in pieces:
            if isinstance(piece, bytes):
                message.append(piece)
            else:
                message += with_long_text(piece[0], "parameters", piece[1:])
        self._send_queue.send(message)

    def _tell(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a message behind the batches that were submitted before it."""
        self.requests.flush()
        self._send_queue.send(message, fds)

    # -- receiving -----------------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        if on:
            self._loop.add_reader(self._channel.fileno(), self.requests.on_readable)
        else:
            self._loop.remove_reader(self._channel.fileno())

    def _receive(self, message: bytes, fds: list[int], cut: bool) -> bool:
        """Take a message that the compiled module leaves to others, or have it read if it is long.

        Returns whether the channel is open.
        """
        try:
            message, fds = self._channel.whole(message, fds, cut, HEAVY_BYTES)
            if is_unread(message):
                self._listen(False)
                self._long.begin(message, fds)
            else:
                self._take(message, fds)
        except ChannelClosed:
            return False
        except MalformedMessage as error:
            self._fail(error.message)
        return True

    def _fail(self, error: Exception | str) -> None:
        """Trust the stub no more because of what it has sent; raise what is no fault of its."""
        if isinstance(error, MalformedMessage):
            error = error.message
        elif not isinstance(error, (str, ValueError)):
            raise error
        self.distrust(f"sent a malformed message ({error})")

    def _take_long(self, read: ReadMessage | BridgeError, fds: list[int]) -> None:
        """Take a message that a worker has read, and go on with those behind it."""
        try:
            if isinstance(read, BridgeError) or not self._trusted:
                close_all(fds)
            if isinstance(read, BridgeError):
                raise MalformedMessage(read.message)
            if self._trusted:
                self._texts = read.texts
                self._take(read.message, fds)
        except MalformedMessage as error:
            self._fail(error)
        finally:
            self._texts = ()
            if self._open:
                self._listen(True)
            elif self._heard_out is not None:
                self._hear_rest()

    def _take(self, message: bytes, fds: list[int]) -> None:
        try:
            kind = message[0]
            if kind in (Kind.RESULTS, Kind.RESPONSES):
                self.requests.take(message)
            elif kind == Kind.REGION:
                fields = decode_control(message)
                region, size = _number(fields, "region"), _number(fields, "size")
                self._outputs.announce(region, size, fds, str(fields.get("home", "")))
            elif kind == Kind.DROP_REGION:
                region = _number(decode_control(message), "region")
                self._outputs.drop(region)
                self.regions.drop(region)
            elif kind == Kind.REGION_CLOSED:
                fields = decode_control(message)
                self._take_closed(_number(fields, "region"), _number(fields, "announcements"))
            elif kind == Kind.LOG:
                self._owner.on_log(_log_fields(decode_control(message)))
            else:
                self._take_stage(kind, message, fds)
        finally:
            close_all(fds)

    def _decode(self, record: Record, request: InferRequest) -> tuple[Outcome, str | None]:
        """Return what a response is, and why its request failed, if it has."""
        outcome = decode_response(
            record, self._outputs.borrowed, request, self.requests.find, self._texts
        )
        if self._device_events is not None:
            outcome = self._device_events.answered(outcome, record, request)
        if not isinstance(outcome, BridgeError):
            return outcome, None
        if request.client is not None and not all(map(_is_whole, request.client.segments)):
            # Before the client hears of it, and may grow it again.
            self.regions.revoke_shrunk(self._announced)
        return outcome, failure_reason(record)

    def _take_stage(self, kind: int, message: bytes, fds: list[int]) -> None:
        """Take what a stub says of how far it has come."""
        if kind == Kind.CONNECTED:
            self._owner.on_connected()
        elif kind == Kind.COMPLETED:
            self._owner.on_completed(_completed_text(decode_control(message)))
        elif kind == Kind.READY:
            self._owner.on_ready(fds.pop() if fds else None)
        elif kind == Kind.FAILED:
            self._owner.on_failed(str(decode_control(message).get("error")))
        elif kind == Kind.NO_DEVICE:
            # Others bring it what it needs by way of the host from now on.
            self.device = None
        elif kind != Kind.FINALIZED:
            raise MalformedMessage(f"unknown kind {kind}")

    def _take_closed(self, region: int, announcements: int) -> None:
        """The stub has closed device memory; its own goes with that."""
        over = self.open_devices.closed(region, announcements)
        events = self._device_events
        if over and self.arena is not None and events is not None and region >> 32 == self.owner:
            self.arena.closed(region)
            events.end(region)
            self._outputs.borrowed.drop(region)
            self.regions.drop(region)
        self.settle_kept()  # With what it had of that, leases have ended.

    # -- the end -------------------------------------------------------------------------------

    def _close_early(self) -> None:
        self._break("closed its channel")

    def _break(self, what: str) -> None:
        if self._open:
            self._mute()
            self._owner.on_broken(what)

    def _mute(self) -> None:
        """Neither listen nor speak any more; the channel stays, for what is still in it."""
        if not self._open:
            return
        self._open = False
        self._listen(False)
        self._send_queue.close()


class _ExecuteWatch:
    """Looks at a stub's progress when asked."""

    def __init__(self, control: ControlPage, in_flight: InFlightRequests) -> None:
        self._control = control
        self._in_flight = in_flight
        # Of what it does: which batch it has begun last, whether that is executed, since when.
        self._seen: tuple[int, bool, int] | None = None
        self._looked = time.monotonic_ns()

    def overdue(self, seconds: float) -> str | None:
        """Say what has taken longer than ``seconds``, if anything has."""
        now = time.monotonic_ns()
        since, executing = self._busy_since(now)
        self._looked = now
        if now - since <= seconds * 1e9:
            return None
        return "execute ran" if executing else "no execute began for"

    def _busy_since(self, now: int) -> tuple[int, bool]:
        """Since when (CLOCK_MONOTONIC ns) the stub is at what it does, and whether that is ``execute``.

        Else it has work and starts on none of it: that is seen only by asking again and again. Since
        ``now`` when it has nothing to do. A stub may say anything of when it began: not before it was
        last seen at something else, nor later than now.
        """
        started = self._control.started
        executing = self._in_flight.holds(started)
        if not executing and self._in_flight.idle:
            self._seen = None
            return now, False
        if self._seen is None or self._seen[:2] != (started, executing):
            since = min(max(self._control.started_at, self._looked), now) if executing else now
            self._seen = started, executing, since
        return self._seen[2], executing


def _is_whole(segment: ClientSegment | ClientDeviceSegment) -> bool:
    """Return False for a client's object that has been shrunk."""
    return not isinstance(segment, ClientSegment) or segment.has(segment.size)


def _number(fields: dict[str, Any], name: str) -> int:
    """Return a field that must be a number of at least 0; raises MalformedMessage."""
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"field {name!r}: expected a number, got {value!r}")
    return value


def _log_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a LOG message; raises MalformedMessage."""
    for name in ("level", "line"):
        _number(fields, name)
    for name in ("text", "file"):
        if not isinstance(fields.get(name), str):
            raise MalformedMessage(f"field {name!r}: expected a string, got {fields.get(name)!r}")
    once = fields.get("once", "")
    if not isinstance(once, str):
        raise MalformedMessage(f"field 'once': expected a string, got {once!r:.100}")
    fallback = fields.get("fallback")
    if fallback is not None and fallback not in FALLBACKS:
        raise MalformedMessage(
            f"field 'fallback': expected one of {', '.join(FALLBACKS)}, got {fallback!r}"
        )
    return fields


def _completed_text(fields: dict[str, Any]) -> str | None:
    """Return the configuration of a COMPLETED message; raises MalformedMessage."""
    text = fields.get("config")
    if text is not None and not isinstance(text, str):
        raise MalformedMessage(f"field 'config': expected a string or null, got {text!r:.100}")
    return text
