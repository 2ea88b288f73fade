"""Which scheduler a model's configuration asks for."""

from __future__ import annotations

import logging

from gpubridge.config import ModelConfig
from gpubridge.engine.scheduling.batches import BatchScheduler
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_direct import DirectSequenceScheduler
from gpubridge.engine.scheduling.sequence_oldest import OldestSequenceScheduler
from gpubridge.engine.scheduling.sequence_settings import (
    DirectStrategy,
    parse_sequence_batching,
)
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    parse_dynamic_batching,
    shape_agreement,
)

__all__ = ["request_scheduler", "sequence_scheduler"]

_logger = logging.getLogger(__name__)


def request_scheduler(config: ModelConfig) -> BatchScheduler:
    """Return the scheduler of a model without ``sequence_batching``.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: its settings contradict each other.
    """
    message = config.message
    if message.WhichOneof("scheduling_choice") != "dynamic_batching":
        return BatchScheduler(DynamicBatching(), 0, shape_agreement(config))
    settings = parse_dynamic_batching(config.name, message.dynamic_batching)
    return BatchScheduler(settings, config.max_batch_size, shape_agreement(config))


def sequence_scheduler(config: ModelConfig) -> SequenceScheduler | None:
    """Return the scheduler of a model with ``sequence_batching``; None for another model.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: its settings cannot be.
    """
    message = config.message
    if message.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    settings = parse_sequence_batching(config.name, message.sequence_batching)
    for notice in settings.notices:
        _logger.warning("model '%s': %s", config.name, notice)
    strategy = settings.strategy
    if isinstance(strategy, DirectStrategy):
        return DirectSequenceScheduler(settings, strategy, config.name, config.max_batch_size)
    return OldestSequenceScheduler(settings, strategy, config.name, config.max_batch_size)
