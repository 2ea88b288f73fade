"""BLS calls of child processes that a model forks: the stub, their parent, makes them.

A child has neither the stub's channels nor shared memory. Each of its calls has its own channel to
the parent; tensors are copied both ways.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
)
from gpubridge.pb_utils.request import MemoryType
from gpubridge.pb_utils.trace import InferenceTrace
from gpubridge.stub.bls.records import error_code
from gpubridge.stub.bls.scope import BATCH
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    DescriptorsLost,
    MalformedMessage,
    pair,
)
from gpubridge.transport.messages import control_message, decode_control

if TYPE_CHECKING:
    import asyncio

    from gpubridge.pb_utils.host import LoopWaiter

_ON_HOST = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_NEW_CALL = bytes((CallKind.CALL,))
_FOREIGN = (
    "expected the process that made this call, got a child that it forked; take its responses in the "
    "process that made it"
)


class ForkedCalls:
    """Forwards a child's calls to the parent; in the parent, makes them."""

    def __init__(self) -> None:
        self._parent: Channel | None = None
        self._children: Channel | None = None
        self._serving = False

    # -- around a fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Create the channel that the parent shares with all children."""
        if self._parent is None:
            ours, theirs = pair()
            self._children, self._parent = Channel(ours), Channel(theirs)

    def after_in_parent(self) -> None:
        """Serve the children from now on."""
        if not self._serving and self._children is not None:
            threading.Thread(target=self._serve, name="gpubridge-forked", daemon=True).start()
            self._serving = True

    def after_in_child(self) -> None:
        """Close the parent's end of the channel."""
        if self._children is not None:
            self._children.close()
        # A grandchild uses the same parent.
        self._serving = True

    # -- in a child --------------------------------------------------------------------------------

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Send a request to another model, and wait; raises ChannelClosed when the parent is gone."""
        response = self.call(request, False).next()
        assert response is not None
        return response

    def call(
        self,
        request: InferenceRequest,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,  # noqa: ARG002  (sent at once)
    ) -> ForkedCall:
        """Send a request to another model; raises ChannelClosed when the parent is gone."""
        if self._parent is None:
            # There were no descriptors when it was forked.
            raise ChannelClosed
        mine, parents = pair()
        call = ForkedCall(Channel(mine))
        try:
            with parents:
                self._parent.send(_NEW_CALL, (parents.fileno(),))
            call.send(request, decoupled)
        except BaseException:
            call.abandon()
            raise
        return call

    # -- in the parent -----------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._children is not None
        while True:
            try:
                _, fds = self._children.receive()
            except (DescriptorsLost, MalformedMessage):
                # There are no descriptors for it: the child finds its channel closed.
                continue
            for fd in fds:
                channel = Channel(socket.socket(fileno=fd))
                try:
                    threading.Thread(target=_serve_call, args=(channel,), daemon=True).start()
                except RuntimeError:
                    # The system allows no more threads now: the child finds its channel closed.
                    channel.close()


class ForkedCall:
    """One call of a child; the source of its responses. It is no call of that child's own children."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._ended = False
        # Waiters by the loop that watches the channel for them.
        self._waiting: dict[asyncio.AbstractEventLoop, list[LoopWaiter]] = {}

    def send(self, request: InferenceRequest, decoupled: bool) -> None:
        """Send the request of the call; raises ChannelClosed when the parent is gone."""
        _send_tensors(
            self._channel,
            request._inputs,
            decoupled=decoupled,
            batch=BATCH.get(),
            request_id=request._request_id,
            correlation_id=request._correlation_id,
            requested_output_names=list(request._requested_output_names),
            model_name=request._model_name,
            model_version=request._model_version,
            flags=request._flags,
            timeout=request._timeout,
            trace=request._trace._identifier,
            parameters=request._parameters,
        )

    @property
    def ready(self) -> bool:
        """Return whether :meth:`next` need not wait."""
        return self._ended or self._is_foreign or self._channel.wait(0)

    def wait(self) -> None:
        """Wait until it is ready."""
        if not self.ready:
            self._channel.wait(None)

    @property
    def _is_foreign(self) -> bool:
        return os.getpid() != self._process

    def abandon(self) -> None:
        """Close the channel: the parent cancels the call."""
        if not self._ended and not self._is_foreign:
            with contextlib.suppress(OSError):
                # Children of this process may have the channel, too.
                self._channel.socket.shutdown(socket.SHUT_RDWR)
        self._ended = True
        self._close()

    __del__ = abandon

    def next(self) -> InferenceResponse | None:
        """Wait for the next response; None when there are no more."""
        if self._ended:
            return None
        if self._is_foreign:
            raise ChannelClosed(_FOREIGN)
        fields, tensors = _receive_tensors(self._channel)
        if "ended" in fields:
            self._ended = True
            self._close()
            return None
        if "error" in fields:
            return InferenceResponse([], TritonError(fields["error"], error_code(fields["code"])))
        return InferenceResponse._received(tensors, fields["parameters"])

    def add_waiter(self, waiter: LoopWaiter) -> None:
        """Wake a waiter of the running event loop whenever something comes."""
        if self._ended or self._is_foreign:
            return
        loop = waiter.get_loop()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            loop.add_reader(self._channel.fileno(), _wake_all, waiting)

    def remove_waiter(self, waiter: LoopWaiter) -> None:
        """Wake it no longer; on its loop."""
        loop = waiter.get_loop()
        waiting = self._waiting.get(loop, [])
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                loop.remove_reader(self._channel.fileno())
                del self._waiting[loop]
                if self._ended:
                    self._close()

    def _close(self) -> None:
        # While a loop watches it, it stays open: its number may be another call's next.
        if not self._waiting:
            self._channel.close()

    def cancel(self) -> None:
        """Ask the called model to stop; responses that it still sends are received as usual."""
        if not self._ended and not self._is_foreign:
            self._channel.send(control_message(CallKind.CANCEL))


def _wake_all(waiting: Sequence[LoopWaiter]) -> None:
    for waiter in tuple(waiting):
        waiter.set()


def _serve_call(channel: Channel) -> None:
    """Make a call for a child, and send it the responses."""
    readers: list[threading.Thread] = []
    try:
        fields, tensors = _receive_tensors(channel)
        try:
            _forward(channel, fields, tensors, readers)
        except (BridgeError, TritonModelException, RuntimeError) as error:
            # RuntimeError: the system allows no more threads now.
            code = error.code if isinstance(error, BridgeError) else ErrorCode.INTERNAL
            channel.send(control_message(CallKind.ANSWER, error=str(error), code=int(code)))
        channel.send(control_message(CallKind.ANSWER, ended=True))
    except ChannelClosed:
        # The child is gone, or wants no more responses.
        pass
    finally:
        with contextlib.suppress(OSError):
            # Ends the thread that waits for the child, which may read on.
            channel.socket.shutdown(socket.SHUT_RDWR)
        for reader in readers:
            # The number of a descriptor is the next call's, whose messages it would read.
            reader.join()
        channel.close()


def _forward(
    channel: Channel, fields: dict[str, Any], tensors: list[Tensor], readers: list[threading.Thread]
) -> None:
    """Make a call, and send its responses; ``readers`` gets the thread that reads on meanwhile."""
    decoupled = fields.pop("decoupled")
    # Cancelled with the requests for which the child was working.
    BATCH.set(fields.pop("batch"))
    fields.pop("tensors")
    fields["trace"] = InferenceTrace._of(fields["trace"])
    fields["parameters"] = json.loads(fields["parameters"])
    request = InferenceRequest(inputs=tensors, preferred_memory=_ON_HOST, **fields)
    source = request._caller().call(request, decoupled)
    reader = threading.Thread(target=_cancel_on_request, args=(channel, source), daemon=True)
    reader.start()
    readers.append(reader)
    while (response := source.next()) is not None:
        error = response._error
        if error is not None:
            text, code = error.message(), int(error.code())
            channel.send(control_message(CallKind.ANSWER, error=text, code=code))
        else:
            _send_tensors(channel, response._tensors, parameters=response._parameters)


def _cancel_on_request(channel: Channel, source: Any) -> None:
    """Cancel a call when its child asks for that, or lets go of it."""
    try:
        while True:
            channel.receive()
            source.cancel()
    except ChannelClosed:
        # The call has ended, or nobody takes its responses.
        source.abandon()


def _send_tensors(channel: Channel, tensors: Sequence[Tensor], **fields: Any) -> None:
    """Send a message of the fields, and one message for the data of each tensor."""
    forms = [(tensor._name, tensor._datatype, tensor._shape) for tensor in tensors]
    channel.send(control_message(CallKind.CALL, tensors=forms, **fields))
    for tensor in tensors:
        payload: Any = tensor._payload()
        data = memoryview(payload).cast("B") if payload.nbytes else b""
        channel.send(b"".join((_NEW_CALL, data)))


def _receive_tensors(channel: Channel) -> tuple[dict[str, Any], list[Tensor]]:
    fields = decode_control(channel.receive()[0])
    tensors = []
    for name, datatype, shape in fields.get("tensors", ()):
        data = bytearray(memoryview(channel.receive()[0])[1:])
        tensors.append(Tensor._received(name, datatype, tuple(shape), memoryview(data)))
    return fields, tensors
