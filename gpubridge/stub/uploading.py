"""Runs batches whose inputs go to the GPU: those of the next one while the model has this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from gpubridge.stub.answers import error_context
from gpubridge.stub.executor import Executor
from gpubridge.transport.channel import Channel
from gpubridge.transport.messages import Batch, Kind, decode_execute
from gpubridge.transport.records import Record, RecordReader
from gpubridge.transport.short_waits import ShortWaits

if TYPE_CHECKING:
    from gpubridge.stub.device.inputs_ahead import InputsAhead


class BatchesAhead:
    """Reads a channel like `Channel`; of what follows a batch only new regions come before its end.

    ``take_region`` takes a message about a region and its descriptors, before the first batch that
    needs them.
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
        # The batches of the message at hand that have not begun.
        self._coming: deque[Batch] = deque()
        # The message after it, if it was looked at, and its batches, if it has some.
        self._kept: tuple[bytes, list[int]] | None = None
        self._kept_batches: list[Batch] | None = None

    def receive(self) -> tuple[bytes, list[int]]:
        """Receive one message, as `Channel.receive`."""
        if self._kept is None:
            return self._channel.receive()
        kept, self._kept = self._kept, None
        return kept

    def poll(self, nanoseconds: int, waits: ShortWaits) -> None:
        """Stay awake until `receive` would not wait, as `Channel.poll`."""
        if self._kept is None:
            self._channel.poll(nanoseconds, waits)

    def wait(self, seconds: float) -> bool:
        """Wait until `receive` would not wait, as `Channel.wait`."""
        return self._kept is not None or self._channel.wait(seconds)

    def batches(self, message: bytes, reader: RecordReader) -> list[Batch]:
        """Take the EXECUTE message that was received last apart, as `decode_execute`."""
        batches, self._kept_batches = self._kept_batches, None
        if batches is None:
            batches = decode_execute(message, reader)
        self._coming = deque(batches)
        return batches

    def begin(self) -> Batch | None:
        """Note that the first of the coming batches begins; returns the next one if it is here."""
        self._coming.popleft()
        if self._coming:
            return self._coming[0]
        while self._kept is None and self._channel.wait(0):
            message, fds = self._channel.receive()
            if message[0] in (Kind.REGION, Kind.DEVICE_REGION, Kind.PIN):
                self._take_region(message, fds)
                continue
            self._kept = message, fds
            if message[0] == Kind.EXECUTE:
                self._kept_batches = decode_execute(message, self._reader)
        return self._kept_batches[0] if self._kept_batches else None


class UploadingExecutor(Executor):
    """Begins the copies of the next batch's inputs before it executes the one whose turn it is.

    What was copied for a batch that has not started is of no account: if this process dies, the
    server sends that batch elsewhere.
    """

    def __init__(self, parts: Sequence[Any], inputs: InputsAhead, ahead: BatchesAhead) -> None:
        super().__init__(*parts)
        self._inputs = inputs
        self._ahead = ahead

    def run(self, batch: Batch) -> bytes:  # noqa: D102
        inputs = self._inputs
        inputs.begin(self._waited_for(batch))
        following = self._ahead.begin()
        if following is not None:
            inputs.look_ahead(self._waited_for(following))
        try:
            return super().run(batch)
        finally:
            inputs.end()

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
                answers.append(self._answers.answer(record, error_context(error)))
        return admitted

    def _let_go(self, ticket: int) -> None:
        # Copies may still read what was looked at: it goes back after them.
        if not self._inputs.has_looked_at(ticket):
            super()._let_go(ticket)
