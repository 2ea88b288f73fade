"""The server's connection to one stub process: sends batches, receives results.

When the process dies, the connection returns the requests that the stub had started, which fail, and
the others, which are queued again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.dataplane import InFlightRequests, SendTurn
from gpubridge.engine.devices.edge_events import StubEvents, add_event_waits
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.ipc.busy_poll import busy_poll
from gpubridge.engine.ipc.decode_response import decode_response, failure_reason
from gpubridge.engine.ipc.in_flight import InFlightHooks, requests_at_stub
from gpubridge.engine.ipc.long_messages import LongMessages, LongTexts, ReadMessage, read_message
from gpubridge.engine.ipc.send_queue import SendQueue
from gpubridge.engine.ipc.stub_fields import completed_text, notice_fields, number_field, span_of
from gpubridge.engine.memory.device_region import ClientDeviceSegment, DeviceRegion
from gpubridge.engine.memory.region_announcer import OpenDeviceRegions, RegionAnnouncer
from gpubridge.engine.memory.regions import Regions, StubMemory
from gpubridge.engine.memory.response_store import StoredResponses
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, unavailable
from gpubridge.host_shm import Account, ClientSegment, Segment
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.request import InferRequest, MemoryRange, Outcome
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    DescriptorsLost,
    MalformedMessage,
    close_all,
    is_unread,
)
from gpubridge.transport.control import TICKETS, ControlPage
from gpubridge.transport.messages import (
    Kind,
    control_message,
    decode_control,
    results_message,
)
from gpubridge.transport.records import Record, with_long_text
from gpubridge.transport.stub_settings import (
    MemorySettings,
    StubGpu,
    StubSettings,
    encode_configure,
    encode_initialize,
)
from gpubridge.transport.wait_predictor import busy_poll_ns

if TYPE_CHECKING:
    from gpubridge.engine.devices.manager import DeviceManager
    from gpubridge.engine.supervisor.stub_run import StubRun

_VERSION_LETTERS = 32


class StubConnection:
    """Connection to one stub process; owns the channel, the control page and the mapped memory.

    - ``sock``: the server's end of the channel, taken over.
    - ``regions``: all shared memory regions.
    - ``arena``: the model's arena, to which the slots of requests return.
    - ``counters``: the model's counters of batches.
    - ``workers``: read messages of more than `HEAVY_BYTES`.
    - ``turn``: decides when messages leave for all stubs.

    Its attributes:

    - ``requests``: the requests at the stub.
    - ``announced``: the regions that were announced through this channel.
    - ``owner``: the upper half of the ids of the stub's own regions.
    - ``open_devices``: the device memory that the stub has open.
    - ``device``: the UUID of the GPU whose memory the stub can open.
    - ``account``: charged for responses to its model's calls that it does not read.
    - ``python``: the version of the stub's Python, once it is connected.
    - ``uploads``: whether the stub copies inputs to the GPU and therefore pins the arena's used ranges.
    - ``arena``: allocates the stub's memory on its GPU, if it has one.
    - ``on_abandoned``: called when all requests of a batch are cancelled, with its number.
    """

    def __init__(  # noqa: PLR0913  (what it connects)
        self,
        sock: socket.socket,
        regions: Regions,
        arena: RequestArena,
        counters: ModelStatistics,
        output_limit: int,
        owner: StubRun,
        workers: Workers,
        turn: SendTurn,
    ) -> None:
        sock.setblocking(False)
        self._channel = Channel(sock)
        self.regions = regions
        self._owner = owner
        self._counters = counters
        self._control = ControlPage(Segment.create(0, ControlPage.SIZE))
        self.owner = regions.new_owner()
        self._outputs = StubMemory(self.owner, output_limit, self._control.outputs)
        self.open_devices = OpenDeviceRegions()
        self.device: str | None = None
        self.python = ""
        self.uploads = False
        self.arena: StubArena | None = None
        self._announcer = RegionAnnouncer(
            Kind, regions, self, self.open_devices, self._send_in_order
        )
        self.announced: Collection[int] = self._announcer.known
        hooks = InFlightHooks(
            free=arena.free,
            memory=self._outputs.borrowed,
            owner=self.owner,
            counters=counters,
            announcer=self._announcer,
            context=self._context,
            decode=self._decode,
            cancelled=self._cancelled,
            send=self._send,
            send_long=self._send_long,
            receive=self._receive,
            failed=self._fail,
            closed=self._close_early,
            turn=turn,
            feed=owner.feed,
        )
        self.requests = requests_at_stub(self._control, hooks, self._channel.fileno())
        store = regions.responses
        self.requests.store_with(
            partial(StoredResponses, store, store.of_model(arena.home), workers, regions.arena)
        )
        self.account = Account(int)
        self._device_events: StubEvents | None = None
        self._send_queue = SendQueue(self._channel, workers, self._close_early, self.requests.block)
        self.on_abandoned: Callable[[int], None] | None = None
        # Coroutines of decoupled models may wait for it.
        self._tells_cancellations = False
        # The batch that the stub executed when it was last told to return memory.
        self._trimmed_in = 0
        self._open = True
        self._trusted = True
        self._watch = _ExecuteTimeout(self._control, self.requests)
        self.workers = workers
        self._long = LongMessages(workers, read_message, self._handle_long)
        # Long texts of the message being handled.
        self._texts: Sequence[LongTexts] = ()
        self._on_drained: Callable[[], None] | None = None
        self._listen(True)

    # -- called by the owner -------------------------------------------------------------------

    def initialize(
        self, settings: StubSettings, gpu: StubGpu | None, calls: int, output_token: str
    ) -> None:
        """Send the stub its settings, the control page, and its end of the BLS channel."""
        self._tells_cancellations = settings.model.decoupled
        self.uploads = gpu is not None and settings.input_placement == "device"
        awake_ns = busy_poll_ns(settings.busy_poll_us)
        if awake_ns:
            self.requests.poll_with(busy_poll(asyncio.get_running_loop(), awake_ns))
        memory = MemorySettings(self.owner, self._outputs.limit, gpu)
        message = encode_initialize(settings, memory, output_token)
        self._send_queue.send(message, (self._control.segment.fd, calls))

    def configure(self, settings: StubSettings) -> None:
        """Send the stub the settings that follow from the completed configuration."""
        self._tells_cancellations = settings.model.decoupled
        self._send_queue.send(encode_configure(settings))

    def attach_device(self, arena: StubArena, uuid: str, devices: DeviceManager) -> None:
        """Allow the stub to open memory of its GPU, and to allocate from its arena there."""
        self.device = uuid
        self.arena = arena
        borrowed, in_flight = self._outputs.borrowed, self.requests
        events = self._device_events = StubEvents(
            uuid,
            borrowed,
            self._control,
            devices,
            in_flight.release_kept,
            in_flight.all_kept,
            self._owner.kill,
        )
        in_flight.watch(
            events.keep,
            lambda kept: events.release(kept, in_flight.left, self._control.started),
        )

    def add_segment(self, segment: DeviceRegion, *, first: bool) -> None:
        """Accept outputs in a segment of the stub's arena; the caller announces the segment."""
        if not self._open or self._device_events is None:
            return
        if first:
            self._device_events.begin(segment)
        self._outputs.borrowed.add_segment(segment)
        self.open_devices.announced(segment)

    def send_control(self, kind: int, *fds: int, **fields: Any) -> None:
        """Send a control message, with descriptors."""
        self._send_queue.send(control_message(kind, **fields), fds)

    def _context(self, request: InferRequest) -> bytes:
        """Return the encoded context of a request with tensors on a device or in its client's memory."""
        if request.client is not None:
            self._announcer.announce_all(request.client.segments, self.device)
        context = request.context
        if self._device_events is not None:
            ranges = (request.pattern or request).ranges or ()
            context = add_event_waits(context, ranges, self._announcer)
        return context.encoded()

    def _cancelled(self, ticket: int, batch: int) -> None:
        if self._tells_cancellations:
            self.send_control(Kind.CANCEL, ticket=ticket)
        if batch and self.on_abandoned is not None:
            self.on_abandoned(batch)

    def called(self, ranges: list[MemoryRange], record: Record) -> list[MemoryRange]:
        """Return the inputs of a BLS call with the device event that they wait for."""
        events = self._device_events
        return ranges if events is None else events.called(ranges, record, self.requests.all_kept())

    def catch_up(self) -> None:
        """Handle the messages that the stub has sent: its BLS messages may depend on them."""
        while self._open and (self._long.finish() or self.requests.receive()):
            pass

    def lose(self, error: DescriptorsLost) -> None:
        """Break the connection: a message of the stub is lost, here or of its BLS channel."""
        self._break(f"could not be heard by the server ({error.message})")

    def fail_protocol(self, what: str) -> None:
        """Break the connection: the stub sent an invalid message, here or through its BLS channel."""
        self._trusted = False
        self._break(what)

    def lend(self, ranges: Sequence[MemoryRange]) -> int:
        """Lend the outputs of a BLS response to the stub until its last view is gone; return the ticket.

        Raises BridgeError: UNAVAILABLE when there is no ticket left.
        """
        ticket = self.requests.lend(ranges)
        if ticket is None:
            raise unavailable(
                f"the model holds the memory of {self.requests.lent_answers} answers to its calls, of "
                f"{TICKETS} requests and answers at most: it must let go of some before it gets others"
            )
        return ticket

    def describe_kept(self, instance: str) -> str:
        """Return the text of requests for a stub whose model keeps so much that no ticket is left."""
        requests = self.requests
        return (
            f"model instance '{instance}' has reached the limit of {TICKETS} requests "
            f"and answers in use: {requests.open_requests} requests not finished, the inputs of "
            f"{requests.kept_requests} answered requests, and {requests.lent_answers} answers to its "
            "calls. Finish requests, and keep copies instead of references to tensors"
        )

    def device_work(self) -> list[int]:
        """Return the stub's counts of GPU copies and waits, from the control page."""
        return list(self._control.device_work)

    def set_log_levels(self, levels: int) -> None:
        """Write the enabled log levels to the control page: bits by the numbers of `pb_utils.Logger`."""
        self._control.log_levels = levels

    def drop_region(self, region: int) -> None:
        """Make the stub unmap a region that is not its own."""
        if region in self.announced:
            self._announcer.drop(region)

    def announce_ahead(self, segment: ClientDeviceSegment) -> None:
        """Make the stub open memory of a client before a request needs it."""
        self._announcer.announce_all([segment], self.device)

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Make the stub pin a range of its model's memory."""
        if region in self.announced:
            self._send_in_order(
                control_message(Kind.PIN, region=region, offset=offset, nbytes=nbytes)
            )

    def release_kept(self) -> None:
        """Release memory of completed requests that the stub no longer keeps."""
        self.requests.release_kept()

    def maintain(self, idle_seconds: float) -> None:
        """Release memory that the stub no longer keeps, and make it return idle memory."""
        self.release_kept()
        batch = self.requests.oldest
        # A stub that has gone on since the last time has taken the message of then.
        if not batch or batch != self._trimmed_in:
            self.send_control(Kind.TRIM, idle_seconds=idle_seconds)
        self._trimmed_in = batch

    def overdue(self, seconds: float) -> str | None:
        """Return what has taken the stub longer than ``seconds``, if anything has."""
        return self._watch.overdue(seconds)

    @property
    def executing_ns(self) -> int | None:
        """Return for how long the running ``execute`` has run; None if none runs."""
        return self._watch.executing_ns

    def drain(self, then: Callable[[], None]) -> None:
        """Handle the last messages of a dead stub (errors, responses); then call ``then``."""
        self._stop_io()
        self._on_drained = then
        self._drain_rest()

    def _drain_rest(self) -> None:
        # Twice: if the stub left messages unread, the kernel reports a connection reset before it
        # delivers what is there.
        ends = 0
        while ends < 2 and self._trusted and not self._long.reading:
            more = self.requests.receive()
            if more is None:
                ends += 1
            elif not more:
                break
        then = self._on_drained
        if then is not None and not self._long.reading:
            self._on_drained = None
            if self._trusted:
                self.requests.take_gathered(results_message(*self._control.gathered_results))
            then()

    def close(self) -> tuple[list[InferRequest], list[InferRequest]]:
        """Release everything; the stub is dead and `drain` is done.

        Returns the requests without an outcome, in order: those whose batch had started, and the
        others. The others own their slots again; all other memory is released.
        """
        self._stop_io()
        self._long.close()
        self._channel.close()
        started, unstarted = self.requests.close(self._control.started)
        if self._device_events is not None:
            # The events refer to the dead stub's arena.
            self._device_events.close()
            self._device_events = None
        if self.arena is not None:
            self.arena.close()
        self._announcer.close()
        self.open_devices.close()
        self.regions.retire(self.owner, self._outputs.regions())
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

    def _send_in_order(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a message after the batches that were submitted before it."""
        self.requests.flush()
        self._send_queue.send(message, fds)

    # -- receiving -----------------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        loop = asyncio.get_running_loop()
        if on:
            loop.add_reader(self._channel.fileno(), self.requests.on_readable)
        else:
            loop.remove_reader(self._channel.fileno())

    def _receive(self, message: bytes, fds: list[int], cut: bool) -> bool:
        """Handle a message that the compiled module does not, or start reading a long one.

        Returns whether the channel is open.
        """
        try:
            message, fds = self._channel.whole(message, fds, cut, HEAVY_BYTES)
            if is_unread(message):
                self._listen(False)
                self._long.begin(message, fds)
            else:
                self._handle(message, fds)
        except ChannelClosed:
            return False
        except DescriptorsLost as error:
            # The stub is not to blame, but what it said is gone: its memory, or answers.
            self.lose(error)
        except MalformedMessage as error:
            self._fail(error.message)
        return True

    def _fail(self, error: Exception | str) -> None:
        """Break the connection because of a malformed message; raise other errors."""
        if isinstance(error, MalformedMessage):
            error = error.message
        elif not isinstance(error, (str, ValueError)):
            raise error
        self.fail_protocol(f"sent a malformed message ({error})")

    def _handle_long(self, read: ReadMessage | BridgeError, fds: list[int]) -> None:
        """Handle a message that a worker has read, then continue receiving."""
        try:
            if isinstance(read, BridgeError) or not self._trusted:
                close_all(fds)
            if isinstance(read, BridgeError):
                raise MalformedMessage(read.message)
            if self._trusted:
                self._texts = read.texts
                self._handle(read.message, fds)
        except MalformedMessage as error:
            self._fail(error)
        finally:
            self._texts = ()
            if self._open:
                self._listen(True)
            elif self._on_drained is not None:
                self._drain_rest()

    def _handle(self, message: bytes, fds: list[int]) -> None:
        try:
            kind = message[0]
            if kind in (Kind.RESULTS, Kind.RESPONSES):
                self.requests.take(message)
            elif kind == Kind.REGION:
                fields = decode_control(message)
                region, size = number_field(fields, "region"), number_field(fields, "size")
                self._outputs.announce(region, size, fds, str(fields.get("home", "")))
            elif kind == Kind.DROP_REGION:
                region = number_field(decode_control(message), "region")
                self._outputs.drop(region)
                self.regions.drop(region)
            elif kind == Kind.REGION_CLOSED:
                fields = decode_control(message)
                self._handle_region_closed(
                    number_field(fields, "region"), number_field(fields, "announcements")
                )
            elif kind == Kind.NOTICE:
                self._owner.on_notice(notice_fields(decode_control(message)))
            elif kind == Kind.SPAN:
                self._owner.on_span(*span_of(decode_control(message)))
            else:
                self._handle_stage(kind, message, fds)
        finally:
            close_all(fds)

    def _decode(self, record: Record, request: InferRequest) -> tuple[Outcome, str | None]:
        """Decode a response; return the outcome and the failure reason, if it failed."""
        outcome = decode_response(
            record, self._outputs.borrowed, request, self.requests.find, self._texts
        )
        if self._device_events is not None:
            outcome = self._device_events.answered(outcome, record, request)
        if not isinstance(outcome, BridgeError):
            return outcome, None
        if request.client is not None and not all(map(_is_whole, request.client.segments)):
            # Before the client gets the error: it could restore the size then.
            self.regions.revoke_shrunk(self.announced)
        reason = failure_reason(record)
        if reason != "CANCELED":
            self._counters.note_error(outcome, request.identifier)
        return outcome, reason

    def _handle_stage(self, kind: int, message: bytes, fds: list[int]) -> None:
        """Handle a message about the stage of the stub's life."""
        if kind == Kind.CONNECTED:
            self.python = str(decode_control(message).get("python", ""))[:_VERSION_LETTERS]
            self._owner.on_connected()
        elif kind == Kind.COMPLETED:
            self._owner.on_completed(completed_text(decode_control(message)))
        elif kind == Kind.READY:
            self._owner.on_ready(fds.pop() if fds else None)
        elif kind == Kind.FAILED:
            self._owner.on_failed(str(decode_control(message).get("error")))
        elif kind == Kind.NO_DEVICE:
            # From now on its tensors are copied through host memory.
            self.device = None
        elif kind != Kind.FINALIZED:
            raise MalformedMessage(f"unknown kind {kind}")

    def _handle_region_closed(self, region: int, announcements: int) -> None:
        """Handle a closed device region; free it if it is the stub's own."""
        closed = self.open_devices.closed(region, announcements)
        events = self._device_events
        if closed and self.arena is not None and events is not None and region >> 32 == self.owner:
            self.arena.closed(region)
            events.end(region)
            self._outputs.borrowed.drop(region)
            self.regions.drop(region)
        # Leases on tensors in that region have ended.
        self.release_kept()

    # -- the end -------------------------------------------------------------------------------

    def _close_early(self) -> None:
        self._break("closed its channel")

    def _break(self, what: str) -> None:
        if self._open:
            self._stop_io()
            self._owner.on_broken(what)

    def _stop_io(self) -> None:
        """Stop receiving and sending; keep the channel open for `drain`."""
        if not self._open:
            return
        self._open = False
        self._listen(False)
        self._send_queue.close()


class _ExecuteTimeout:
    """Measures how long a stub takes for an ``execute``.

    A model can write to the control page: that tells no more than when, between two looks, a batch began.
    """

    def __init__(self, control: ControlPage, in_flight: InFlightRequests) -> None:
        self._control = control
        self._in_flight = in_flight
        # At the last look: the batch that was next to be answered, and since when.
        self._seen = 0, 0
        self._looked = time.monotonic_ns()

    def overdue(self, seconds: float) -> str | None:
        """Return what has taken longer than ``seconds``, if anything has."""
        now = time.monotonic_ns()
        since = self._busy_since(now)
        self._looked = now
        if now - since <= seconds * 1e9:
            return None
        return "execute ran" if self._executes() else "no execute began for"

    @property
    def executing_ns(self) -> int | None:
        """Return for how long the running ``execute`` has run; None if none runs."""
        now = time.monotonic_ns()
        since = self._busy_since(now)
        return now - since if self._executes() else None

    def _executes(self) -> bool:
        return self._in_flight.holds(self._control.started)

    def _busy_since(self, now: int) -> int:
        """Return since when (CLOCK_MONOTONIC ns) the stub has had its oldest batch to answer; ``now`` for none.

        The start that the stub reports is limited to the time since the previous call of `overdue`.
        """
        oldest = self._in_flight.oldest
        if oldest != self._seen[0]:
            began = self._control.started_at if self._control.started == oldest else now
            self._seen = oldest, min(max(began, self._looked), now)
        return self._seen[1] if oldest else now


def _is_whole(segment: ClientSegment | ClientDeviceSegment) -> bool:
    """Return False for a client's shared memory object that was shrunk."""
    return not isinstance(segment, ClientSegment) or segment.has(segment.size)
