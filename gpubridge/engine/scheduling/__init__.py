"""Which requests make the next batch, and of which instance: pure rules, without clock or socket.

`request_scheduler` and `sequence_scheduler` give a model its `Scheduler`; what it holds are `Item`
and `SequenceItem`.
"""

from gpubridge.engine.scheduling.choose import request_scheduler, sequence_scheduler
from gpubridge.engine.scheduling.control import ControlTensor
from gpubridge.engine.scheduling.default import DefaultScheduler
from gpubridge.engine.scheduling.dynamic import DynamicScheduler
from gpubridge.engine.scheduling.item import Item, Place
from gpubridge.engine.scheduling.policy import Refusal, Scheduler
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_direct import DirectSequenceScheduler
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_oldest import OldestSequenceScheduler
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
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    QueuePolicy,
    ShapeAgreement,
    TimeoutAction,
    parse_dynamic_batching,
    shape_agreement,
)

__all__ = [
    "Control",
    "ControlKind",
    "ControlTensor",
    "DefaultScheduler",
    "DirectSequenceScheduler",
    "DirectStrategy",
    "DynamicBatching",
    "DynamicScheduler",
    "InitialState",
    "Item",
    "OldestSequenceScheduler",
    "OldestStrategy",
    "Place",
    "QueuePolicy",
    "Refusal",
    "Scheduler",
    "SequenceBatching",
    "SequenceItem",
    "SequenceScheduler",
    "ShapeAgreement",
    "StateSpec",
    "TimeoutAction",
    "parse_dynamic_batching",
    "parse_sequence_batching",
    "request_scheduler",
    "sequence_scheduler",
    "shape_agreement",
]
