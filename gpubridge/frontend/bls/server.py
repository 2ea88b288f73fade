"""Serves the calls of models: gives them to the called models, and sends their answers to the caller.

No byte of a tensor is touched: what a call's inputs and an answer's outputs lie in is handed on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpubridge.engine.announcements import Announcements
from gpubridge.engine.devices.edge_events import tell_waits
from gpubridge.engine.hand_over import for_others
from gpubridge.engine.instance import Instance
from gpubridge.engine.long_messages import LongMessages
from gpubridge.engine.placed_response import PlacedResponse
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.send_queue import SendQueue
from gpubridge.engine.stub_connection import StubConnection
from gpubridge.engine.tracing import UNTRACED, Caused
from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.bls.control_requests import ControlRequests
from gpubridge.frontend.bls.deadlock_detection import find_circle
from gpubridge.frontend.bls.requests import CalledModels, CallForm
from gpubridge.frontend.control import ControlTasks
from gpubridge.protocol.infer_response import json_members
from gpubridge.request import (
    InferRequest,
    InferResponse,
    LongParameters,
    MemoryRange,
    Outcome,
    Parameters,
)
from gpubridge.transport.calls import CallKind, decode_records, encode_records
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    MalformedMessage,
    close_all,
    is_unread,
)
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.messages import ResponseFlag, decode_control
from gpubridge.transport.records import Record, record_encoder, record_reader
from gpubridge.transport.signatures import Shapes, Signature, encode_dims, encode_signature

_logger = logging.getLogger(__name__)

_NOTHING = encode_signature(())
_NO_CONTEXT = ResponseContext()
_NO_REFS: list[int] = []
_SIGNATURES = 256
_HEARD_TOGETHER = 256
"""Who says more than that is heard on later."""


class BlsServer:
    """Serves the calls of all models."""

    def __init__(self) -> None:
        self._repository: ModelRepository
        self._changes = ControlTasks()
        self.models: CalledModels

    def serve(self, repository: ModelRepository) -> None:
        """Let the models of a repository be called; before any of them is loaded."""
        self._repository = repository
        self.models = CalledModels(repository)

    def model_changed(self, _: str) -> None:
        """Other versions of a model are served than before."""
        self.models.forget()

    def open(self, sock: socket.socket, link: StubConnection, caller: Instance) -> BlsConnection:
        """Serve the calls of one stub."""
        return BlsConnection(self, sock, link, caller)

    def control_requests(
        self, caller: Instance, send: Callable[..., None], catch_up: Callable[[], None]
    ) -> ControlRequests:
        """Answer what one stub asks."""
        return ControlRequests(self._repository, self._changes, caller, send, catch_up)


class _Call:
    """One call on its way."""

    __slots__ = ("began", "form", "number", "request")

    def __init__(self, number: int, form: CallForm, request: InferRequest) -> None:
        self.began = time.monotonic_ns()
        self.number = number
        self.form = form
        self.request = request


class BlsConnection:
    """The calls of one stub; owns the channel that they come through.

    - ``link``: knows the stub's memory, and lends it other memory.
    - ``caller``: whose stub it is.
    """

    def __init__(
        self, server: BlsServer, sock: socket.socket, link: StubConnection, caller: Instance
    ) -> None:
        sock.setblocking(False)
        self._server = server
        self._link = link
        self._caller = caller
        self._model: str = caller.settings.stub["name"]
        self._channel = Channel(sock)
        self._send_queue = SendQueue(self._channel, self._mute)
        self._reader = record_reader(CallContext)
        self._encode = record_encoder()
        self._calls: dict[int, _Call] = {}
        self._announcements = Announcements(
            CallKind, link.regions, self, link.open_devices, self._send_queue.send
        )
        self._answers: list[bytes] = []
        self._signatures: dict[int, tuple[Signature, bytes]] = {}
        self._shapes: Shapes = ()
        self._dims = b""
        self._open = True
        self._long = LongMessages(link.workers, self._decode, self._take_long)
        self._control = server.control_requests(caller, self._send_queue.send, self._catch_up)
        self._loop = asyncio.get_running_loop()
        self._listen(True)
        link.on_abandoned = self._give_up

    def close(self) -> None:
        """The stub is gone: what it called for is not needed any more."""
        self._mute()
        # They hold each other: nothing of a dead stub shall wait for the collector.
        self._link.on_abandoned = None
        self._control.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.request.cancel()
        self._announcements.close()
        self._long.close()
        self._channel.close()

    def drop_region(self, region: int) -> None:
        """Tell the stub to unmap a region."""
        if region in self._announcements.known:
            self._send_answers()
            self._announcements.drop(region)

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Nothing: a stub uploads what comes through its other channel."""

    def settle_kept(self) -> None:
        """Take back what the stub has let go of: its link keeps that for both channels."""
        self._link.settle_kept()

    def _mute(self) -> None:
        if self._open:
            self._open = False
            self._listen(False)
            self._send_queue.close()

    def _listen(self, on: bool) -> None:
        if on:
            self._loop.add_reader(self._channel.fileno(), self._on_readable)
        else:
            self._loop.remove_reader(self._channel.fileno())

    # -- calls -----------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        for _ in range(_HEARD_TOGETHER):
            # What is behind a long message is heard when a worker has read that.
            if not self._open or self._long.reading or not self._on_readable():
                return

    def _on_readable(self) -> bool:
        """Take one message, or have it read if it is long; returns whether there was one."""
        try:
            message, fds = self._channel.receive(HEAVY_BYTES)
            if is_unread(message):
                self._listen(False)
                self._long.begin(message, fds)
            else:
                try:
                    self._take(*self._decode(message), fds)
                finally:
                    close_all(fds)
        except BlockingIOError:
            return False
        except ChannelClosed:
            self._mute()
        except MalformedMessage as error:
            self._refuse(error)
        return True

    def _refuse(self, error: BridgeError) -> None:
        self._mute()
        self._link.distrust(f"sent a malformed call ({error.message})")

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
            return kind, decode_records(message, self._reader, named=True)
        if kind not in (CallKind.CANCEL, CallKind.TAKEN, CallKind.ASK, CallKind.CLOSE_FAMILY):
            raise MalformedMessage(f"unknown kind {kind}")
        return kind, decode_control(message)

    def _take(self, kind: int, fields: Any, fds: Sequence[int]) -> None:
        if kind == CallKind.CALL:
            self._link.busy_poll.heard()
            self._begin_all(fields)
            return
        if kind == CallKind.ASK:
            self._control.take(fields, fds)
            return
        if kind == CallKind.CLOSE_FAMILY:
            self._control.close_family(fields)
            return
        call = self._calls.get(fields.get("call", 0))
        if kind == CallKind.CANCEL:
            if call is not None:
                self._cancel(call, fields.get("still_read") is True)
        else:
            responses = fields.get("responses")
            if call is not None and type(responses) is int and responses > 0:
                call.request.passed_on(responses)

    def _begin_all(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                self._begin(record)
            except MalformedMessage:
                raise
            except Exception as error:
                # A fault of the server, but the model must not wait for ever for that.
                _logger.exception("A model's call failed in the server")
                self._fail(record.ticket, error)

    def _begin(self, record: Record) -> None:
        number = record.ticket
        said: CallContext = record.context
        if number in self._calls:
            raise MalformedMessage(f"call {number} of '{said.model}', which there is already")
        ranges = self._ranges(record)
        try:
            form = self._server.models.form(record, self._model, self._link.device or "")
            for each in form.needed:
                self._check_deadlock(each)
            request = form.request(record, ranges, partial(self._end, number))
        except BridgeError as error:
            text = f"Model {said.model} - Error when running inference: {error.message}"
            self._answer(number, BridgeError(text, error.code), 0)
            return
        if said.decoupled:
            request.on_partial = partial(self._respond, number)
        self._calls[number] = _Call(number, form, request)
        waits_for = self._caller.waits_for
        for each in form.needed:
            waits_for[each] = waits_for.get(each, 0) + 1
        model = form.model
        cause = Caused(model.traces.find(said.trace)) if said.trace else UNTRACED
        model.submit(request, cause)

    def _fail(self, number: int, error: Exception) -> None:
        failure = BridgeError(f"the server could not take the call: {error!r}", ErrorCode.INTERNAL)
        if number in self._calls:
            self._end(number, failure)
        else:
            self._answer(number, failure, 0)

    def _ranges(self, record: Record) -> list[MemoryRange]:
        try:
            return self._link.ranges(record)
        except MalformedMessage:
            # The stub may have announced that memory, through its other channel, a moment ago.
            self._link.catch_up()
            return self._link.ranges(record)

    def _check_deadlock(self, name: str) -> None:
        circle = find_circle(self._caller, name, self._server.models.instances)
        if circle:
            raise BridgeError(
                f"this call would never be answered: {' waits for '.join(circle)}, and all their "
                "instances are in use by this very request; give one of these models another instance",
                ErrorCode.UNAVAILABLE,
            )

    def _cancel(self, call: _Call, still_read: bool) -> None:
        """Tell the called model; a request that it has not started is over."""
        request = call.request
        if request.instance is None:
            request.cancel()
            self._end(call.number, BridgeError("the request was cancelled", ErrorCode.CANCELLED))
        else:
            # A sequence goes on with every request of it that its model has not seen.
            of_sequence = call.form.model.config.message.HasField("sequence_batching")
            request.instance.cancel(request, of_sequence, still_read)

    def _give_up(self, since: int) -> None:
        """Nobody waits for what the caller works on, since then: nor for what it has called for."""
        for call in [call for call in self._calls.values() if call.began >= since]:
            self._cancel(call, still_read=True)

    # -- answers ---------------------------------------------------------------------------------

    def _respond(self, number: int, outcome: Outcome) -> None:
        self._answer(number, outcome, ResponseFlag.OPEN)

    def _end(self, number: int, outcome: Outcome | None) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        self._answer(number, outcome, 0)
        waits_for = self._caller.waits_for
        for each in call.form.needed:
            left = waits_for.get(each, 1) - 1
            if left:
                waits_for[each] = left
            else:
                waits_for.pop(each, None)

    def _answer(self, number: int, outcome: Outcome | None, flags: int) -> None:
        if not self._open:
            return
        refs, context = _NO_REFS, _NO_CONTEXT
        signature, dims = _NOTHING, b""
        if isinstance(outcome, InferResponse):
            try:
                refs, context = self._lend(outcome)
                signature, dims = self._encoded(outcome)
            except BridgeError as error:
                outcome = error
        if outcome is None:
            flags |= ResponseFlag.EMPTY
        elif not isinstance(outcome, InferResponse):
            flags |= ResponseFlag.ERROR
            context = ResponseContext(error=outcome.message, code=int(outcome.code))
        record = self._encode(number, signature, dims, refs, flags, context=context.encoded())
        self._answers.append(record)
        if not self._calls and not flags & ResponseFlag.OPEN:
            # Nothing else that it waits for may come in this turn.
            self._send_answers()
        elif len(self._answers) == 1:
            self._loop.call_soon(self._send_answers)
        if not flags & ResponseFlag.OPEN:
            self._link.busy_poll.told()

    def _send_answers(self) -> None:
        """Send what has been answered in this turn of the loop, in one message."""
        answers, self._answers = self._answers, []
        if answers and self._open:
            self._send_queue.send(encode_records(CallKind.CALL_RESPONSES, answers))

    def _lend(self, response: InferResponse) -> tuple[list[int], ResponseContext]:
        """Lend the outputs to the caller; returns the fields of their references, and the context."""
        ranges = response.ranges()
        ticket = self._link.lend(ranges)
        # Others may still look at some, or they lie in memory that was not made for this call.
        read_only = for_others(ranges, (self._model,)) or (
            isinstance(response, PlacedResponse)
            and not response.shared.isdisjoint(spec.name for spec in response.signature.tensors)
        )
        refs: list[int] = []
        last: object = None
        region = 0
        for segment, offset, nbytes, _ in ranges:
            if segment is None:
                refs += (0, 0, 0, NO_LEASE)
                continue
            if segment is not last:
                region = self._announcements.name(segment, read_only=read_only)
                last = segment
            refs += (region, offset, nbytes, ticket if nbytes else NO_LEASE)
        context = _NO_CONTEXT
        if response.parameters:
            context = ResponseContext(parameters=_parameters_text(response.parameters))
        if self._link.device is not None:
            context = tell_waits(context, ranges, self._announcements)
        return refs, context

    def _encoded(self, response: InferResponse) -> tuple[bytes, bytes]:
        """Return the signature and the dims of a response, encoded."""
        signature, shapes = response.signature, response.shapes
        # Readers have one object for each signature; it is held, so that nothing else gets its address.
        known = self._signatures.get(id(signature))
        if known is None:
            kinds = [(spec.name, spec.datatype, spec.rank) for spec in signature.tensors]
            if len(self._signatures) >= _SIGNATURES:
                self._signatures.clear()
            known = self._signatures[id(signature)] = signature, encode_signature(kinds)
        if shapes is not self._shapes:
            self._shapes, self._dims = shapes, encode_dims(shapes)
        return known[1], self._dims


def _parameters_text(parameters: Parameters) -> str:
    if isinstance(parameters, LongParameters):
        return f"{{{str(b''.join(json_members(parameters)), 'utf-8')}}}"
    return json.dumps(parameters)
