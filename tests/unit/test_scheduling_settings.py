"""Scheduling settings of a config.pbtxt, and the errors of invalid ones."""

import pytest

from gpubridge.engine.scheduling.sequence_settings import (
    Control,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
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
    QueuePolicy,
    ShapeIds,
    TimeoutAction,
    parse_dynamic_batching,
    shape_agreement,
)
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import RequestOptions
from tests.unit.model_configs import cases, model_config
from tests.unit.scheduled import Request

START = "control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }"
STATE = 'input_name: "SI" output_name: "SO" data_type: TYPE_FP32'


def config(scheduling, inputs="X FP32 [-1]"):
    return model_config(inputs, more=f"max_batch_size: 8\n{scheduling}\n")


def refusal(scheduling):
    made = config(scheduling)
    sequences = made.message.WhichOneof("scheduling_choice") == "sequence_batching"
    with pytest.raises(BridgeError) as caught:
        (sequence_scheduler if sequences else request_scheduler)(made)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_dynamic_batching_is_read():
    message = config(
        "dynamic_batching { preferred_batch_size: [2, 4] max_queue_delay_microseconds: 100 "
        "priority_levels: 3 default_priority_level: 2 "
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 "
        "allow_timeout_override: true max_queue_size: 7 } "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } } }"
    ).message
    settings = parse_dynamic_batching("m", message.dynamic_batching)
    assert settings.preferred_batch_sizes == (2, 4)
    assert settings.max_queue_delay_us == 100
    assert (settings.priority_levels, settings.default_priority_level) == (3, 2)
    assert settings.default_queue_policy == QueuePolicy(TimeoutAction.DELAY, 5, True, 7)
    assert dict(settings.priority_queue_policy) == {1: QueuePolicy(max_queue_size=1)}


def test_the_scheduler_is_the_one_asked_for():
    for text, first_batch in (("", 1), ("dynamic_batching { }", 2)):
        scheduler = request_scheduler(config(text))
        for name in "ab":
            scheduler.batcher.add(Request(name), 1, 0, 0, 0, 0)
        assert len(scheduler.batcher.take(0, 0)) == first_batch
    assert sequence_scheduler(config("dynamic_batching { }")) is None
    for text, kind in (
        ("", DirectSequenceScheduler),
        ("direct { }", DirectSequenceScheduler),
        ("oldest { }", OldestSequenceScheduler),
    ):
        assert isinstance(sequence_scheduler(config(f"sequence_batching {{ {text} }}")), kind)


def test_shapes_that_must_agree_are_the_variable_ones_that_are_not_ragged():
    agreement = shape_agreement(
        config("", "A FP32 [-1];B FP32 [3];C FP32 [-1] allow_ragged_batch: true")
    )
    assert agreement.inputs == {"A"}
    assert not agreement.same_inputs
    assert shape_agreement(config("", "A FP32 [3] optional: true")).same_inputs


ORDERED = """
priority_levels: 2 default_priority_level: 1
    Only one priority level is allowed when 'preserve_ordering' is true for m
default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10 }
    Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m
"""


@pytest.mark.parametrize(("fields", "message"), cases(ORDERED))
def test_order_cannot_be_kept_with(fields, message):
    assert refusal(f"dynamic_batching {{ preserve_ordering: true {fields} }}") == message


def test_sequence_batching_is_read():
    message = config(
        "sequence_batching { max_sequence_idle_microseconds: 9 iterative_sequence: true "
        "oldest { max_candidate_sequences: 3 preferred_batch_size: [2] "
        "max_queue_delay_microseconds: 4 preserve_ordering: true } "
        f'control_input {{ name: "S" {START} }} '
        'control_input { name: "E" control { kind: CONTROL_SEQUENCE_END '
        "bool_false_true: [false, true] } } "
        'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID '
        "data_type: TYPE_STRING } } "
        f'state {{ {STATE} dims: [-1] initial_state {{ name: "i" data_type: TYPE_FP32 dims: [2] '
        'data_file: "f" } } }'
    ).message
    settings = parse_sequence_batching("m", message.sequence_batching)
    assert settings.strategy == OldestStrategy(3, (2,), 4, True)
    assert settings.max_sequence_idle_us == 9
    assert settings.iterative
    assert settings.controls == (
        Control("S", ControlKind.CONTROL_SEQUENCE_START, "FP32", 0.0, 1.0),
        Control("E", ControlKind.CONTROL_SEQUENCE_END, "BOOL", False, True),
        Control("C", ControlKind.CONTROL_SEQUENCE_CORRID, "BYTES"),
    )
    assert settings.states == (StateSpec("SI", "SO", "FP32", (-1,), InitialState("i", (2,), "f")),)


def test_the_default_strategy_is_direct_and_the_idle_time_a_second():
    message = config("sequence_batching { }").message
    settings = parse_sequence_batching("m", message.sequence_batching)
    assert settings.strategy == DirectStrategy()
    assert settings.max_sequence_idle_us == 1_000_000


def test_a_duplicate_state_is_left_out_with_a_notice():
    message = config(
        f"sequence_batching {{ state {{ {STATE} dims: [1] }} state {{ {STATE} dims: [2] }} }}"
    ).message
    settings = parse_sequence_batching("m", message.sequence_batching)
    assert [state.dims for state in settings.states] == [(1,)]
    assert (
        "Detected duplicate 'input_name' in the state configuration: 'SI.'" in settings.notices[0]
    )


CONTROLS = """
control_input { name: "A" $START } control_input { name: "B" $START }
    sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m
control_input { name: "A" $START } control_input { name: "A" }
    sequence batching control tensor 'A' is specified for multiple control kinds for m
control_input { $START }
    sequence batching control tensor must have a name for m
control_input { name: "A" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }
    unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64,
    TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING
control_input { name: "A"
control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 int32_false_true: [0, 1] } }
    sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for
    CONTROL_SEQUENCE_CORRID for m
control_input { name: "A" control { kind: CONTROL_SEQUENCE_END } }
    sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for
    CONTROL_SEQUENCE_END for m
control_input { name: "A"
control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] int32_false_true: [0, 1] } }
    sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and
    'bool_false_true' for CONTROL_SEQUENCE_READY for m
control_input { name: "A" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0] } }
    sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m
direct { minimum_slot_utilization: 1.5 }
    sequence batching minimum slot utilization must be in range (0.0, 1.0] for m
"""


@pytest.mark.parametrize(("fields", "message"), cases(CONTROLS, {"START": START}))
def test_controls_and_strategies_are_refused_in_tritons_words(fields, message):
    assert refusal(f"sequence_batching {{ {fields} }}") == message


STATES = """
dims: [1] initial_state { name: "z" data_type: TYPE_INT32 dims: [1] zero_data: true }
    The data type used for 'initial_state' field of state 'SI' does not match the state data type.
dims: [1] initial_state { data_type: TYPE_FP32 dims: [1] zero_data: true }
    Field 'name' must be set when using initial_state for state input 'SI'.
dims: [-1] initial_state { name: "z" data_type: TYPE_FP32 dims: [-1] zero_data: true }
    'initial_state' field for state input name 'SI' contains variable dimensions.
dims: [1] initial_state { name: "z" data_type: TYPE_FP32 dims: [1, 1] zero_data: true }
    Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input
    'SI'. 2 != 1
dims: [2] initial_state { name: "z" data_type: TYPE_FP32 dims: [1] zero_data: true }
    'initial_state' dim for input name 'SI' doesn't match 'state' dim description. 1 != 2
dims: [1] initial_state { name: "z" data_type: TYPE_FP32 dims: [1] }
    initial_state setting expects state'SI' to have state_data set
dims: [1] initial_state { name: "a" } initial_state { name: "b" }
    initial_state field for state input 'SI' must contain exactly one or zero element. Found '2' elements.
"""


@pytest.mark.parametrize(("fields", "message"), cases(STATES))
def test_states_are_refused_in_tritons_words(fields, message):
    assert refusal(f"sequence_batching {{ state {{ {STATE} {fields} }} }}") == message


def test_a_state_without_a_name_is_refused():
    text = 'sequence_batching { state { output_name: "SO" data_type: TYPE_FP32 dims: [1] } }'
    assert "must specify 'input_name', 'output_name' and a 'data_type'" in refusal(text)


def options(*shapes):
    return RequestOptions(shapes=tuple(shapes))


def test_shapes_that_may_share_a_batch_have_one_number():
    ids = ShapeIds(shape_agreement(config("", "A FP32 [-1];B FP32 [3]")))
    one = options(("A", (1, 5)), ("B", (1, 3)))
    same = [
        one,
        one,
        options(("A", (1, 5)), ("B", (1, 3))),
        options(("A", (8, 5)), ("B", (8, 3))),
        options(("B", (1, 3)), ("A", (1, 5))),
        options(("A", (1, 5))),
    ]
    assert len({ids.of(each) for each in same}) == 1
    others = [options(("A", (1, 6))), options(("A", (1, 5, 1))), options()]
    assert len({ids.of(each) for each in [one, *others]}) == 4


def test_optional_inputs_count_whether_they_are_there():
    ids = ShapeIds(shape_agreement(config("", "A FP32 [3] optional: true;B FP32 [3]")))
    both, one = options(("A", (1, 3)), ("B", (1, 3))), options(("B", (1, 3)))
    assert ids.of(both) != ids.of(one)


def test_options_that_another_model_has_had_get_a_number_of_this_one():
    first, second = (ShapeIds(shape_agreement(config("", "A FP32 [-1]"))) for _ in range(2))
    others = [options(("A", (1, dim))) for dim in (7, 8)]
    for each in others:
        second.of(each)
    shared = options(("A", (1, 5)))
    first.of(shared)
    assert second.of(shared) not in [second.of(each) for each in others]
    assert second.of(options(("A", (2, 5)))) == second.of(shared)
