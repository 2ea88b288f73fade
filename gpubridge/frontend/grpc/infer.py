"""ModelInfer: receives messages into shared memory, submits requests, sends responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from gpubridge.dataplane import (
    GrpcInferEndpoint,
    MessageResponseTemplate,
    TraceSampling,
)
from gpubridge.engine.models.tracing import Received
from gpubridge.errors import BridgeError, unsupported
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.frontend.grpc.call import Opening, SingleMessageCall
from gpubridge.frontend.grpc.packing import PIECE, MessageCoder, Packing
from gpubridge.frontend.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallFailed,
    Status,
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
from gpubridge.transport.signatures import Signature

__all__ = ["InferCall", "InferEndpoint"]


class InferEndpoint(GrpcInferEndpoint):
    """ModelInfer calls that the compiled module handles without an `InferCall`.

    - ``method``: the index of ModelInfer among the methods.
    - ``sampling``: the calls that are left to Python.
    """

    def __init__(
        self,
        method: int,
        forms: FormCache,
        memory: RequestMemory,
        sampling: TraceSampling,
        coder: MessageCoder,
    ) -> None:
        super().__init__(method, forms.templates, sampling, RESPONSE_HEADERS, OK_TRAILERS)
        self._memory = memory
        # Encodes outcomes that `plain_template` does not cover.
        self.frame = coder.frame

    def share(self, request: InferRequest, regions: RequestRegions, known: KnownRequest) -> None:
        """Resolve a request's regions of client memory; see `RequestMemory.share`."""
        with known.model.statistics.refusing(request.identifier):
            self._memory.share(request, regions, known.model.config.name)

    def receive(
        self, nbytes: int, account: Account, refuse: Callable[[BridgeError], None]
    ) -> RequestReceiver:
        """Begin to receive a large message, charged to a connection's account.

        ``refuse``: called with an error if the memory is needed elsewhere.
        """
        return self._memory.receiver(nbytes, account, refuse)

    @staticmethod
    def decoupled(known: KnownRequest) -> BridgeError:
        """Return the error of a request for a decoupled model, which counts it."""
        error = unsupported(
            "ModelInfer RPC doesn't support models with decoupled transaction policy"
        )
        known.model.statistics.refused(error)
        return error

    @staticmethod
    def plain_template(known: KnownRequest, signature: Signature) -> MessageResponseTemplate | None:
        """Return the template of responses without formatted outputs, if they are such."""
        return plain_template(known.form, known.model.config, known.model.version, signature)


class InferCall(SingleMessageCall):
    """One inference call; owns the memory of its request until that is submitted."""

    def __init__(self, opening: Opening, forms: FormCache, memory: RequestMemory) -> None:
        super().__init__(opening)
        self._forms = forms
        self._memory = memory
        self._began = time.monotonic_ns()
        # Receives a large message in pieces.
        self._receiver: RequestReceiver | None = None
        self._request: InferRequest | None = None
        self._known: KnownRequest | None = None

    def complete(self, message: bytes | memoryview, compressed: bool) -> None:
        """Handle a small or compressed message: its inputs are copied into shared memory."""
        if compressed:
            self._complete_packed(message)
            return
        if len(message) > LARGE_BYTES:
            self.large(len(message), False)
            self._feed(memoryview(message))
            return
        assert isinstance(message, bytes)
        try:
            self._submit(whole_request(message, self._forms, self._respond))
        except Exception as error:
            self.fail(error)

    def large(self, nbytes: int, compressed: bool) -> None:
        """Begin to receive a large message."""
        if compressed:
            super().large(nbytes, compressed)
            return
        self._receiver = self._memory.receiver(nbytes, self._connection.account, self.refuse)

    def resume(self, receiver: RequestReceiver, end: bool) -> None:
        """Take over the received part of a large message; ``end``: the request has ended."""
        self._receiver = receiver
        receiver.set_refuse(self.refuse)
        self._receive(None, end)

    def data(self, view: memoryview, end: bool) -> None:
        """Receive part of the large message, and name the memory for the next part."""
        if self._receiver is None:
            super().data(view, end)
        else:
            self._receive(lambda receiver: receiver.feed(view), end)

    def filled(self, end: bool) -> None:
        """Continue after a tensor has been received into its memory."""
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
        """Receive a decompressed large message, one piece in each turn of the event loop."""
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

    def _message_bytes(self) -> int:
        if self._receiver is None:
            return super()._message_bytes()
        return self._receiver.arrived(self._connection.http2.missing(self._stream_id))

    def pack(self, packing: Packing) -> None:
        """Compress the response."""
        self._packing = packing

    def abort(self) -> None:
        """Free the memory, or cancel the submitted request."""
        self._abandon()
        super().abort()

    # -- the request -----------------------------------------------------------------------------

    def _end(self, receiver: RequestReceiver, end: bool) -> None:
        """Make the request if its message is complete, which ``end`` requires."""
        if not receiver.complete:
            if end:
                raise CallFailed(Status.INTERNAL, "the request ends in the middle of its message")
            return
        if self._reading is not None:
            return
        self._whole = True
        receiver.copied += self._connection.http2.copied(self._stream_id)
        if receiver.takes_long:
            self._reading = self._connection.coder.read(receiver, self._forms, self._read)
        else:
            self._make(receiver, partial(receiver.request, self._forms, self._respond))

    def _read(self, known: KnownRequest | BridgeError) -> None:
        """Make the request from a message that a worker has parsed."""
        receiver, self._reading = self._receiver, None
        if receiver is None:
            return
        try:
            if isinstance(known, BridgeError):
                raise known
            self._make(receiver, partial(receiver.make, known, self._respond))
        except Exception as error:
            self.refuse(error)

    def _make(self, receiver: RequestReceiver, make: Callable[[], MadeRequest]) -> None:
        self._receiver = None
        try:
            made = make()
        finally:
            receiver.close()
        self._drop_message()
        self._submit(made)

    def _submit(self, made: MadeRequest) -> None:
        known, request, regions = made
        submit = known.submit
        if submit is None:
            if request.slot is not None:
                known.arena.free(request.slot)
            raise InferEndpoint.decoupled(known)
        if regions is not None:
            with known.model.statistics.refusing(request.identifier):
                self._memory.share(request, regions, known.model.config.name)
        add_parameters(request, self._parameters)
        self._known = known
        self._request = request
        self._connection.http2.note(self._stream_id, known.model.statistics, request.identifier)
        submit(request, Received("GRPC", self._began, time.monotonic_ns(), self._context))

    def _drop_message(self) -> None:
        super()._drop_message()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _abandon(self) -> None:
        self._drop_message()
        if self._request is not None and not self._done:
            self._request.cancel()

    # -- the response ----------------------------------------------------------------------------

    def _respond(self, outcome: Outcome) -> None:
        """Send the outcome of the request."""
        if self._done:
            return
        known, coder = self._known, self._connection.coder
        if not isinstance(outcome, InferResponse) or known is None:
            assert isinstance(outcome, BridgeError)
            self.fail(outcome)
            return
        assert self._request is not None
        try:
            frame = coder.frame(known, self._request.identifier, outcome, self._send_frame)
        except Exception as error:
            self.fail(error)
            return
        if frame is not None:
            self._send_frame(frame)

    def _send_frame(self, frame: FrameSegments | BridgeError) -> None:
        """Send an encoded response, compressed if the client wants that."""
        packed: FrameSegments | BridgeError | None = frame
        if self._packing is not None and not self._done and not isinstance(frame, BridgeError):
            packed = self._connection.coder.pack(self._packing, frame, self._packed)
        if packed is not None:
            self._packed(packed)

    def _packed(self, frame: FrameSegments | BridgeError) -> None:
        """Send a frame that is ready, or the error that prevented it."""
        if self._done:
            return
        if isinstance(frame, BridgeError):
            self.fail(frame)
        else:
            self._send_whole_response(frame)
