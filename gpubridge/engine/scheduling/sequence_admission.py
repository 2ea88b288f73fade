"""Validation of requests for a sequence batcher, and the errors of refused ones."""

from __future__ import annotations

import logging
from collections.abc import Container

from gpubridge.engine.scheduling.scheduler import stopping_error
from gpubridge.engine.scheduling.sequence_item import ControlPlan, RequestSequence, SequenceItem
from gpubridge.errors import BridgeError, invalid, unsupported

_ID_LIMIT = 128

_logger = logging.getLogger(__name__)


class Admission:
    """Validates requests.

    - ``controls``: defines which correlation ids the model accepts.
    - ``iterative``: a request without a correlation id gets one, and forms its own sequence.
    """

    def __init__(self, model: str, controls: ControlPlan, iterative: bool) -> None:
        self._model = model
        self._controls = controls
        self._own_id = 0
        self.iterative = iterative
        self.stopped = False

    def check(self, item: SequenceItem, known: Container[int | str]) -> None:
        """Raise BridgeError for an invalid request; assign a missing id."""
        request = f"inference request to model '{self._model}' must specify"
        if item.size > 1:
            raise invalid(f"{request} batch-size 1 due to requirements of sequence batcher")
        if isinstance(item.correlation_id, str) and len(item.correlation_id) > _ID_LIMIT:
            raise unsupported(f"string correlation ID cannot be longer than {_ID_LIMIT} characters")
        if not item.correlation_id:
            if not self.iterative:
                raise invalid(f"{request} a non-zero or non-empty correlation ID")
            item.correlation_id = self._next_own_id(known)
            item.start = True
        elif not self._controls.accepts(item.correlation_id):
            raise invalid(
                f"{request} an integer correlation ID, because the model's control input for it "
                f"has an integer data type; got '{item.correlation_id}'"
            )
        if self.stopped and item.start:
            raise stopping_error()
        if not item.start and item.correlation_id not in known:
            raise self.not_started(item)

    def _next_own_id(self, known: Container[int | str]) -> int:
        self._own_id += 1
        while self._own_id in known:
            self._own_id += 1
        return self._own_id

    def warn_of_conflict(self, item: SequenceItem) -> None:
        """Log that a request starts a sequence whose id is in use."""
        _logger.warning(
            "sequence %s for model '%s' has a conflict. The previous sequence did not end before "
            "this sequence start. Previous sequence will be terminated early.",
            item.correlation_id,
            self._model,
        )

    def not_started(self, item: SequenceItem) -> BridgeError:
        """Return the error for a request whose sequence does not exist."""
        return invalid(
            f"inference request for sequence {item.correlation_id} to model '{self._model}' must "
            "specify the START flag on the first request of the sequence"
        )

    def not_iterative(self) -> BridgeError:
        """Return the error for a model that reschedules without ``iterative_sequence``."""
        return invalid(
            f"model '{self._model}' released a request for rescheduling, which needs "
            "'iterative_sequence: true' in its sequence_batching; set it in config.pbtxt"
        )

    def aborted_text(self, sequence: RequestSequence) -> str:
        """Return the error text for a queued request of a sequence that ended early."""
        return (
            f"inference request for sequence {sequence.correlation_id} to model '{self._model}' "
            "was not executed: a request of the sequence was cancelled, or its model instance "
            "stopped; start the sequence again with the START flag"
        )
