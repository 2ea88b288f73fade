"""Serves BLS calls: submits them to the called models, and sends the responses to the caller.

No tensor is copied: the memory of a call's inputs and a response's outputs is passed on by reference.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from gpubridge.dataplane import Call, CallChannel
from gpubridge.engine.devices.edge_events import add_event_waits
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.ipc.long_messages import LongMessages
from gpubridge.engine.ipc.send_queue import SendQueue
from gpubridge.engine.ipc.stub_connection import StubConnection
from gpubridge.engine.memory.device_region import ClientDeviceSegment
from gpubridge.engine.memory.placed_response import PlacedResponse
from gpubridge.engine.memory.region_announcer import RegionAnnouncer
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.supervisor.instance import Instance
from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import BridgeError, ErrorCode, LongError, Pieces, unavailable
from gpubridge.frontend.bls.charged_calls import ChargedCalls
from gpubridge.frontend.bls.control_requests import ControlRequests
from gpubridge.frontend.bls.deadlock_watch import DeadlockWatch
from gpubridge.frontend.bls.requests import CalledModels, CallForm
from gpubridge.frontend.control import ControlTasks
from gpubridge.host_shm import Budget
from gpubridge.protocol.infer_response import json_members
from gpubridge.request import InferResponse, LongParameters, MemoryRange, Outcome
from gpubridge.transport.calls import CallKind, check_length, decode_calls, encode_records
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    DescriptorsLost,
    MalformedMessage,
    close_all,
    is_unread,
)
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.control import ABANDONED, CANCELLED
from gpubridge.transport.messages import control_message, decode_control
from gpubridge.transport.records import Record, record_reader, with_long_text
from gpubridge.transport.signatures import Signature, encode_signature

_logger = logging.getLogger(__name__)

_NO_CONTEXT = ResponseContext()
_FROM_STUBS = frozenset(
    (CallKind.CANCEL, CallKind.TAKEN, CallKind.ASK, CallKind.CLOSE_FAMILY, CallKind.BLOCKING)
)
_HEARD_TOGETHER = 256
"""Messages read in one turn of the event loop."""


class CallHooks(NamedTuple):
    """Callbacks of the compiled call channel of a stub.

    - ``announcer``: announces regions to the stub, through the channel of the calls.
    - ``caller``: the instance of the calling model.
    - ``connection``: the connection to the stub.
    - ``form``: returns the template of a call.
    - ``check``: looks whether a call that was submitted waits for its caller's own end.
    - ``failed``: returns the error response of a call that raised; gets its record, the error, and
      whether the call may have been submitted.
    - ``describe``: returns where the outputs of an unusual response are, whether others may read
      them, and its encoded context without long parameters.
    - ``long_text``: returns the context field and the text of an outcome with a long text, or None.
    - ``send_long``: sends the record of a response with such a text in that field.
    - ``signature``: encodes the signature of a response; None for no outputs.
    - ``receive``: handles a message of another kind, or one with descriptors, which it then owns;
      gets the bytes, the descriptors, and whether the message was truncated.
    - ``refuse``: gets the error or text for which a message was not accepted.
    - ``send``: sends a message that cannot be sent at once.
    - ``call_soon``: schedules a callback in this turn of the event loop.
    - ``charged``: charges what the open calls keep, and refuses further ones.
    """

    announcer: RegionAnnouncer
    caller: Instance
    connection: StubConnection
    form: Callable[[Record], CallForm]
    check: Callable[[Call], None]
    failed: Callable[[Record, Exception, bool], BridgeError]
    describe: Callable[[InferResponse], tuple[list[MemoryRange], bool, bytes]]
    long_text: Callable[[Outcome], tuple[str, Pieces] | None]
    send_long: Callable[[bytes, str, Pieces], None]
    signature: Callable[[Signature | None], bytes]
    receive: Callable[[bytes, list[int], bool], None]
    refuse: Callable[[Exception | str], None]
    send: Callable[[bytes], None]
    call_soon: Callable[[Callable[[], None]], object]
    charged: ChargedCalls


class BlsServer:
    """Serves the calls of all stubs."""

    def __init__(self) -> None:
        self._repository: ModelRepository
        self._changes = ControlTasks()
        self._connections: WeakSet[BlsConnection] = WeakSet()
        self.deadlocks = DeadlockWatch(self._callers)
        self.budget: Budget
        self.models: CalledModels

    def serve(self, repository: ModelRepository) -> None:
        """Set the repository of the called models, before any of them is loaded."""
        self._repository = repository
        self.budget = repository.regions.budget
        self.models = CalledModels(repository)

    def model_changed(self, _: str) -> None:
        """Drop cached models: the served versions of one have changed."""
        self.models.forget()
        for connection in self._connections:
            connection.models_changed()

    def _callers(self, instance: Instance) -> list[BlsConnection]:
        return [each for each in self._connections if each.caller is instance]

    def open(
        self, sock: socket.socket, connection: StubConnection, caller: Instance
    ) -> BlsConnection:
        """Serve the calls of one stub."""
        calls = BlsConnection(self, sock, connection, caller)
        self._connections.add(calls)
        return calls

    def control_requests(
        self,
        caller: Instance,
        send: Callable[..., None],
        catch_up: Callable[[], None],
        arena: StubArena | None,
    ) -> ControlRequests:
        """Return the handler of one stub's control requests."""
        return ControlRequests(self._repository, self._changes, caller, send, catch_up, arena)


class BlsConnection:
    """The calls of one stub; owns their channel.

    - ``connection``: the connection to the stub, which knows its memory.
    - ``caller``: the instance that the stub runs.
    """

    uploads = False

    def __init__(
        self, server: BlsServer, sock: socket.socket, connection: StubConnection, caller: Instance
    ) -> None:
        sock.setblocking(False)
        self._server = server
        self._connection = connection
        self.caller = caller
        self._model = caller.settings.model
        self._channel = Channel(sock)
        self._send_queue = SendQueue(self._channel, connection.workers, self._stop_io, self._block)
        self._reader = record_reader(CallContext)
        self._announcer = RegionAnnouncer(
            CallKind, connection.regions, self, connection.open_devices, self._send_queue.send
        )
        self._charged = ChargedCalls(server.budget, connection.account, self._model)
        hooks = CallHooks(
            announcer=self._announcer,
            caller=caller,
            connection=connection,
            form=self._form,
            check=partial(server.deadlocks.check, self),
            failed=self._failed,
            describe=self._describe,
            long_text=_long_text,
            send_long=self._send_long,
            signature=_encoded_signature,
            receive=self._receive,
            refuse=self._refuse,
            send=self._send_queue.send,
            call_soon=asyncio.get_running_loop().call_soon,
            charged=self._charged,
        )
        self._calls = CallChannel(connection.requests, self._reader, hooks, self._channel.fileno())
        self._charged.channel = self._calls
        self._open = True
        self._given_up = self._asked_blocking = False
        self._long = LongMessages(connection.workers, self._decode, self._take_long)
        self._control = server.control_requests(
            caller, self._send_queue.send, self._catch_up, connection.arena
        )
        self._listen(True)
        connection.on_abandoned = self._cancel_calls_of

    def close(self) -> None:
        """Cancel all calls: the stub is gone."""
        self._stop_io()
        # Breaks a reference cycle, so that no memory waits for the garbage collector.
        self._connection.on_abandoned = None
        self._charged.close()
        self._control.close()
        for call in self._calls.close():
            call.request.cancel()
        self._announcer.close()
        self._long.close()
        self._channel.close()

    def give_up(self) -> None:
        """Fail all calls, now and from now on, and tell the stub that its requests are given up.

        Whoever waits for a call there goes on, so that the model can be finalized.
        """
        self._given_up = True
        self._calls.forget()
        for call in self._calls.calls():
            request = call.request
            self._calls.end(call.number, self._refusal())
            request.cancel()
        self._calls.flush()
        if self._open:
            self._send_queue.send(control_message(CallKind.GIVEN_UP))

    def _refusal(self) -> BridgeError:
        return unavailable(
            f"this call has no answer: model '{self._model}', which makes it, is being unloaded"
        )

    def drop_region(self, region: int) -> None:
        """Tell the stub to unmap a region."""
        if region in self._announcer.known:
            self._calls.flush()
            self._announcer.drop(region)

    def announce_ahead(self, segment: ClientDeviceSegment) -> None:
        """Do nothing: client memory is announced through the stub's other channel."""

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Do nothing: inputs to upload arrive through the stub's other channel."""

    def release_kept(self) -> None:
        """Collect memory that the stub has released, for both channels."""
        self._connection.release_kept()

    def _stop_io(self) -> None:
        if self._open:
            self._open = False
            self._calls.mute()
            self._listen(False)
            self._send_queue.close()

    def _block(self, blocked: bool) -> None:
        self._calls.block(blocked)

    def models_changed(self) -> None:
        """Drop cached templates: the served versions of a model have changed."""
        self._calls.forget()

    def _listen(self, on: bool) -> None:
        loop = asyncio.get_running_loop()
        if on:
            loop.add_reader(self._channel.fileno(), self._calls.receive)
        else:
            loop.remove_reader(self._channel.fileno())

    # -- calls -----------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        for _ in range(_HEARD_TOGETHER):
            # Messages after a long one wait until a worker has parsed that.
            if not self._open or self._long.reading or not self._calls.receive():
                return

    def _receive(self, message: bytes, fds: list[int], cut: bool) -> None:
        """Handle a message that the compiled module does not; a worker parses a long one."""
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
            self._stop_io()
        except DescriptorsLost as error:
            self._stop_io()
            self._connection.lose(error)
        except MalformedMessage as error:
            self._refuse(error)

    def _refuse(self, error: Exception | str) -> None:
        """End the stub for a malformed message; raise errors that are not its fault."""
        if isinstance(error, BridgeError):
            error = error.message
        elif not isinstance(error, (str, ValueError)):
            raise error
        self._stop_io()
        self._connection.fail_protocol(f"sent a malformed call ({error})")

    def _take_long(self, decoded: tuple[int, Any] | BridgeError, fds: list[int]) -> None:
        """Handle a message that a worker has parsed, then continue with the next ones."""
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
        if kind not in _FROM_STUBS:
            raise MalformedMessage(f"unknown kind {kind}")
        check_length(message)
        return kind, decode_control(message)

    def _take(self, kind: int, fields: Any, fds: Sequence[int]) -> None:
        if kind == CallKind.CALL:
            self._calls.take(*fields)
            return
        if kind == CallKind.ASK:
            self._control.take(fields, fds)
            return
        if kind == CallKind.CLOSE_FAMILY:
            self._control.close_family(fields)
            return
        if kind == CallKind.BLOCKING:
            self._note_blocking(fields.get("calls"))
            return
        call = self._call(fields.get("call"))
        if kind == CallKind.CANCEL:
            if call is not None:
                self._cancel(call, fields.get("still_read") is True)
        else:
            responses = fields.get("responses")
            if call is not None and type(responses) is int and responses > 0:
                call.request.passed_on(responses)

    def _form(self, record: Record) -> CallForm:
        if self._given_up:
            raise self._refusal()
        form = self._server.models.form(record, self._model, self._connection.device or "")
        form.counts = self.caller.counters.calls_to(form.model.name, form.model.version)
        return form

    def _failed(self, record: Record, error: Exception, begun: bool) -> BridgeError:
        if isinstance(error, MalformedMessage):
            raise error
        if isinstance(error, BridgeError) and not begun:
            model = record.context.model
            text = f"Model {model} - Error when running inference: {error.message}"
            return BridgeError(text, error.code)
        # A bug of the server, but the model must get an answer.
        _logger.error("A model's call failed in the server", exc_info=error)
        return BridgeError(f"the server could not take the call: {error!r}", ErrorCode.INTERNAL)

    def calls_of_execute(self) -> list[Call]:
        """Return the calls that are made for batches whose ``execute`` has not returned."""
        holds = self._connection.requests.holds
        return [call for call in self._calls.calls() if call.batch and holds(call.batch)]

    def ask_blocking(self, calls: Sequence[Call]) -> None:
        """Ask the stub in which of some calls an ``execute`` is blocked, unless it has been asked."""
        if self._open and not self._asked_blocking:
            self._asked_blocking = True
            numbers = [call.number for call in calls]
            self._send_queue.send(control_message(CallKind.ARE_BLOCKING, calls=numbers))

    def refuse_call(self, call: Call, error: BridgeError) -> None:
        """Answer a call with an error, and cancel its request."""
        request = call.request
        self._calls.end(call.number, error)
        request.cancel()

    def _note_blocking(self, numbers: Any) -> None:
        if type(numbers) is not list or not self._asked_blocking:
            raise MalformedMessage("an answer that was not asked for, or of no calls")
        self._asked_blocking = False
        for call in map(self._call, numbers):
            if call is not None:
                call.blocks = True
        self._server.deadlocks.look()

    def _call(self, number: Any) -> Call | None:
        return self._calls.call(number) if type(number) is int and 0 <= number < 1 << 32 else None

    def _cancel(self, call: Call, still_read: bool) -> None:
        """Cancel a call; a request that its model has not started ends at once."""
        request = call.request
        if request.instance is None:
            request.cancel()
            cancelled = BridgeError("the request was cancelled", ErrorCode.CANCELLED)
            self._calls.end(call.number, cancelled)
        else:
            # Requests of a sequence that its model has not seen still count for it.
            of_sequence = call.form.model.config.message.HasField("sequence_batching")
            how = CANCELLED if still_read else ABANDONED
            request.instance.cancel(request, of_sequence, how)

    def _cancel_calls_of(self, batch: int) -> None:
        """Cancel the calls that were made for the requests of a batch: these are cancelled."""
        for call in self._calls.calls():
            if call.batch == batch:
                self._cancel(call, still_read=True)

    def _send_long(self, record: bytes, name: str, text: Pieces) -> None:
        frame = encode_records(CallKind.CALL_RESPONSES, [b""])
        self._send_queue.send((frame, *with_long_text(record, name, text)))

    def _describe(self, response: InferResponse) -> tuple[list[MemoryRange], bool, bytes]:
        ranges = response.ranges()
        # Others may still read some outputs, or they are in memory not allocated for this call.
        shared = isinstance(response, PlacedResponse) and not response.shared.isdisjoint(
            spec.name for spec in response.signature.tensors
        )
        context = _NO_CONTEXT
        if response.parameters and not isinstance(response.parameters, LongParameters):
            context = ResponseContext(parameters=json.dumps(response.parameters))
        if self._connection.arena is not None:
            context = add_event_waits(context, ranges, self._announcer)
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
