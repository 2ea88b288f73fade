"""Runs batches whose inputs go to the GPU: those of the next one while the model has this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpubridge.stub.answers import error_context
from gpubridge.stub.batches_ahead import BatchesAhead
from gpubridge.stub.device.inputs_ahead import InputsAhead
from gpubridge.stub.executor import Executor
from gpubridge.transport.messages import Batch
from gpubridge.transport.records import Record

__all__ = ["UploadingExecutor"]


class UploadingExecutor(Executor):
    """Begins the copies of the next batch's inputs before it executes the one whose turn it is.

    What was copied for a batch that has not started is of no account: if this process dies, the
    server sends that batch elsewhere.

    Parameters
    ----------
    parts : sequence
        What an `Executor` is made of.
    inputs : InputsAhead
        One of these.
    ahead : BatchesAhead
        Knows which batch is next.
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
