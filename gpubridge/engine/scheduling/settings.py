"""What ``config.pbtxt`` says about queues and dynamic batching.

The messages come from `gpubridge.config` complete and validated; refused here is, in Triton's
words, what only a scheduler minds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubridge.config import ModelConfig
from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import BridgeError, ErrorCode

__all__ = [
    "DynamicBatching",
    "QueuePolicy",
    "ShapeAgreement",
    "TimeoutAction",
    "invalid",
    "parse_dynamic_batching",
    "shape_agreement",
]


class TimeoutAction(enum.Enum):
    """What becomes of a request that stayed in its queue for too long."""

    REJECT = 0
    DELAY = 1


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one level of priority.

    Attributes
    ----------
    timeout_action : TimeoutAction
    default_timeout_us : int
        0 for no limit; then requests cannot set one either, as in Triton.
    allow_timeout_override : bool
        A request may ask for less than the default, never for more.
    max_queue_size : int
        Requests, whatever their batch sizes; 0 for any number.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The field ``dynamic_batching``.

    Attributes
    ----------
    preferred_batch_sizes : tuple of int
    max_queue_delay_us : int
        How long a request may wait for others.
    preserve_ordering : bool
        Outcomes go out in the order of the requests.
    priority_levels : int
        Priorities go from 1, the highest, to this; 0 when there are none.
    default_priority_level : int
    default_queue_policy : QueuePolicy
    priority_queue_policy : mapping of int to QueuePolicy
        The levels with a policy of their own.
    """

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShapeAgreement:
    """Which inputs must agree for two requests to share a batch.

    Attributes
    ----------
    inputs : frozenset of str
        Their shapes, without the batch dimension, must be equal.
    same_inputs : bool
        The requests must also have the same set of inputs.
    """

    inputs: frozenset[str]
    same_inputs: bool


def invalid(message: str) -> BridgeError:
    """Return the error for settings that cannot be."""
    return BridgeError(message, ErrorCode.INVALID_ARG)


def shape_agreement(config: ModelConfig) -> ShapeAgreement:
    """Return what must agree: inputs of variable shape that are not ragged, and optional ones."""
    return ShapeAgreement(
        frozenset(
            tensor.name
            for tensor in config.inputs
            if -1 in tensor.dims and not tensor.allow_ragged_batch
        ),
        any(tensor.optional for tensor in config.inputs),
    )


def parse_dynamic_batching(name: str, message: ProtoMessage) -> DynamicBatching:
    """Return the settings of the field ``dynamic_batching`` of model `name`.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: ``preserve_ordering`` together with what would break the order.
    """
    settings = DynamicBatching(
        preferred_batch_sizes=tuple(message.preferred_batch_size),
        max_queue_delay_us=message.max_queue_delay_microseconds,
        preserve_ordering=message.preserve_ordering,
        priority_levels=message.priority_levels,
        default_priority_level=message.default_priority_level,
        default_queue_policy=_queue_policy(message.default_queue_policy),
        priority_queue_policy={
            level: _queue_policy(policy) for level, policy in message.priority_queue_policy.items()
        },
    )
    if settings.preserve_ordering:
        _check_order_can_be_kept(name, settings)
    return settings


def _check_order_can_be_kept(name: str, settings: DynamicBatching) -> None:
    if settings.priority_levels > 1:
        raise invalid(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        )
    for policy in (settings.default_queue_policy, *settings.priority_queue_policy.values()):
        if policy.default_timeout_us and policy.timeout_action is TimeoutAction.DELAY:
            raise invalid(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                f"true for {name}"
            )


def _queue_policy(message: ProtoMessage) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(message.timeout_action),
        default_timeout_us=message.default_timeout_microseconds,
        allow_timeout_override=message.allow_timeout_override,
        max_queue_size=message.max_queue_size,
    )
