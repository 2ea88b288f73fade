"""Receives a stub's messages, and executes the batches among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor
from gpubridge.pb_utils.trace import InferenceTrace
from gpubridge.stub.executor import Executor
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.stub.results import ResultSender
from gpubridge.stub.signal_handlers import SignalHandlers
from gpubridge.stub.uploading import BatchesAhead
from gpubridge.tensor.native import NativeStubLoop, native
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import Batch, comes_alone, decode_execute
from gpubridge.transport.records import RecordReader, record_reader
from gpubridge.transport.signatures import parse_signature
from gpubridge.transport.wait_predictor import wait_predictor

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice

_AWAKE_SHARE = 4
"""A stub polls for this fraction of the server's time, since the client needs a processor, too; for
twice as long where another model sent the request, which works before it sends the next one.
"""


class BatchRunner:
    """Receives the server's messages, and executes batches; polls for the next one after a batch.

    - ``awake_ns``: how long the server polls.

    Attributes: ``results`` sends results; ``waits`` predicts the wait for the next request; ``signals``
    holds signals back between batches.
    """

    def __init__(
        self, channel: Channel, control: ControlPage, outputs: OutputMemory, awake_ns: int
    ) -> None:
        self._channel = channel
        self._control = control
        self._outputs = outputs
        self._reader = record_reader(RequestContext)
        # Source of messages, and decoder of those with batches.
        self._incoming: Channel | BatchesAhead = channel
        self._decode: Callable[[bytes, RecordReader], list[Batch]] = decode_execute
        self.results = ResultSender(channel, control)
        self.signals = SignalHandlers()
        self._awake_ns = awake_ns // _AWAKE_SHARE
        self.waits = wait_predictor(_AWAKE_SHARE * self._awake_ns)
        self._wait_ns = 0
        self._executor: Executor | None = None
        self._loop: NativeStubLoop | None = None

    def look_ahead(self, take_region: Callable[[bytes, list[int]], None]) -> BatchesAhead:
        """Receive through `BatchesAhead` from now on."""
        self._incoming = ahead = BatchesAhead(self._channel, self._reader, take_region)
        self._decode = ahead.batches
        return ahead

    def serve(
        self, executor: Executor, borrowed: BorrowedMemory, device: StubDevice | None
    ) -> None:
        """Execute batches with ``executor``; by the compiled loop, if they are plain.

        There is no such loop without the compiled module, and where inputs are copied to the GPU
        ahead of their batch.
        """
        self._executor = executor
        compiled = native()
        if compiled is None or self._incoming is not self._channel:
            return
        self._loop = loop = compiled.StubLoop(
            self._channel,
            executor,
            self._outputs.pool,
            self._control,
            self.waits,
            borrowed.book,
            (Tensor, InferenceRequest, InferenceResponse, InferenceTrace._of),
            (self._reader, parse_signature, executor.identity.check, decode_execute, Batch),
            self._awake_ns,
            LIMITS,
        )
        executor.use(loop)
        if device is not None:
            loop.wake_by(device.waker.descriptor)
            device.on_use(loop.use_device)

    def receive(
        self, device: StubDevice | None, report_loss: Callable[[str], None]
    ) -> tuple[bytes, list[int]]:
        """Return the next message that the compiled loop does not handle; an empty one if the GPU is lost."""
        channel, loop = self._incoming, self._loop
        while True:
            if self._wait_ns:
                channel.poll(self._wait_ns, self.waits)
            lost = None if device is None else device.reclaim_until(channel.wait)
            if lost is not None:
                report_loss(lost.message)
                return b"", []
            if loop is None:
                return channel.receive()
            try:
                message, fds = loop.next_message()
            except OSError as error:
                if error.errno is None:
                    # Not the channel's.
                    raise
                raise ChannelClosed from error
            if message:
                return message, fds

    def run(self, message: bytes) -> None:
        """Execute the batches of a message, and decide for how long to stay awake for the next."""
        waits = self.waits
        waits.end(time.monotonic_ns())
        waits.alone = comes_alone(message)
        executor = self._executor
        assert executor is not None
        batches = self._decode(message, self._reader)
        last = len(batches) - 1
        for i, batch in enumerate(batches):
            result = executor.run(batch)
            lost = executor.has_lost_device
            self.results.add(result, self._control.started_at, executor.ended_at, lost or i == last)
            if lost:
                # The server sends the remaining batches to another stub.
                break
        # After sending: the server waits for the results.
        self._outputs.reclaim()
        if not waits.begin(time.monotonic_ns()):
            self._wait_ns = 0
            return
        called = any(each.context.outputs_for for batch in batches for each in batch.records)
        self._wait_ns = 2 * self._awake_ns if called else self._awake_ns

    def note_cancelled(self, ticket: int) -> None:
        """Tell the coroutine of a request that is cancelled, if it wants to know."""
        if self._executor is not None:
            self._executor.note_cancelled(ticket)

    def cancel(self, seconds: float) -> None:
        """Cancel the coroutines of requests, and wait for them, at most for a time."""
        if self._executor is not None:
            self._executor.coroutines.cancel(seconds)

    def close(self, seconds: float) -> None:
        """Cancel all tasks of the model's event loop, and end the executor's threads within a time."""
        if self._executor is not None:
            self._executor.coroutines.close(seconds)

    def drop_loop(self) -> None:
        """Drop the compiled loop, whose references the garbage collector does not see."""
        self._loop = None
        if self._executor is not None:
            self._executor.use(None)

    def disown(self) -> None:
        """Send nothing more: for a child that the model forked."""
        self.results.disown()
        if self._loop is not None:
            self._loop.disown()
