"""Settings of queues and dynamic batching in ``config.pbtxt``.

`gpubridge.config` has completed and validated the messages; only errors that concern the scheduler
are raised here, in Triton's words.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from gpubridge.config import ModelConfig
from gpubridge.errors import invalid
from gpubridge.request import RequestOptions
from gpubridge.schema import ProtoMessage


class TimeoutAction(enum.Enum):
    """Action for a request that exceeds its queue time-out."""

    REJECT = 0
    DELAY = 1


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one level of priority.

    - ``default_timeout_us``: 0: no limit, and requests cannot set one either, as in Triton.
    - ``allow_timeout_override``: a request may set a shorter time-out, not a longer one.
    - ``max_queue_size``: number of requests of any batch size; 0: no limit.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The field ``dynamic_batching``.

    - ``max_queue_delay_us``: longest wait of a request for others.
    - ``preserve_ordering``: outcomes are delivered in the order of the requests.
    - ``priority_levels``: the lowest priority; 1 is the highest; 0: no priorities.
    - ``priority_queue_policy``: policies of single levels.
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
    """Inputs that must agree for two requests to share a batch.

    - ``inputs``: their shapes, without the batch dimension, must be equal.
    - ``same_inputs``: the requests must also have the same set of inputs.
    """

    inputs: frozenset[str]
    same_inputs: bool


def shape_agreement(config: ModelConfig) -> ShapeAgreement:
    """Return the agreement of a model: inputs of variable shape, unless ragged; optional inputs."""
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

    Raises BridgeError: ``INVALID_ARG`` for settings that contradict ``preserve_ordering``.
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


class _ShapeId:
    """The number of a shape, which exists while request options refer to it."""

    __slots__ = ("__weakref__", "number", "owner")

    def __init__(self, number: int, owner: ShapeIds) -> None:
        self.number = number
        self.owner = owner


class ShapeIds:
    """Numbers the shapes of a model's requests; equal numbers may share a batch."""

    __slots__ = ("_agreement", "_ids", "_numbers")

    def __init__(self, agreement: ShapeAgreement) -> None:
        self._agreement = agreement
        self._ids: WeakValueDictionary[object, _ShapeId] = WeakValueDictionary()
        self._numbers = itertools.count()

    def of(self, options: RequestOptions) -> int:
        """Return the number of a request's shapes, cached in its options."""
        if not self._agreement.inputs and not self._agreement.same_inputs:
            return 0
        known = options.shape_id
        if isinstance(known, _ShapeId) and known.owner is self:
            return known.number
        key = self._key(options)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = _ShapeId(next(self._numbers), self)
        options.shape_id = found
        return found.number

    def _key(self, options: RequestOptions) -> object:
        agreement = self._agreement
        return tuple(
            (name, shape[1:] if name in agreement.inputs else None)
            for name, shape in sorted(options.shapes)
            if agreement.same_inputs or name in agreement.inputs
        )
