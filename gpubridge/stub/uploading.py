"""Executes batches whose inputs are copied to the GPU: the next batch's during the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from gpubridge.stub.executor import Executor
from gpubridge.stub.response_encoder import error_context
from gpubridge.transport.channel import Channel
from gpubridge.transport.messages import Batch, Kind, decode_execute
from gpubridge.transport.records import Record, RecordReader
from gpubridge.transport.wait_predictor import WaitPredictor

if TYPE_CHECKING:
    from gpubridge.stub.device.input_prefetch import InputPrefetcher


class BatchesAhead:
    """Reads a channel like `Channel`, and looks ahead to the batch after the current one.

    ``take_region`` handles a message about a region, with its descriptors, ahead of time, before the
    first batch that needs it; all other messages keep their order. It looks past those that return idle
    memory, which the server sends at any time.
    """

    def __init__(
        self,
        channel: Channel,
        reader: RecordReader,
        take_region: Callable[[bytes, list[int]], None],
    ) -> None:
        self._channel = channel
        self._reader = reader
        self._take_region = take_region
        # Batches of the current message that have not begun.
        self._coming: deque[Batch] = deque()
        # Messages that were read ahead, and the batches of the last one, if it has some.
        self._kept: deque[tuple[bytes, list[int]]] = deque()
        self._kept_batches: list[Batch] | None = None

    def receive(self) -> tuple[bytes, list[int]]:
        """Receive one message, as `Channel.receive`."""
        return self._kept.popleft() if self._kept else self._channel.receive()

    def poll(self, nanoseconds: int, waits: WaitPredictor) -> None:
        """Poll until `receive` would not wait, as `Channel.poll`."""
        if not self._kept:
            self._channel.poll(nanoseconds, waits)

    def wait(self, seconds: float | None, other: int | None = None) -> bool:
        """Wait until `receive` would not wait, as `Channel.wait`."""
        return bool(self._kept) or self._channel.wait(seconds, other)

    def batches(self, message: bytes, reader: RecordReader) -> list[Batch]:
        """Decode the EXECUTE message that was received last, as `decode_execute`."""
        batches, self._kept_batches = self._kept_batches, None
        if batches is None:
            batches = decode_execute(message, reader)
        self._coming = deque(batches)
        return batches

    def begin(self) -> Batch | None:
        """Note that the next batch begins; returns the one after it if it has arrived."""
        self._coming.popleft()
        if self._coming:
            return self._coming[0]
        while self._may_look_on() and self._channel.wait(0):
            message, fds = self._channel.receive()
            if message[0] in (Kind.REGION, Kind.DEVICE_REGION, Kind.PIN):
                self._take_region(message, fds)
                continue
            self._kept.append((message, fds))
            if message[0] == Kind.EXECUTE:
                self._kept_batches = decode_execute(message, self._reader)
        return self._kept_batches[0] if self._kept_batches else None

    def _may_look_on(self) -> bool:
        return not self._kept or self._kept[-1][0][0] == Kind.TRIM


class UploadingExecutor(Executor):
    """Starts to copy the next batch's inputs before it executes the current batch.

    Copies for a batch that has not started have no effect: if this process dies, the server sends
    that batch to another stub.
    """

    def __init__(self, parts: Sequence[Any], inputs: InputPrefetcher, ahead: BatchesAhead) -> None:
        super().__init__(*parts)
        self._inputs = inputs
        self._ahead = ahead

    def run(self, batch: Batch) -> bytes:  # noqa: D102
        inputs = self._inputs
        inputs.begin_batch(self._waited_for(batch))
        following = self._ahead.begin()
        if following is not None:
            inputs.prefetch(self._waited_for(following))
        try:
            return super().run(batch)
        finally:
            inputs.end_batch()

    def _waited_for(self, batch: Batch) -> list[Record]:
        cancelled = self._control.cancelled
        return [record for record in batch.records if not cancelled[record.ticket]]

    def _admitted(self, records: Sequence[Record], answers: list[bytes]) -> list[Record]:
        admitted = []
        for record in super()._admitted(records, answers):
            error = self._inputs.failure(record.ticket)
            if error is None:
                admitted.append(record)
            else:
                self._clients.note_error(error)
                answers.append(self._encoder.encode(record, error_context(error)))
        return admitted

    def _release(self, ticket: int) -> None:
        # Copies may still read this memory: it is released after them.
        if not self._inputs.has_views(ticket):
            super()._release(ticket)
