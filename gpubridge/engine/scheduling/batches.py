"""The scheduler of a model without sequences: the default queue, or the dynamic batcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpubridge.dataplane import DynamicBatcher
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    QueuePolicy,
    ShapeAgreement,
    ShapeIds,
    TimeoutAction,
)
from gpubridge.errors import BridgeError, unavailable
from gpubridge.request import RequestOptions

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
    """Return a batcher with the settings of a model."""
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
    """Python's interface to the compiled batcher, and the texts of refusals; see `Scheduler`.

    The compiled `RequestDispatch` adds requests, and takes batches. With settings that say nothing and
    no batch dimension it is the default queue: one request after the other, priorities and time-outs
    without effect, as in Triton.

    ``max_batch_size``: 0: every request is a batch.

    Attribute ``shapes``: numbers their shapes, where those matter.
    """

    def __init__(
        self, settings: DynamicBatching, max_batch_size: int, agreement: ShapeAgreement
    ) -> None:
        batcher = self.batcher = dynamic_batcher(settings, max_batch_size)
        # Where no two requests share a batch, their shapes do not matter.
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
        """Put requests that were never started before all others of their priority."""
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
        """Return the requests whose outcomes can go out: none or several, where order is kept."""
        return self.batcher.answered(request)

    def instance_up(self, _instance: int) -> None:
        """Do nothing: any instance takes any batch."""

    def instance_died(self, _instance: int, _now_ns: int) -> None:
        """Do nothing: no request belongs to an instance."""


def queue_full(request: QueuedRequest) -> BridgeError:
    """Return the refusal of a request for which there is no place in the queue."""
    # As Triton begins messages about one request.
    prefix = f"[request id: {request.identifier or '<id_unknown>'}] "
    return unavailable(f"{prefix}Exceeds maximum queue size")


def late_error() -> BridgeError:
    """Return the refusal of a request whose time in the queue is over."""
    return unavailable("Request timeout expired")
