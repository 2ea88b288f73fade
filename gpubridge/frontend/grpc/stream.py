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
from functools import partial
from typing import NoReturn

from gpubridge.dataplane import RequestRecord, StreamResponses
from gpubridge.engine.models.tracing import Received
from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import ArenaFull, BridgeError
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.frontend.grpc.call import Call, Opening
from gpubridge.frontend.grpc.packing import PIECE, PREFIX, Packing
from gpubridge.frontend.grpc.status import CallFailed, Status, grpc_status
from gpubridge.frontend.grpc.stream_requests import (
    DecoupledRequest,
    DecoupledRequests,
    OrderedRequest,
    QueuedResponse,
    StreamHooks,
)
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

_OF_REQUEST = 2048
"""Bytes of memory of an open request beside its tensors, about."""
_UNSENT_BYTES = 1 << 20
"""Unsent bytes of responses, above which decoupled models send no more."""
_A_TURN = 64
"""Requests of a stream that are taken, or given up, in one turn of the event loop: clients pour in thousands."""
_ERRORS_END = (b"triton_grpc_error", b"true")


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
        self._turns: deque[OrderedRequest] = deque()
        self._flows = DecoupledRequests()
        self._waiting = WaitingMessages()
        # Compressed messages, and messages received after them, in order.
        self._coded: deque[tuple[bytes, bool]] = deque()
        # Responses that workers encode or compress, and responses after them, in order.
        self._outgoing: deque[QueuedResponse] = deque()
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
        record = self._connection.http2.begin_request(self._stream_id, len(message))
        shortage = self._connection.shortage
        if shortage is not None:
            self._waiting.take()
            self._turn_away(lambda: read_request(message).identifier, shortage, record)
            return
        turn = OrderedRequest(record)
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

    def _turn_away(
        self, identifier: Callable[[], str], error: BridgeError, record: RequestRecord | None
    ) -> None:
        """Refuse a request that there is no memory for, at once: what it waits behind may not end."""
        if self._errors_end:
            self.refuse(error)
            return
        frame = error_frame(error.told, _readable(identifier))
        self._send(frame, record, grpc_status(error.code))

    def _feed(self, turn: OrderedRequest, message: bytes, at: int) -> None:
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

    def _read(self, turn: OrderedRequest, known: KnownRequest | BridgeError) -> None:
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
        self, turn: OrderedRequest, make: Callable[[], MadeRequest], identifier: Callable[[], str]
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
        self, turn: OrderedRequest, make: Callable[[], MadeRequest], identifier: Callable[[], str]
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
                self._turn_away(identifier, error, turn.record)
            else:
                self._fail_turn(turn, error, error_frame(error.told, _readable(identifier)))
            return
        add_parameters(request, self._parameters)
        turn.known = known
        turn.request = request
        if turn.record is not None:
            turn.record.note(known.model.statistics, request.identifier)
        if known.model.config.decoupled:
            self._turns.pop()
            flow = DecoupledRequest(known, request, turn.record)
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
        flows, self._flows = self._flows, DecoupledRequests()
        open_ones = [turn.request for turn in turns if turn.frame is None]
        open_ones += [flow.request for flow in flows]
        _cancel_in_turns(filter(None, open_ones))

    # -- responses -------------------------------------------------------------------------------

    def _answer(self, turn: OrderedRequest, outcome: Outcome) -> None:
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

    def _framed(self, turn: OrderedRequest, frame: FrameSegments | BridgeError) -> None:
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

    def _fail_turn(self, turn: OrderedRequest, error: BridgeError, frame: FrameSegments) -> None:
        self._log_failure(error, turn.record)
        if self._errors_end:
            self._send(error, turn.record)
            return
        turn.frame, turn.status = frame, grpc_status(error.code)
        self._send_ready()

    def _log_failure(self, error: BridgeError, record: RequestRecord | None) -> None:
        """Log a request that fails, unless the call does with it, which is logged then."""
        if not self._errors_end:
            self._connection.log_failure(error, 0 if record is None else record.number)

    def _send_ready(self) -> None:
        """Send the responses whose turn it is."""
        turns = self._turns
        while turns and turns[0].frame is not None:
            turn = turns.popleft()
            assert turn.frame is not None
            self._send(turn.frame, turn.record, turn.status)
        self._advance()

    # -- responses of decoupled models -----------------------------------------------------------

    def _on_partial(self, flow: DecoupledRequest) -> Callable[[Outcome], None]:
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
            flow.record,
        )
        return StreamResponses(connection.http2, self._stream_id, flow.request, hooks)

    def _respond(self, flow: DecoupledRequest, outcome: Outcome) -> None:
        """Send a response that is not the last."""
        if self._done:
            return
        self._send_response(flow, outcome, final=False)
        if self._is_read():
            flow.request.passed_on(1)
        else:
            self._leave_unread(flow)

    def _leave_unread(self, flow: DecoupledRequest) -> None:
        """Give the model no credit for a response until the client has read more."""
        flow.unsent += 1
        self._flows.unread[flow] = None

    def _finish_decoupled(self, flow: DecoupledRequest, outcome: Outcome | None) -> None:
        """Send the last response, or an empty final one if the client asked for that."""
        self._flows.discard(flow)
        self._flows.unread.pop(flow, None)
        if self._done:
            return
        if outcome is not None:
            self._send_response(flow, outcome, final=True)
        elif flow.known.empty_final_response:
            frame = final_frame(flow.known.model.name, flow.request.identifier)
            self._send(frame, flow.record, Status.OK)
        elif flow.record is not None:
            flow.record.answer(0, Status.OK)
        self._advance()

    def _send_response(self, flow: DecoupledRequest, outcome: Outcome, *, final: bool) -> None:
        outgoing = QueuedResponse(flow.record, Status.OK if final else None)
        self._outgoing.append(outgoing)

        def framed(frame: FrameSegments | BridgeError) -> None:
            if isinstance(frame, BridgeError) and not self._errors_end:
                self._log_failure(frame, flow.record)
                outgoing.status = grpc_status(frame.code) if final else None
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

    def _send(
        self,
        frame: FrameSegments | BridgeError,
        record: RequestRecord | None,
        status: int | None = None,
    ) -> None:
        """Queue a frame, or the error that ends the stream, after responses that workers encode.

        ``record``: of its request in the access log, which ends with ``status``.
        """
        outgoing = QueuedResponse(record, status)
        self._outgoing.append(outgoing)
        self._fill(outgoing, frame)

    def _fill(self, outgoing: QueuedResponse, frame: FrameSegments | BridgeError) -> None:
        """Set the frame of a queued response, compressed if required."""
        outgoing.frame = frame
        if not isinstance(frame, BridgeError):
            outgoing.nbytes = sum(map(len, frame))
            if self._packing is not None:
                done = partial(self._packed, outgoing)
                outgoing.frame = self._connection.coder.pack(self._packing, frame, done)
        self._send_outgoing()

    def _packed(self, outgoing: QueuedResponse, frame: FrameSegments | BridgeError) -> None:
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
            self._outgoing.popleft().sent(frame)
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
