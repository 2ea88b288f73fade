"""The interface of schedulers, and the scheduler of models without sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpubridge.dataplane import DynamicBatcher
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    QueuePolicy,
    ShapeAgreement,
    ShapeIds,
    TimeoutAction,
)
from gpubridge.errors import BridgeError, QueueFull, unavailable
from gpubridge.request import RequestOptions

Refusal = tuple[Any, BridgeError]

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Scheduler(Protocol):
    """Decides which requests form the next batch of which instance.

    It reads no clock: ``now_ns`` is the time of any monotonic clock. It owns an item from `add` until
    exactly one of `take`, `refused`, a successful `cancel` or `clear` returns it. A taken item comes
    back by `put_back` or is reported by `answered`.

    ``wants_answers``: whether `answered` must be called; if not, outcomes need no order.
    """

    wants_answers: bool

    @property
    def pending(self) -> int:
        """Return the number of items that were not taken."""

    def cancel(self, item: Any, /) -> bool:
        """Remove an item that was not taken; return whether that was so."""

    def put_back(self, items: Sequence[Any], /) -> None:
        """Put items that were taken last but never started back to the front, in that order."""

    def answered(self, item: Any, now_ns: int, /) -> list[Any]:
        """Record the outcome of a taken item; return the items whose outcomes may be delivered now."""

    def releasable(self) -> list[Any]:
        """Return further items whose outcomes may be delivered, after `cancel` or `refused`."""

    def instance_up(self, instance: int, /) -> None:
        """Record that an instance takes batches, for the first time or again."""

    def instance_died(self, instance: int, now_ns: int, /) -> None:
        """Record the death of an instance; its items that never started were put back before."""

    def stop(self) -> None:
        """Refuse new items; the queued ones are still taken."""

    def clear(self) -> list[Any]:
        """Remove and return all queued items."""


def stopping_error() -> BridgeError:
    """Return the error for a request after `Scheduler.stop`."""
    return unavailable(STOPPING)


_PolicyFields = tuple[bool, int, bool, int]


class QueuedRequest(Protocol):
    """A request as the scheduler sees it; ``arrived`` is the ``now_ns`` of its `BatchScheduler.add`."""

    arrived: int

    @property
    def batch_size(self) -> int:
        """Its first dim where the model batches, else 1."""

    @property
    def options(self) -> RequestOptions:
        """Its priority, time-out and shapes."""

    @property
    def identifier(self) -> str:
        """Its id, for messages."""


def dynamic_batcher(settings: DynamicBatching, max_batch_size: int) -> DynamicBatcher:
    """Return a compiled batcher with the settings of a model."""
    return DynamicBatcher(
        max_batch_size,
        settings.preferred_batch_sizes,
        settings.max_queue_delay_us,
        settings.preserve_ordering,
        settings.priority_levels,
        settings.default_priority_level,
        _fields(settings.default_queue_policy),
        {level: _fields(policy) for level, policy in settings.priority_queue_policy.items()},
    )


def _fields(policy: QueuePolicy) -> _PolicyFields:
    return (
        policy.timeout_action is TimeoutAction.DELAY,
        policy.default_timeout_us,
        policy.allow_timeout_override,
        policy.max_queue_size,
    )


class BatchScheduler:
    """Python interface of the compiled batcher; see `Scheduler`.

    The compiled `RequestDispatch` adds requests and takes batches. With default settings and no batch
    dimension this is the default queue: requests in order, priorities and time-outs without effect,
    as in Triton.

    ``max_batch_size``: 0: every request is a batch.

    Attribute ``shapes``: numbers of request shapes, if shapes decide which requests share a batch.
    """

    def __init__(
        self, settings: DynamicBatching, max_batch_size: int, agreement: ShapeAgreement
    ) -> None:
        batcher = self.batcher = dynamic_batcher(settings, max_batch_size)
        # If requests never share a batch, shapes do not matter.
        matters = max_batch_size > 1 and (agreement.inputs or agreement.same_inputs)
        self.shapes = ShapeIds(agreement) if matters else None
        self.wants_answers = settings.preserve_ordering
        self.cancel = batcher.cancel
        self.releasable = batcher.releasable
        self.stop = batcher.stop
        self.clear = batcher.clear

    @property
    def pending(self) -> int:
        """Return the number of requests it holds that were not taken."""
        return self.batcher.pending

    def put_back(self, requests: Sequence[QueuedRequest]) -> None:
        """Put requests that were never started back, before all others of their priority."""
        shapes = self.shapes
        self.batcher.put_back(
            [
                (
                    request,
                    request.batch_size,
                    0 if shapes is None else shapes.of(request.options),
                    request.options.priority,
                    request.arrived,
                )
                for request in requests
            ]
        )

    def answered(self, request: QueuedRequest, _now_ns: int) -> list[QueuedRequest]:
        """Return the requests whose outcomes may be delivered: none or several, if order is kept."""
        return self.batcher.answered(request)

    def instance_up(self, _instance: int) -> None:
        """Do nothing: any instance takes any batch."""

    def instance_died(self, _instance: int, _now_ns: int) -> None:
        """Do nothing: no request belongs to an instance."""


def queue_full(request: QueuedRequest) -> BridgeError:
    """Return the error for a request that exceeds the queue size."""
    # As Triton begins messages about one request.
    prefix = f"[request id: {request.identifier or '<id_unknown>'}] "
    return QueueFull(f"{prefix}Exceeds maximum queue size")


def late_error() -> BridgeError:
    """Return the error for a request that exceeded its queue time-out."""
    return unavailable("Request timeout expired")
