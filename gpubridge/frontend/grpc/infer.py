"""ModelInfer: a message into shared memory, a request to the model, its answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from gpubridge.dataplane import (
    GrpcInferEndpoint,
    HeaderFields,
    MessageResponseTemplate,
)
from gpubridge.engine.tracing import Received
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.forwarded_headers import ForwardedHeaders, add_parameters
from gpubridge.frontend.grpc.call import LargeMessageCall, Opening
from gpubridge.frontend.grpc.packing import PIECE, MessageCoder, Packing
from gpubridge.frontend.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallFailed,
    Status,
    failure,
)
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.host_shm import LARGE_BYTES, Account
from gpubridge.protocol.grpc.infer_request import (
    FormCache,
    KnownRequest,
    MadeRequest,
)
from gpubridge.protocol.grpc.infer_response import FrameSegments, plain_template
from gpubridge.protocol.grpc.receiver import RequestReceiver, whole_request
from gpubridge.protocol.request_form import RequestRegions
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.traces import Traces
from gpubridge.transport.signatures import Signature

__all__ = ["InferCall", "InferEndpoint"]


class InferEndpoint(GrpcInferEndpoint):
    """State shared by plain calls, which the compiled module takes without an `InferCall`.

    - ``method``: the number of ModelInfer among the methods.
    - ``traces``: while they are active, the compiled module takes none.
    """

    def __init__(
        self,
        method: int,
        forms: FormCache,
        memory: RequestMemory,
        traces: Traces | ForwardedHeaders,
        coder: MessageCoder,
    ) -> None:
        super().__init__(method, forms.templates, traces, RESPONSE_HEADERS, OK_TRAILERS)
        self._memory = memory
        # Encodes outcomes that `plain_template` is not for.
        self.frame = coder.frame

    def share(self, request: InferRequest, regions: RequestRegions, known: KnownRequest) -> None:
        """Give a request its places in the client's memory; see `RequestMemory.share`."""
        self._memory.share(request, regions, known.model.config.name)

    def receive(
        self, nbytes: int, account: Account, refuse: Callable[[BridgeError], None]
    ) -> RequestReceiver:
        """Begin to receive a large message, charged to a connection's account.

        ``refuse``: gets the error that answers it when its memory is needed elsewhere.
        """
        return self._memory.receiver(nbytes, account, refuse)

    @staticmethod
    def decoupled() -> BridgeError:
        """Return the error of a request for a model that any number of responses may come from."""
        return BridgeError(
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
            ErrorCode.UNSUPPORTED,
        )

    @staticmethod
    def plain_template(known: KnownRequest, signature: Signature) -> MessageResponseTemplate | None:
        """Return the template of answers of which nothing has to be formatted."""
        return plain_template(known.form, signature, known.model.config, known.model.version)

    @staticmethod
    def failure(error: Exception) -> HeaderFields:
        """Return the fields that end a call with an error."""
        return failure(error, begun=False)


class InferCall(LargeMessageCall):
    """One inference request; owns its memory until the model takes it over."""

    def __init__(self, opening: Opening, forms: FormCache, memory: RequestMemory) -> None:
        super().__init__(opening)
        self._forms = forms
        self._memory = memory
        self._began = time.monotonic_ns()
        # Takes a large message, which comes in pieces.
        self._receiver: RequestReceiver | None = None
        self._request: InferRequest | None = None
        self._known: KnownRequest | None = None

    def complete(self, message: bytes, compressed: bool) -> None:
        """Take a small message, or a compressed one: its inputs are copied into shared memory."""
        if compressed:
            self._complete_packed(message)
            return
        if len(message) > LARGE_BYTES:
            self.large(len(message))
            self._feed(memoryview(message))
            return
        try:
            self._hand_over(whole_request(message, self._forms, self._answer))
        except Exception as error:
            self.fail(error)

    def large(self, nbytes: int) -> None:
        """Begin to receive a large message."""
        self._receiver = self._memory.receiver(nbytes, self._connection.account, self.refuse)

    def go_on(self, receiver: RequestReceiver, end: bool) -> None:
        """Take over what has come of a large message; with ``end`` no more comes."""
        self._receiver = receiver
        receiver.body.lead_to(self.refuse)
        self._receive(None, end)

    def data(self, view: memoryview, end: bool) -> None:
        """Take part of the large message, and say where the next part belongs."""
        self._receive(lambda receiver: receiver.feed(view), end)

    def filled(self, end: bool) -> None:
        """A tensor has been received."""
        self._receive(RequestReceiver.filled, end)

    def _receive(self, take: Callable[[RequestReceiver], None] | None, end: bool) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        try:
            if take is not None:
                take(receiver)
                if receiver.target is not None:
                    self._connection.http2.receive_into(self._stream_id, receiver.target)
            self._end(receiver, end)
        except Exception as error:
            self.refuse(error)

    def _feed(self, message: memoryview) -> None:
        """Take a large message that was compressed, a piece in each turn of the event loop."""
        receiver = self._receiver
        if receiver is None:
            return
        try:
            receiver.feed(message[:PIECE])
            if len(message) > PIECE:
                asyncio.get_running_loop().call_soon(self._feed, message[PIECE:])
            else:
                self._end(receiver, True)
        except Exception as error:
            self.refuse(error)

    def check(self, now: float, window: float) -> None:
        """Fail if a message comes too slowly that holds memory already."""
        receiver = self._receiver
        if receiver is not None and self._reading is None:
            arrived = receiver.arrived(self._connection.http2.missing(self._stream_id))
            self._check_rate(now, window, receiver, arrived, arrived)

    def pack(self, packing: Packing) -> None:
        """Compress the answer."""
        self._packing = packing

    def abort(self) -> None:
        """Give the memory back, or tell the model that nobody waits."""
        self._give_up()
        super().abort()

    # -- the message -----------------------------------------------------------------------------

    def _end(self, receiver: RequestReceiver, end: bool) -> None:
        """Make the request if its message is complete; with ``end`` it has to be."""
        if not receiver.complete:
            if end:
                raise CallFailed(Status.INTERNAL, "the request ends in the middle of its message")
            return
        if self._reading is not None:
            return
        receiver.copied += self._connection.http2.copied(self._stream_id)
        if receiver.takes_long:
            self._reading = self._connection.coder.read(receiver, self._forms, self._read)
        else:
            self._make(receiver, partial(receiver.request, self._forms, self._answer))

    def _read(self, known: KnownRequest | BridgeError) -> None:
        """Make the request whose message a worker has read."""
        receiver, self._reading = self._receiver, None
        if receiver is None:
            return
        try:
            if isinstance(known, BridgeError):
                raise known
            self._make(receiver, partial(receiver.make, known, self._answer))
        except Exception as error:
            self.refuse(error)

    def _make(self, receiver: RequestReceiver, make: Callable[[], MadeRequest]) -> None:
        self._receiver = None
        try:
            made = make()
        finally:
            receiver.close()
        self._hand_over(made)

    def _hand_over(self, made: MadeRequest) -> None:
        known, request, regions = made
        submit = known.submit
        if submit is None:
            if request.slot is not None:
                known.arena.free(request.slot)
            raise InferEndpoint.decoupled()
        if regions is not None:
            self._memory.share(request, regions, known.model.config.name)
        add_parameters(request, self._parameters)
        self._known = known
        self._request = request
        submit(request, Received("GRPC", self._began, time.monotonic_ns()))

    def _give_up(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self._request is not None and not self._done:
            self._request.cancel()

    # -- the answer ------------------------------------------------------------------------------

    def _answer(self, outcome: Outcome) -> None:
        """Send what the model answered."""
        if self._done:
            return
        known, coder = self._known, self._connection.coder
        if not isinstance(outcome, InferResponse) or known is None:
            assert isinstance(outcome, BridgeError)
            self.fail(outcome)
            return
        assert self._request is not None
        try:
            frame = coder.frame(known, self._request.identifier, outcome, self._framed)
        except Exception as error:
            self.fail(error)
            return
        if frame is not None:
            self._framed(frame)

    def _framed(self, frame: FrameSegments | BridgeError) -> None:
        """Send an answer that is encoded."""
        packed: FrameSegments | BridgeError | None = frame
        if self._packing is not None and not self._done and not isinstance(frame, BridgeError):
            packed = self._connection.coder.pack(self._packing, frame, self._packed)
        if packed is not None:
            self._packed(packed)

    def _packed(self, frame: FrameSegments | BridgeError) -> None:
        """Send an answer as it is sent."""
        if self._done:
            return
        if isinstance(frame, BridgeError):
            self.fail(frame)
        else:
            self._answer_all(frame)
