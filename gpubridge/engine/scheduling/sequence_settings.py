"""Settings of sequence batching in ``config.pbtxt``.

As in `gpubridge.engine.scheduling.settings`, `gpubridge.config` has validated the messages; errors
have Triton's words where Triton has the same check.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from gpubridge.config import KSERVE_DATATYPES
from gpubridge.errors import invalid
from gpubridge.schema import ProtoMessage, enum_name

_CORRELATION_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_FLAG_VALUES = {
    "int32_false_true": "INT32",
    "fp32_false_true": "FP32",
    "bool_false_true": "BOOL",
}


class ControlKind(enum.Enum):
    """Meaning of a control input."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3


@dataclass(frozen=True, slots=True)
class Control:
    """A control input: `datatype` is a KServe name; the two values are unused by CORRID."""

    name: str
    kind: ControlKind
    datatype: str
    false: int | float | bool = False
    true: int | float | bool = True


@dataclass(frozen=True, slots=True)
class InitialState:
    """Contents of a state before its first request: zeros, or the bytes of a file."""

    name: str
    dims: tuple[int, ...]
    data_file: str = ""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that one request of a sequence passes to the next."""

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial: InitialState | None = None
    same_buffer: bool = False


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """A sequence keeps one place in the batch of one instance."""

    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """A sequence keeps its instance; the oldest requests form batches."""

    max_candidate_sequences: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """The field ``sequence_batching``.

    - ``max_sequence_idle_us``: a sequence without requests for this long loses its slot.
    - ``iterative``: the model may reschedule a request, as the next one of its sequence.
    - ``notices``: warnings for the log about settings without effect.
    """

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_sequence_idle_us: int = 1_000_000
    controls: tuple[Control, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False
    notices: tuple[str, ...] = ()


def parse_sequence_batching(name: str, message: ProtoMessage) -> SequenceBatching:
    """Return the settings of the field ``sequence_batching`` of model `name`.

    Raises BridgeError: ``INVALID_ARG`` for an invalid strategy, control or state.
    """
    states, notices = _states(name, message.state)
    return SequenceBatching(
        strategy=_strategy(name, message),
        max_sequence_idle_us=message.max_sequence_idle_microseconds,
        controls=tuple(_controls(name, message.control_input)),
        states=states,
        iterative=message.iterative_sequence,
        notices=notices,
    )


def _strategy(name: str, message: ProtoMessage) -> DirectStrategy | OldestStrategy:
    if message.HasField("oldest"):
        oldest = message.oldest
        return OldestStrategy(
            max_candidate_sequences=max(oldest.max_candidate_sequences, 0),
            preferred_batch_sizes=tuple(oldest.preferred_batch_size),
            max_queue_delay_us=oldest.max_queue_delay_microseconds,
            preserve_ordering=oldest.preserve_ordering,
        )
    direct = message.direct
    if not 0.0 <= direct.minimum_slot_utilization <= 1.0:
        raise invalid(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
        )
    return DirectStrategy(direct.max_queue_delay_microseconds, direct.minimum_slot_utilization)


def _controls(model: str, inputs: ProtoMessage) -> Iterator[Control]:
    names: set[str] = set()
    kinds: set[ControlKind] = set()
    for tensor in inputs:
        if not tensor.name:
            raise invalid(f"sequence batching control tensor must have a name for {model}")
        # Triton takes several controls in one `control_input`, and sends the last one only.
        if tensor.name in names or len(tensor.control) > 1:
            raise invalid(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple "
                f"control kinds for {model}"
            )
        names.add(tensor.name)
        for message in tensor.control:
            kind = ControlKind(message.kind)
            if kind in kinds:
                raise invalid(
                    f"sequence batching specifies multiple {kind.name} tensors for {model}"
                )
            kinds.add(kind)
            if kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                yield _correlation_control(model, tensor.name, message)
            else:
                yield _flag_control(model, tensor.name, kind, message)


def _flag_control(model: str, tensor: str, kind: ControlKind, message: ProtoMessage) -> Control:
    given = [field for field in _FLAG_VALUES if len(getattr(message, field))]
    where = f"{kind.name} for {model}"
    if not given:
        raise invalid(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {where}"
        )
    if len(given) > 1:
        raise invalid(
            "sequence batching specifies more than one from 'int32_false_true', "
            f"'fp32_false_true' and 'bool_false_true' for {where}"
        )
    values = getattr(message, given[0])
    if len(values) != 2:
        raise invalid(
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {where}"
        )
    return Control(tensor, kind, _FLAG_VALUES[given[0]], values[0], values[1])


def _correlation_control(model: str, tensor: str, message: ProtoMessage) -> Control:
    kind = ControlKind.CONTROL_SEQUENCE_CORRID
    if any(len(getattr(message, field)) for field in _FLAG_VALUES):
        raise invalid(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {kind.name} for {model}"
        )
    datatype = enum_name("DataType", message.data_type)
    if datatype not in _CORRELATION_TYPES:
        raise invalid(
            f"unexpected data type for control {kind.name} for {model}. Allowed data types are "
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )
    return Control(tensor, kind, KSERVE_DATATYPES[datatype])


def _states(model: str, messages: ProtoMessage) -> tuple[tuple[StateSpec, ...], tuple[str, ...]]:
    states: list[StateSpec] = []
    notices: list[str] = []
    for message in messages:
        spec = _state(model, message)
        for side in ("input_name", "output_name"):
            value = getattr(spec, side)
            if value in [getattr(other, side) for other in states]:
                notices.append(
                    f"Detected duplicate '{side}' in the state configuration: '{value}.' This "
                    "state configuration will be ignored."
                )
                break
        else:
            states.append(spec)
    return tuple(states), tuple(notices)


def _state(model: str, message: ProtoMessage) -> StateSpec:
    datatype = KSERVE_DATATYPES.get(enum_name("DataType", message.data_type))
    if not message.input_name or not message.output_name or datatype is None:
        raise invalid(
            f"a sequence batching state of {model} must specify 'input_name', 'output_name' and a "
            f"'data_type'; got '{message.input_name}', '{message.output_name}' and "
            f"{enum_name('DataType', message.data_type)}"
        )
    count = len(message.initial_state)
    if count > 1:
        raise invalid(
            f"initial_state field for state input '{message.input_name}' must contain exactly one "
            f"or zero element. Found '{count}' elements."
        )
    return StateSpec(
        message.input_name,
        message.output_name,
        datatype,
        tuple(message.dims),
        _initial_state(message, message.initial_state[0]) if count else None,
        message.use_same_buffer_for_input_output,
    )


def _initial_state(state: ProtoMessage, initial: ProtoMessage) -> InitialState:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise invalid(
            f"The data type used for 'initial_state' field of state '{name}' does not match the "
            "state data type."
        )
    if not initial.name:
        raise invalid(
            f"Field 'name' must be set when using initial_state for state input '{name}'."
        )
    if len(initial.dims) != len(state.dims):
        raise invalid(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            f"for state input '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for given, declared in zip(initial.dims, state.dims, strict=True):
        if given == -1:
            raise invalid(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if declared not in (-1, given):
            raise invalid(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim "
                f"description. {given} != {declared}"
            )
    if initial.WhichOneof("state_data") is None:
        raise invalid(f"initial_state setting expects state'{name}' to have state_data set")
    return InitialState(initial.name, tuple(initial.dims), initial.data_file)
