"""Serves the calls of models: gives them to the called models, and sends their answers to the caller.

No byte of a tensor is touched: what a call's inputs and an answer's outputs lie in is handed on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from gpubridge.dataplane import Call, CallChannel
from gpubridge.engine.announcements import Announcements
from gpubridge.engine.devices.edge_events import tell_waits
from gpubridge.engine.devices.region import ClientDeviceSegment
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.instance import Instance
from gpubridge.engine.long_messages import LongMessages
from gpubridge.engine.placed_response import PlacedResponse
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.send_queue import SendQueue
from gpubridge.engine.stub_connection import StubConnection
from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import BridgeError, ErrorCode, LongError, Pieces
from gpubridge.frontend.bls.control_requests import ControlRequests
from gpubridge.frontend.bls.deadlock_detection import find_circle
from gpubridge.frontend.bls.requests import CalledModels, CallForm
from gpubridge.frontend.control import ControlTasks
from gpubridge.protocol.infer_response import json_members
from gpubridge.request import InferResponse, LongParameters, MemoryRange, Outcome
from gpubridge.transport.calls import CallKind, check_length, decode_calls, encode_records
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    MalformedMessage,
    close_all,
    is_unread,
)
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.messages import decode_control
from gpubridge.transport.records import Record, record_reader, with_long_text
from gpubridge.transport.signatures import Signature, encode_signature

_logger = logging.getLogger(__name__)

_NO_CONTEXT = ResponseContext()
_HEARD_TOGETHER = 256
"""Messages that are read in one turn; the rest is read in a later one."""


class CallHooks(NamedTuple):
    """Callbacks for the calls of a stub.

    - ``announcements``: tell the stub of regions, through the channel of the calls.
    - ``model``: the name of the model that calls.
    - ``caller``: its instance.
    - ``link``: the connection to the stub.
    - ``form``: returns what a call asks for.
    - ``check``: raises a BridgeError where a call of models would never be answered.
    - ``failed``: returns the answer to a call that raised an error; gets its record, the error, and
      whether the called model may have had it.
    - ``describe``: returns of a response out of the ordinary where its outputs lie, whether others
      may look at them, and its encoded context without long parameters.
    - ``long_text``: returns the name of the field of the context that an outcome has a long text for,
      and that text; None without any.
    - ``send_long``: sends the record of an answer with such a text in that field.
    - ``signature``: encodes the signature of a response; None for that of no outputs.
    - ``receive``: takes a message of another kind, or with descriptors, which it then owns; gets its
      bytes, those, and whether something of it was cut off.
    - ``refuse``: gets the error or the text for which a message could not be taken.
    - ``send``: sends a message that cannot be sent at once.
    - ``call_soon``: has something called in this turn of the event loop.
    """

    announcements: Announcements
    model: str
    caller: Instance
    link: StubConnection
    form: Callable[[Record], CallForm]
    check: Callable[[Sequence[str]], None]
    failed: Callable[[Record, Exception, bool], BridgeError]
    describe: Callable[[InferResponse], tuple[list[MemoryRange], bool, bytes]]
    long_text: Callable[[Outcome], tuple[str, Pieces] | None]
    send_long: Callable[[bytes, str, Pieces], None]
    signature: Callable[[Signature | None], bytes]
    receive: Callable[[bytes, list[int], bool], None]
    refuse: Callable[[Exception | str], None]
    send: Callable[[bytes], None]
    call_soon: Callable[[Callable[[], None]], object]


class BlsServer:
    """Serves the calls of all models."""

    def __init__(self) -> None:
        self._repository: ModelRepository
        self._changes = ControlTasks()
        self._connections: WeakSet[BlsConnection] = WeakSet()
        self.models: CalledModels

    def serve(self, repository: ModelRepository) -> None:
        """Let the models of a repository be called; before any of them is loaded."""
        self._repository = repository
        self.models = CalledModels(repository)

    def model_changed(self, _: str) -> None:
        """Other versions of a model are served than before."""
        self.models.forget()
        for connection in self._connections:
            connection.models_changed()

    def open(self, sock: socket.socket, link: StubConnection, caller: Instance) -> BlsConnection:
        """Serve the calls of one stub."""
        connection = BlsConnection(self, sock, link, caller)
        self._connections.add(connection)
        return connection

    def control_requests(
        self,
        caller: Instance,
        send: Callable[..., None],
        catch_up: Callable[[], None],
        arena: StubArena | None,
    ) -> ControlRequests:
        """Answer what one stub asks."""
        return ControlRequests(self._repository, self._changes, caller, send, catch_up, arena)


class BlsConnection:
    """The calls of one stub; owns the channel that they come through.

    - ``link``: knows the stub's memory, and lends it other memory.
    - ``caller``: whose stub it is.
    """

    uploads = False

    def __init__(
        self, server: BlsServer, sock: socket.socket, link: StubConnection, caller: Instance
    ) -> None:
        sock.setblocking(False)
        self._server = server
        self._link = link
        self._caller = caller
        self._model: str = caller.settings.stub["name"]
        self._channel = Channel(sock)
        self._loop = asyncio.get_running_loop()
        self._send_queue = SendQueue(self._channel, link.workers, self._mute, self._block)
        self._reader = record_reader(CallContext)
        self._announcements = Announcements(
            CallKind, link.regions, self, link.open_devices, self._send_queue.send
        )
        hooks = CallHooks(
            announcements=self._announcements,
            model=self._model,
            caller=caller,
            link=link,
            form=self._form,
            check=self._check_deadlock,
            failed=self._failed,
            describe=self._describe,
            long_text=_long_text,
            send_long=self._send_long,
            signature=_encoded_signature,
            receive=self._receive,
            refuse=self._refuse,
            send=self._send_queue.send,
            call_soon=self._loop.call_soon,
        )
        self._calls = CallChannel(link.requests, self._reader, hooks, self._channel.fileno())
        self._open = True
        self._long = LongMessages(link.workers, self._decode, self._take_long)
        self._control = server.control_requests(
            caller, self._send_queue.send, self._catch_up, link.arena
        )
        self._listen(True)
        link.on_abandoned = self._give_up

    def close(self) -> None:
        """The stub is gone: what it called for is not needed any more."""
        self._mute()
        # They hold each other: nothing of a dead stub shall wait for the collector.
        self._link.on_abandoned = None
        self._control.close()
        for call in self._calls.close():
            call.request.cancel()
        self._announcements.close()
        self._long.close()
        self._channel.close()

    def drop_region(self, region: int) -> None:
        """Tell the stub to unmap a region."""
        if region in self._announcements.known:
            self._calls.flush()
            self._announcements.drop(region)

    def tell_ahead(self, segment: ClientDeviceSegment) -> None:
        """Nothing: a stub is told of clients' memory through its other channel."""

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Do nothing: a stub uploads inputs that come through its other channel."""

    def settle_kept(self) -> None:
        """Take back what the stub has let go of: its link keeps that for both channels."""
        self._link.settle_kept()

    def _mute(self) -> None:
        if self._open:
            self._open = False
            self._calls.mute()
            self._listen(False)
            self._send_queue.close()

    def _block(self, blocked: bool) -> None:
        self._calls.block(blocked)

    def models_changed(self) -> None:
        """Other versions of a model are served than before."""
        self._calls.forget()

    def _listen(self, on: bool) -> None:
        if on:
            self._loop.add_reader(self._channel.fileno(), self._calls.receive)
        else:
            self._loop.remove_reader(self._channel.fileno())

    # -- calls -----------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        for _ in range(_HEARD_TOGETHER):
            # What is behind a long message is heard when a worker has read that.
            if not self._open or self._long.reading or not self._calls.receive():
                return

    def _receive(self, message: bytes, fds: list[int], cut: bool) -> None:
        """Take a message that the compiled module leaves to others, or have it read if it is long."""
        try:
            message, fds = self._channel.whole(message, fds, cut, HEAVY_BYTES)
            if is_unread(message):
                self._listen(False)
                self._long.begin(message, fds)
                return
            try:
                self._take(*self._decode(message), fds)
            finally:
                close_all(fds)
        except ChannelClosed:
            self._mute()
        except MalformedMessage as error:
            self._refuse(error)

    def _refuse(self, error: Exception | str) -> None:
        """Trust the stub no more because of what it has sent; raise what is no fault of its."""
        if isinstance(error, BridgeError):
            error = error.message
        elif not isinstance(error, (str, ValueError)):
            raise error
        self._mute()
        self._link.distrust(f"sent a malformed call ({error})")

    def _take_long(self, decoded: tuple[int, Any] | BridgeError, fds: list[int]) -> None:
        """Take a message that a worker has read, and go on with those behind it."""
        try:
            if isinstance(decoded, BridgeError):
                self._refuse(decoded)
            elif self._open:
                self._take(*decoded, fds)
        except MalformedMessage as error:
            self._refuse(error)
        finally:
            close_all(fds)
            if self._open:
                self._listen(True)

    def _decode(self, message: bytes) -> tuple[int, Any]:
        """Return the kind of a message, and its records or its fields."""
        kind = message[0]
        if kind == CallKind.CALL:
            return kind, decode_calls(message, self._reader)
        if kind not in (CallKind.CANCEL, CallKind.TAKEN, CallKind.ASK, CallKind.CLOSE_FAMILY):
            raise MalformedMessage(f"unknown kind {kind}")
        check_length(message)
        return kind, decode_control(message)

    def _take(self, kind: int, fields: Any, fds: Sequence[int]) -> None:
        if kind == CallKind.CALL:
            self._calls.take(fields)
            return
        if kind == CallKind.ASK:
            self._control.take(fields, fds)
            return
        if kind == CallKind.CLOSE_FAMILY:
            self._control.close_family(fields)
            return
        number = fields.get("call")
        call = self._calls.call(number) if type(number) is int and 0 <= number < 1 << 32 else None
        if kind == CallKind.CANCEL:
            if call is not None:
                self._cancel(call, fields.get("still_read") is True)
        else:
            responses = fields.get("responses")
            if call is not None and type(responses) is int and responses > 0:
                call.request.passed_on(responses)

    def _form(self, record: Record) -> CallForm:
        return self._server.models.form(record, self._model, self._link.device or "")

    def _failed(self, record: Record, error: Exception, begun: bool) -> BridgeError:
        if isinstance(error, MalformedMessage):
            raise error
        if isinstance(error, BridgeError) and not begun:
            model = record.context.model
            text = f"Model {model} - Error when running inference: {error.message}"
            return BridgeError(text, error.code)
        # A fault of the server, but the model must not wait for ever for that.
        _logger.error("A model's call failed in the server", exc_info=error)
        return BridgeError(f"the server could not take the call: {error!r}", ErrorCode.INTERNAL)

    def _check_deadlock(self, names: Sequence[str]) -> None:
        for name in names:
            circle = find_circle(self._caller, name, self._server.models.instances)
            if circle:
                raise BridgeError(
                    f"this call would never be answered: {' waits for '.join(circle)}, and all "
                    "their instances are in use by this very request; give one of these models "
                    "another instance",
                    ErrorCode.UNAVAILABLE,
                )

    def _cancel(self, call: Call, still_read: bool) -> None:
        """Tell the called model; a request that it has not started is over."""
        request = call.request
        if request.instance is None:
            request.cancel()
            cancelled = BridgeError("the request was cancelled", ErrorCode.CANCELLED)
            self._calls.end(call.number, cancelled)
        else:
            # A sequence goes on with every request of it that its model has not seen.
            of_sequence = call.form.model.config.message.HasField("sequence_batching")
            request.instance.cancel(request, of_sequence, still_read)

    def _give_up(self, since: int) -> None:
        """Cancel the caller's calls: its own request was cancelled."""
        for call in self._calls.calls():
            if call.began >= since:
                self._cancel(call, still_read=True)

    def _send_long(self, record: bytes, name: str, text: Pieces) -> None:
        frame = encode_records(CallKind.CALL_RESPONSES, [b""])
        self._send_queue.send((frame, *with_long_text(record, name, text)))

    def _describe(self, response: InferResponse) -> tuple[list[MemoryRange], bool, bytes]:
        ranges = response.ranges()
        # Others may still look at some, or they lie in memory that was not made for this call.
        shared = isinstance(response, PlacedResponse) and not response.shared.isdisjoint(
            spec.name for spec in response.signature.tensors
        )
        context = _NO_CONTEXT
        if response.parameters and not isinstance(response.parameters, LongParameters):
            context = ResponseContext(parameters=json.dumps(response.parameters))
        if self._link.arena is not None:
            context = tell_waits(context, ranges, self._announcements)
        return ranges, shared, context.encoded()


def _long_text(outcome: Outcome) -> tuple[str, Pieces] | None:
    if isinstance(outcome, LongError):
        return "error", outcome.text
    if isinstance(outcome, InferResponse) and isinstance(outcome.parameters, LongParameters):
        return "parameters", [b"{", *json_members(outcome.parameters), b"}"]
    return None


def _encoded_signature(signature: Signature | None) -> bytes:
    tensors = () if signature is None else signature.tensors
    return encode_signature([(spec.name, spec.datatype, spec.rank) for spec in tensors])
