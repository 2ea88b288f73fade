"""Which requests make the next batch, and of which instance: pure rules, without clock or socket.

`request_scheduler` and `sequence_scheduler` give a model its `Scheduler`; what it holds are requests,
or a `SequenceItem` for each. The default queue and the dynamic batcher are compiled
(`gpubridge.dataplane.DynamicBatcher`).
"""

from gpubridge.engine.scheduling.batches import BatchScheduler
from gpubridge.engine.scheduling.policy import Refusal, Scheduler
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import ControlTensor, SequenceItem
from gpubridge.engine.scheduling.sequence_settings import (
    Control,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    StateSpec,
    parse_sequence_batching,
)
from gpubridge.engine.scheduling.sequence_strategies import (
    DirectSequenceScheduler,
    OldestSequenceScheduler,
    request_scheduler,
    sequence_scheduler,
)
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    QueuePolicy,
    ShapeAgreement,
    ShapeIds,
    TimeoutAction,
    parse_dynamic_batching,
    shape_agreement,
)

__all__ = [
    "BatchScheduler",
    "Control",
    "ControlKind",
    "ControlTensor",
    "DirectSequenceScheduler",
    "DirectStrategy",
    "DynamicBatching",
    "InitialState",
    "OldestSequenceScheduler",
    "OldestStrategy",
    "QueuePolicy",
    "Refusal",
    "Scheduler",
    "SequenceBatching",
    "SequenceItem",
    "SequenceScheduler",
    "ShapeAgreement",
    "ShapeIds",
    "StateSpec",
    "TimeoutAction",
    "parse_dynamic_batching",
    "parse_sequence_batching",
    "request_scheduler",
    "sequence_scheduler",
    "shape_agreement",
]
