"""ModelStreamInfer: many requests on one stream, answered in their order.

Requests for decoupled models get any number of responses, each sent when it comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from gpubridge.engine.workers import HEAVY_BYTES
from gpubridge.errors import BridgeError
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.frontend.grpc.call import Call, Opening
from gpubridge.frontend.grpc.packing import PIECE, PREFIX, Packing
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.host_shm import LARGE_BYTES, Body, PrivateBytes
from gpubridge.protocol.grpc.fields import read_request
from gpubridge.protocol.grpc.infer_request import (
    FormCache,
    KnownRequest,
    MadeRequest,
)
from gpubridge.protocol.grpc.infer_response import (
    FrameSegments,
    error_frame,
    failure_frame,
    final_frame,
)
from gpubridge.protocol.grpc.receiver import RequestReceiver, whole_request
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

_OPEN_REQUESTS = 64
"""Requests of a stream that may be at models; further ones are not read."""
_UNSENT_BYTES = 1 << 20
"""Bytes of answers that may wait for a slow reader; beyond that its requests are not read."""
_ERRORS_END = (b"triton_grpc_error", b"true")


@dataclass(slots=True, eq=False)
class _Turn:
    """The place of one answer in the order of its stream."""

    known: KnownRequest | None = None
    request: InferRequest | None = None
    frame: FrameSegments | None = None


@dataclass(slots=True, eq=False)
class _Flow:
    """A request for a decoupled model: its responses go out as they come.

    ``unsent``: responses that the client does not read yet; the model waits when they are many.
    """

    known: KnownRequest
    request: InferRequest
    unsent: int = 0


@dataclass(slots=True, eq=False)
class _Outgoing:
    """An answer on its way: what is sent, None while a worker makes that; an error ends the stream."""

    frame: FrameSegments | BridgeError | None = None
    nbytes: int = 0


class StreamCall(Call):
    """One stream of inference requests.

    An error is an answer like others: the stream goes on, unless its client has asked for the
    opposite.
    """

    def __init__(self, opening: Opening, forms: FormCache, memory: RequestMemory) -> None:
        super().__init__(opening)
        self._forms = forms
        self._memory = memory
        # Whether its client wants an error to end the stream, with its status.
        self._errors_end = _ERRORS_END in opening.headers.fields
        self._turns: deque[_Turn] = deque()
        self._flows: set[_Flow] = set()
        self._waiting: deque[bytes] = deque()
        # Compressed messages, and what came behind such: in their order.
        self._coded: deque[tuple[bytes, bool]] = deque()
        # Answers that workers encode or compress, and what stands behind them.
        self._outgoing: deque[_Outgoing] = deque()
        # Bytes of all messages, and of the one that is on its way; what that and the waiting ones are
        # charged to.
        self._received = self._partial = 0
        self._counted: PrivateBytes | None = None
        # Has part of a long message, which the next ones wait for.
        self._receiver: RequestReceiver | None = None
        self._unread = 0
        self._ended = self._advancing = False
        self._connection.http2.hold(self._stream_id)

    # -- requests --------------------------------------------------------------------------------

    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Take requests."""
        if self._done:
            return
        # Sent early: clients wait for the headers of a stream before they report it as open.
        self._tell()
        self._unread += nbytes
        self._received += nbytes
        self._partial += nbytes - sum(PREFIX + len(message) for message in messages)
        if compressed or self._coded or self._unpacking is not None:
            self._coded.extend([(message, compressed) for message in messages])
        else:
            self._waiting.extend(messages)
        self._ended = self._ended or end
        self._take_coded()

    def _take_coded(self) -> None:
        """Take the messages that wait to be unpacked."""
        try:
            while self._coded and self._unpacking is None:
                message, compressed = self._coded.popleft()
                plain = self._unpack(message, self._unpacked) if compressed else message
                if plain is not None:
                    self._waiting.append(plain)
            self._count()
        except Exception as error:
            self.refuse(error)
            return
        self._advance()

    def _unpacked(self, message: bytes) -> None:
        self._waiting.append(message)
        self._take_coded()

    def _count(self) -> None:
        """Charge the connection for messages that are no requests yet, if they are large."""
        held = self._partial + sum(map(len, self._waiting))
        held += sum(len(message) for message, _ in self._coded)
        if held <= LARGE_BYTES:
            self._release()
            return
        if self._counted is None:
            body = Body(self._memory.arenas.budget, self._connection.account, self.refuse)
            self._counted = PrivateBytes(body)
        self._counted.count(held)

    def _release(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            counted.close()

    def check(self, now: float, window: float) -> None:
        """Fail if a large message comes too slowly."""
        large = self._counted if self._partial > LARGE_BYTES else None
        self._check_rate(now, window, large, self._received, self._partial)

    def writable(self) -> None:
        """The client has caught up."""
        # With what is being compressed, there may still be much that it does not have.
        for flow in self._flows if self._is_read() else ():
            unsent, flow.unsent = flow.unsent, 0
            if unsent:
                flow.request.passed_on(unsent)
        self._advance()

    def _advance(self) -> None:
        """Submit what waits, while there is room for its answers; end the call when all is done."""
        if self._advancing:
            # An answer at once, to what is being submitted: no call within a call for each of them.
            return
        self._advancing = True
        while self._waiting and not self._done and self._has_room() and self._receiver is None:
            self._begin(self._waiting.popleft())
        self._advancing = False
        if self._done:
            return
        if self._counted is not None:
            self._count()
        taken = not (self._waiting or self._coded or self._unpacking or self._receiver)
        if taken and self._unread and self._has_room():
            unread, self._unread = self._unread, 0
            self._connection.http2.consume(self._stream_id, unread)
        if self._ended and taken and not (self._turns or self._flows or self._outgoing):
            self._succeed()

    def _has_room(self) -> bool:
        return len(self._turns) + len(self._flows) < _OPEN_REQUESTS and self._is_read()

    def _is_read(self) -> bool:
        """Return whether the client reads fast enough to get more."""
        unsent = self._connection.http2.queued(self._stream_id)
        unsent += sum(outgoing.nbytes for outgoing in self._outgoing)
        return unsent < _UNSENT_BYTES

    def _begin(self, message: bytes) -> None:
        turn = _Turn()
        self._turns.append(turn)
        answer = partial(self._answer, turn)
        if len(message) > HEAVY_BYTES:
            account = self._connection.account
            self._receiver = self._memory.receiver(len(message), account, self.refuse)
            self._feed(turn, message, 0)
        else:
            make = partial(whole_request, message, self._forms, answer)
            self._submit(turn, make, lambda: read_request(message).identifier)

    def _feed(self, turn: _Turn, message: bytes, at: int) -> None:
        """Copy a long message into shared memory, a piece in each turn of the event loop."""
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

    def _read(self, turn: _Turn, known: KnownRequest | BridgeError) -> None:
        """Make the request whose message a worker has read."""
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
        self, turn: _Turn, make: Callable[[], MadeRequest], identifier: Callable[[], str]
    ) -> None:
        """Make the request of a long message, then take the next one."""
        receiver, self._receiver = self._receiver, None
        if not self._done:
            self._submit(turn, make, identifier)
        if receiver is not None:
            receiver.close()
        self._advance()

    def _submit(
        self, turn: _Turn, make: Callable[[], MadeRequest], identifier: Callable[[], str]
    ) -> None:
        try:
            known, request, regions = make()
            if regions is not None:
                self._memory.share(request, regions, known.model.config.name)
        except Exception as failed:
            error = request_error(failed)
            self._fail_turn(turn, error, error_frame(error.message, _readable(identifier)))
            return
        add_parameters(request, self._parameters)
        turn.known = known
        turn.request = request
        if known.model.config.decoupled:
            self._turns.pop()
            flow = _Flow(known, request)
            self._flows.add(flow)
            request.on_partial = partial(self._respond, flow)
            request.on_done = partial(self._finish_flow, flow)
        known.model.submit(request)

    def drain(self) -> None:
        """Read no further requests."""
        self._ended = True
        self._advance()

    def pack(self, packing: Packing) -> None:
        """Compress the answer."""
        self._packing = packing

    def abort(self) -> None:
        """Tell the models that nobody waits."""
        self._give_up()
        super().abort()

    def _give_up(self) -> None:
        self._waiting.clear()
        self._coded.clear()
        self._outgoing.clear()
        self._release()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        turns, self._turns = self._turns, deque()
        flows, self._flows = self._flows, set()
        for turn in turns:
            if turn.request is not None and turn.frame is None:
                turn.request.cancel()
        for flow in flows:
            flow.request.cancel()

    # -- answers ---------------------------------------------------------------------------------

    def _answer(self, turn: _Turn, outcome: Outcome) -> None:
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

    def _framed(self, turn: _Turn, frame: FrameSegments | BridgeError) -> None:
        """Send an answer that is encoded, when its turn comes."""
        if self._done:
            return
        if isinstance(frame, BridgeError):
            assert turn.known is not None
            assert turn.request is not None
            self._fail_turn(turn, frame, _failure(turn.known, turn.request, frame, final=True))
            return
        turn.frame = frame
        self._send_ready()

    def _fail_turn(self, turn: _Turn, error: BridgeError, frame: FrameSegments) -> None:
        if self._errors_end:
            self._send(error)
            return
        turn.frame = frame
        self._send_ready()

    def _send_ready(self) -> None:
        """Send the answers whose turn it is."""
        turns = self._turns
        while turns and turns[0].frame is not None:
            frame = turns.popleft().frame
            assert frame is not None
            self._send(frame)
        self._advance()

    # -- responses of decoupled models -----------------------------------------------------------

    def _respond(self, flow: _Flow, outcome: Outcome) -> None:
        """Send a response, after which others may come."""
        if self._done:
            return
        self._send_response(flow, outcome, final=False)
        if self._is_read():
            flow.request.passed_on(1)
        else:
            flow.unsent += 1

    def _finish_flow(self, flow: _Flow, outcome: Outcome | None) -> None:
        """Send the last response, or that there is none any more if the client wants to know."""
        self._flows.discard(flow)
        if self._done:
            return
        if outcome is not None:
            self._send_response(flow, outcome, final=True)
        elif flow.known.empty_final_response:
            self._send(final_frame(flow.known.model.name, flow.request.identifier))
        self._advance()

    def _send_response(self, flow: _Flow, outcome: Outcome, *, final: bool) -> None:
        outgoing = _Outgoing()
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
        """Send an answer, or the error that ends the stream, behind those that workers make."""
        outgoing = _Outgoing()
        self._outgoing.append(outgoing)
        self._fill(outgoing, frame)

    def _fill(self, outgoing: _Outgoing, frame: FrameSegments | BridgeError) -> None:
        """Send an answer in its place, compressed if it has to be."""
        outgoing.frame = frame
        if not isinstance(frame, BridgeError):
            outgoing.nbytes = sum(map(len, frame))
            if self._packing is not None:
                done = partial(self._packed, outgoing)
                outgoing.frame = self._connection.coder.pack(self._packing, frame, done)
        self._send_outgoing()

    def _packed(self, outgoing: _Outgoing, frame: FrameSegments | BridgeError) -> None:
        """Send an answer that a worker has compressed, when its turn comes."""
        outgoing.frame = frame
        if self._done:
            return
        self._send_outgoing()
        self._caught_up()

    def _caught_up(self) -> None:
        """Go on when a worker has made an answer."""
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


def _failure(
    known: KnownRequest, request: InferRequest, error: BridgeError, *, final: bool
) -> FrameSegments:
    """Encode an error that is the answer of a model, or one of its answers."""
    return failure_frame(error, known.model.name, request.identifier, final=final)


def _fail(error: Exception) -> NoReturn:
    raise error


def _readable(identifier: Callable[[], str]) -> str:
    """Return the id of a request that is wrong, as far as it can be read."""
    try:
        return identifier()
    except BridgeError:
        return ""
