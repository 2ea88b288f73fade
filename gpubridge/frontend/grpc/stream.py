"""ModelStreamInfer: many requests on one stream, answered in order.

Requests for decoupled models get any number of responses, each sent as it arrives. Requests are read
and submitted however many are open: a later one may be what those wait for. Without memory for more they
are refused, at once and out of order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn

from gpubridge.dataplane import MessageResponseTemplate, StreamResponses
from gpubridge.engine.models.tracing import Received
from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import ArenaFull, BridgeError
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.frontend.grpc.call import Call, Opening
from gpubridge.frontend.grpc.packing import PIECE, PREFIX, Packing
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.frontend.grpc.waiting_messages import WaitingMessages
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.host_shm import LARGE_BYTES, PrivateBytes
from gpubridge.protocol.grpc.infer_request import (
    FormCache,
    KnownRequest,
    MadeRequest,
    read_request,
)
from gpubridge.protocol.grpc.infer_response import (
    FrameSegments,
    error_frame,
    failure_frame,
    final_frame,
    final_parameter,
    plain_template,
)
from gpubridge.protocol.grpc.receiver import RequestReceiver, whole_request
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error
from gpubridge.transport.signatures import Signature

_OF_REQUEST = 2048
"""Bytes of memory of an open request beside its tensors, about."""
_UNSENT_BYTES = 1 << 20
"""Unsent bytes of responses, above which decoupled models send no more."""
_A_TURN = 64
"""Requests of a stream that are taken, or given up, in one turn of the event loop: clients pour in thousands."""
_ERRORS_END = (b"triton_grpc_error", b"true")


@dataclass(slots=True, eq=False)
class _OrderedRequest:
    """A request with one response, in the order of its stream."""

    known: KnownRequest | None = None
    request: InferRequest | None = None
    frame: FrameSegments | None = None


@dataclass(slots=True, eq=False)
class _DecoupledRequest:
    """A request for a decoupled model, whose responses are sent as they arrive.

    ``unsent``: responses that the client has not read yet and the model has no credit for.
    """

    known: KnownRequest
    request: InferRequest
    unsent: int = 0


class _Flows(set[_DecoupledRequest]):
    """The open requests for decoupled models.

    Attribute ``unread``: those with unsent responses, first the one that has waited longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unread: dict[_DecoupledRequest, None] = {}


@dataclass(slots=True, eq=False)
class _QueuedResponse:
    """A queued response: its frame, None while a worker encodes it; an error ends the stream."""

    frame: FrameSegments | BridgeError | None = None
    nbytes: int = 0


class StreamHooks(NamedTuple):
    """Objects that the compiled `StreamResponses` of a request uses.

    - ``parameters``: the encoded parameters of a response that is not the last.
    - ``most_unsent``: from so many unsent bytes of the stream on, the model gets no credit.
    - ``outgoing``: the stream's queued responses; while there are any, all are left to ``respond``.
    - ``template_of``: returns the template of plain responses with a signature; None if they are not plain.
    - ``respond``: sends any other response.
    - ``flush_soon``: has the connection send what is queued.
    - ``leave_unread``: notes a response that was sent, and for which the model gets no credit yet.
    """

    parameters: bytes
    most_unsent: int
    outgoing: deque[_QueuedResponse]
    template_of: Callable[[Signature], MessageResponseTemplate | None]
    respond: Callable[[Outcome], None]
    flush_soon: Callable[[], None]
    leave_unread: Callable[[], None]


class StreamCall(Call):
    """A call of ModelStreamInfer.

    An error is a response like others and the stream continues, unless the client has asked for the
    opposite.
    """

    def __init__(self, opening: Opening, forms: FormCache, memory: RequestMemory) -> None:
        super().__init__(opening)
        self._forms = forms
        self._memory = memory
        # Whether an error ends the stream with its status.
        self._errors_end = _ERRORS_END in opening.headers.fields
        self._turns: deque[_OrderedRequest] = deque()
        self._flows = _Flows()
        self._waiting = WaitingMessages()
        # Compressed messages, and messages received after them, in order.
        self._coded: deque[tuple[bytes, bool]] = deque()
        # Responses that workers encode or compress, and responses after them, in order.
        self._outgoing: deque[_QueuedResponse] = deque()
        # Bytes of all messages, bytes of the incomplete one, and the charge for it and queued ones. A
        # message is queued until it is decompressed, and until all of it is copied.
        self._received = self._partial = 0
        self._counted: PrivateBytes | None = None
        # Receives a long message; later messages wait for it.
        self._receiver: RequestReceiver | None = None
        self._unread = 0
        # With an error: the server ends the stream, not the client.
        self._ended: bool | CallFailed = False
        self._advancing = False
        self._connection.http2.throttle(self._stream_id)

    # -- requests --------------------------------------------------------------------------------

    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Receive requests."""
        if self._done:
            return
        # Sent early: clients wait for the headers of a stream before they report it as open.
        self._send_headers()
        self._unread += nbytes
        self._received += nbytes
        self._partial += nbytes - sum(PREFIX + len(message) for message in messages)
        if compressed or self._coded or self._unpacking is not None:
            self._coded.extend([(message, compressed) for message in messages])
        else:
            self._waiting.add(messages)
        self._ended = end or self._ended
        self._unpack_queued()

    def _continue(self) -> None:
        self._waiting.later = False
        if not self._done:
            self._unpack_queued()

    def _continue_later(self) -> None:
        if not self._waiting.later:
            self._waiting.later = True
            asyncio.get_running_loop().call_soon(self._continue)

    def _unpack_queued(self) -> None:
        """Decompress queued messages, some in each turn of the event loop."""
        left = 0 if self._waiting.later else _A_TURN
        try:
            while self._coded and self._unpacking is None and left:
                left -= 1
                message, compressed = self._coded[0]
                plain = self._unpack(message, self._unpacked) if compressed else message
                if plain is not None:
                    self._coded.popleft()
                    self._waiting.add([plain])
            if self._coded and self._unpacking is None:
                self._continue_later()
            self._count()
        except Exception as error:
            self.refuse(error)
            return
        self._advance()

    def _unpacked(self, message: bytes) -> None:
        self._coded.popleft()
        self._waiting.add([message])
        self._unpack_queued()

    def _count(self) -> None:
        """Charge the connection for messages that are not submitted yet, if they are large."""
        held = self._partial + self._waiting.nbytes
        held += sum(len(message) for message, _ in self._coded)
        if held <= LARGE_BYTES:
            self._release_charge()
            return
        if self._counted is None:
            self._counted = PrivateBytes(self._connection.new_body(self.refuse))
        self._counted.count(held)

    def _release_charge(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            counted.close()

    def check(self, now: float, window: float) -> None:
        """Fail if a message is received too slowly, while it may be sent."""
        begin = self._received - self._partial
        message = begin if self._partial and not self._unread else None
        self._check_rate(now, window, message, self._received, self._partial)

    def writable(self) -> None:
        """Continue: the client has read the queued bytes."""
        # Each may get others by that, which count as unread, as those that are being compressed do.
        while self._flows.unread and self._is_read():
            flow = next(iter(self._flows.unread))
            del self._flows.unread[flow]
            unsent, flow.unsent = flow.unsent, 0
            flow.request.passed_on(unsent)
        self._advance()

    def _advance(self) -> None:
        """Submit waiting requests; end the call when everything is answered."""
        if self._advancing:
            # Called for an immediate response to a request that is being submitted: no recursion.
            return
        self._advancing, left = True, 0 if self._waiting.later else _A_TURN
        while self._may_begin():
            if not left:
                self._continue_later()
                break
            left -= 1
            self._begin(self._waiting[0])
        self._advancing = False
        if self._done:
            return
        nbytes = _OF_REQUEST * (len(self._turns) + len(self._flows))
        self._connection.http2.keep(self._stream_id, nbytes)
        if self._counted is not None:
            self._count()
        taken = not (self._waiting or self._coded or self._unpacking or self._receiver)
        if taken and self._unread and self._may_submit():
            unread, self._unread = self._unread, 0
            self._connection.http2.consume(self._stream_id, unread)
        if self._ended and taken and not (self._turns or self._flows or self._outgoing):
            if isinstance(self._ended, CallFailed):
                self.fail(self._ended)
            else:
                self._succeed()

    def _may_begin(self) -> bool:
        ready = self._waiting and not self._done and self._receiver is None
        return bool(ready) and self._may_submit()

    def _may_submit(self) -> bool:
        """Return False while the client has more unread than its connection's share of the memory.

        It is read on when it reads, which ``--grpc-send-timeout`` has it do.
        """
        budget = self._memory.arenas.budget
        return self._is_read() or self._connection.account.total <= budget.share

    def _is_read(self) -> bool:
        """Return whether the client has read enough to be sent more."""
        unsent = self._connection.http2.queued(self._stream_id)
        unsent += sum([outgoing.nbytes for outgoing in self._outgoing])
        return unsent < _UNSENT_BYTES

    def _begin(self, message: bytes) -> None:
        shortage = self._connection.shortage
        if shortage is not None:
            self._waiting.take()
            self._turn_away(lambda: read_request(message).identifier, shortage)
            return
        turn = _OrderedRequest()
        self._turns.append(turn)
        answer = partial(self._answer, turn)
        if len(message) > HEAVY_BYTES:
            account = self._connection.account
            self._receiver = self._memory.receiver(len(message), account, self.refuse)
            self._feed(turn, message, 0)
        else:
            self._waiting.take()
            make = partial(whole_request, message, self._forms, answer)
            self._submit(turn, make, lambda: read_request(message).identifier)

    def _turn_away(self, identifier: Callable[[], str], error: BridgeError) -> None:
        """Refuse a request that there is no memory for, at once: what it waits behind may not end."""
        if self._errors_end:
            self.refuse(error)
            return
        self._send(error_frame(error.told, _readable(identifier)))

    def _feed(self, turn: _OrderedRequest, message: bytes, at: int) -> None:
        """Copy a long message into shared memory, one piece in each turn of the event loop."""
        receiver = self._receiver
        if receiver is None:
            return
        end = at + PIECE
        try:
            receiver.feed(memoryview(message)[at:end])
        except Exception as error:
            self._make(turn, partial(_fail, error), lambda: read_request(message).identifier)
            return
        if end < len(message):
            asyncio.get_running_loop().call_soon(self._feed, turn, message, end)
        elif receiver.complete and receiver.takes_long:
            read = partial(self._read, turn)
            self._reading = self._connection.coder.read(receiver, self._forms, read)
        else:
            make = partial(receiver.request, self._forms, partial(self._answer, turn))
            self._make(turn, make, lambda: read_request(message).identifier)

    def _read(self, turn: _OrderedRequest, known: KnownRequest | BridgeError) -> None:
        """Make the request from a message that a worker has parsed."""
        receiver, self._reading = self._receiver, None
        if receiver is None:
            return
        make: Callable[[], MadeRequest]
        if isinstance(known, BridgeError):
            make = partial(_fail, known)
        else:
            make = partial(receiver.make, known, partial(self._answer, turn))
        self._make(turn, make, lambda: receiver.identifier)

    def _make(
        self, turn: _OrderedRequest, make: Callable[[], MadeRequest], identifier: Callable[[], str]
    ) -> None:
        """Submit the request of a long message, then continue with the next message."""
        receiver, self._receiver = self._receiver, None
        self._waiting.take()
        if not self._done:
            self._submit(turn, make, identifier)
        if receiver is not None:
            receiver.close()
        self._advance()

    def _submit(
        self, turn: _OrderedRequest, make: Callable[[], MadeRequest], identifier: Callable[[], str]
    ) -> None:
        try:
            known, request, regions = make()
            if regions is not None:
                with known.model.statistics.refusing(request.identifier):
                    self._memory.share(request, regions, known.model.config.name)
        except Exception as failed:
            error = request_error(failed)
            if isinstance(error, ArenaFull):
                # It is the last turn still.
                self._turns.pop()
                self._turn_away(identifier, error)
            else:
                self._fail_turn(turn, error, error_frame(error.told, _readable(identifier)))
            return
        add_parameters(request, self._parameters)
        turn.known = known
        turn.request = request
        if known.model.config.decoupled:
            self._turns.pop()
            flow = _DecoupledRequest(known, request)
            self._flows.add(flow)
            request.account = self._connection.account
            request.on_partial = self._on_partial(flow)
            request.on_done = partial(self._finish_decoupled, flow)
        now = time.monotonic_ns()
        known.model.submit(request, Received("GRPC", now, now, self._context))

    def drain(self) -> None:
        """Stop reading requests; the client may have sent one meanwhile, and is told so."""
        self._ended = self._ended or CallFailed(Status.UNAVAILABLE, "the server is stopping")
        self._advance()

    def pack(self, packing: Packing) -> None:
        """Compress the responses."""
        self._packing = packing

    def _release(self) -> None:
        super()._release()
        self._abandon()

    def _abandon(self) -> None:
        self._waiting.clear()
        self._coded.clear()
        self._outgoing.clear()
        self._release_charge()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        turns, self._turns = self._turns, deque()
        flows, self._flows = self._flows, _Flows()
        open_ones = [turn.request for turn in turns if turn.frame is None]
        open_ones += [flow.request for flow in flows]
        _cancel_in_turns(filter(None, open_ones))

    # -- responses -------------------------------------------------------------------------------

    def _answer(self, turn: _OrderedRequest, outcome: Outcome) -> None:
        if self._done:
            return
        known, request = turn.known, turn.request
        assert known is not None
        assert request is not None
        done = partial(self._framed, turn)
        frame: FrameSegments | BridgeError | None
        try:
            frame = self._connection.coder.frame(
                known, request.identifier, outcome, done, final=True
            )
        except Exception as error:
            frame = request_error(error).copy()
        if frame is not None:
            done(frame)

    def _framed(self, turn: _OrderedRequest, frame: FrameSegments | BridgeError) -> None:
        """Send an encoded response, or queue it until its turn."""
        if self._done:
            return
        if isinstance(frame, BridgeError):
            assert turn.known is not None
            assert turn.request is not None
            self._fail_turn(turn, frame, _failure(turn.known, turn.request, frame, final=True))
            return
        turn.frame = frame
        self._send_ready()

    def _fail_turn(self, turn: _OrderedRequest, error: BridgeError, frame: FrameSegments) -> None:
        if self._errors_end:
            self._send(error)
            return
        turn.frame = frame
        self._send_ready()

    def _send_ready(self) -> None:
        """Send the responses whose turn it is."""
        turns = self._turns
        while turns and turns[0].frame is not None:
            frame = turns.popleft().frame
            assert frame is not None
            self._send(frame)
        self._advance()

    # -- responses of decoupled models -----------------------------------------------------------

    def _on_partial(self, flow: _DecoupledRequest) -> Callable[[Outcome], None]:
        """Return what gets the responses that are not the last; plain ones do not come to Python."""
        respond = partial(self._respond, flow)
        if self._packing is not None:
            return respond
        known, connection = flow.known, self._connection
        hooks = StreamHooks(
            final_parameter(False),
            _UNSENT_BYTES,
            self._outgoing,
            partial(plain_template, known.form, known.model.config, known.model.version),
            respond,
            connection.flush_soon,
            partial(self._leave_unread, flow),
        )
        return StreamResponses(connection.http2, self._stream_id, flow.request, hooks)

    def _respond(self, flow: _DecoupledRequest, outcome: Outcome) -> None:
        """Send a response that is not the last."""
        if self._done:
            return
        self._send_response(flow, outcome, final=False)
        if self._is_read():
            flow.request.passed_on(1)
        else:
            self._leave_unread(flow)

    def _leave_unread(self, flow: _DecoupledRequest) -> None:
        """Give the model no credit for a response until the client has read more."""
        flow.unsent += 1
        self._flows.unread[flow] = None

    def _finish_decoupled(self, flow: _DecoupledRequest, outcome: Outcome | None) -> None:
        """Send the last response, or an empty final one if the client asked for that."""
        self._flows.discard(flow)
        self._flows.unread.pop(flow, None)
        if self._done:
            return
        if outcome is not None:
            self._send_response(flow, outcome, final=True)
        elif flow.known.empty_final_response:
            self._send(final_frame(flow.known.model.name, flow.request.identifier))
        self._advance()

    def _send_response(self, flow: _DecoupledRequest, outcome: Outcome, *, final: bool) -> None:
        outgoing = _QueuedResponse()
        self._outgoing.append(outgoing)

        def framed(frame: FrameSegments | BridgeError) -> None:
            if isinstance(frame, BridgeError) and not self._errors_end:
                frame = _failure(flow.known, flow.request, frame, final=final)
            self._fill(outgoing, frame)

        def framed_by_worker(frame: FrameSegments | BridgeError) -> None:
            if not self._done:
                framed(frame)
                self._caught_up()

        known, identifier = flow.known, flow.request.identifier
        frame: FrameSegments | BridgeError | None
        try:
            frame = self._connection.coder.frame(
                known, identifier, outcome, framed_by_worker, final=final
            )
        except Exception as error:
            frame = request_error(error).copy()
        if frame is not None:
            framed(frame)
        elif isinstance(outcome, InferResponse):
            outgoing.nbytes = sum(map(len, outcome.buffers))

    def _send(self, frame: FrameSegments | BridgeError) -> None:
        """Queue a frame, or the error that ends the stream, after responses that workers encode."""
        outgoing = _QueuedResponse()
        self._outgoing.append(outgoing)
        self._fill(outgoing, frame)

    def _fill(self, outgoing: _QueuedResponse, frame: FrameSegments | BridgeError) -> None:
        """Set the frame of a queued response, compressed if required."""
        outgoing.frame = frame
        if not isinstance(frame, BridgeError):
            outgoing.nbytes = sum(map(len, frame))
            if self._packing is not None:
                done = partial(self._packed, outgoing)
                outgoing.frame = self._connection.coder.pack(self._packing, frame, done)
        self._send_outgoing()

    def _packed(self, outgoing: _QueuedResponse, frame: FrameSegments | BridgeError) -> None:
        """Set the frame that a worker has compressed."""
        outgoing.frame = frame
        if self._done:
            return
        self._send_outgoing()
        self._caught_up()

    def _caught_up(self) -> None:
        """Continue after a worker has encoded a response."""
        if not self._done:
            self.writable()

    def _send_outgoing(self) -> None:
        while self._outgoing and (frame := self._outgoing[0].frame) is not None:
            self._outgoing.popleft()
            if isinstance(frame, BridgeError):
                self.refuse(frame)
                return
            self._connection.http2.send_data(self._stream_id, frame)
            self._connection.flush_soon()


def _cancel_in_turns(requests: Iterator[InferRequest]) -> None:
    """Cancel the requests of a stream that has ended, some in each turn of the event loop."""
    for number, request in enumerate(requests, 1):
        request.cancel()
        if number == _A_TURN:
            asyncio.get_running_loop().call_soon(_cancel_in_turns, requests)
            break


def _failure(
    known: KnownRequest, request: InferRequest, error: BridgeError, *, final: bool
) -> FrameSegments:
    """Encode an error that a model responds with."""
    return failure_frame(error, known.model.name, request.identifier, final=final)


def _fail(error: Exception) -> NoReturn:
    raise error


def _readable(identifier: Callable[[], str]) -> str:
    """Return the id of an invalid request, if it can be read."""
    try:
        return identifier()
    except BridgeError:
        return ""
