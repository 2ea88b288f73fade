"""Results of auto_complete_config, and the configuration that follows (as in Triton 2.51)."""

import json

import pytest

from gpubridge.config import finish_model_config, load_model_config
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import ModelConfig
from tests.unit.model_configs import write_model

TENSOR = {"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}
WHOLE = 'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'


@pytest.fixture
def completed(tmp_path):
    """Have some code complete a configuration; returns what it is then."""

    def complete(config, work):
        directory = write_model(tmp_path, config)
        draft = load_model_config(directory, gpu_count=0, draft=True)
        assert draft.draft
        seen = ModelConfig(json.dumps(draft.to_dict()))
        returned = work(seen)
        whole = finish_model_config(draft, returned, directory, gpu_count=0)
        assert not whole.draft
        return whole

    return complete


def returns(*changes):
    """Return what a model returns that does these things to its configuration."""

    def work(config):
        for change in changes:
            change(config)
        return json.dumps(config.as_dict())

    return work


def sets(**fields):
    return lambda config: config.as_dict().update(fields)


def test_a_model_without_a_file_says_everything_itself(completed):
    whole = completed(
        None,
        returns(
            lambda c: c.add_input({**TENSOR, "optional": True}),
            lambda c: c.add_output({**TENSOR, "name": "OUT"}),
            lambda c: c.set_max_batch_size(8),
            lambda c: c.set_dynamic_batching(),
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
        ),
    )
    assert (whole.name, whole.backend, whole.max_batch_size, whole.decoupled) == (
        "m",
        "python",
        8,
        True,
    )
    assert [(t.name, t.datatype, t.dims, t.optional) for t in whole.inputs] == [
        ("IN", "INT32", (1,), True)
    ]
    assert [(t.name, t.datatype, t.dims) for t in whole.outputs] == [("OUT", "INT32", (1,))]
    assert whole.to_dict()["dynamic_batching"]["preferred_batch_size"] == [8]


def test_a_model_that_completes_nothing_is_what_its_file_says(completed):
    whole = completed(f"max_batch_size: 4\n{WHOLE}", lambda _: None)
    assert (whole.max_batch_size, [t.name for t in whole.inputs]) == (4, ["IN"])


def test_a_model_without_file_and_function_has_no_tensors(completed):
    whole = completed(None, lambda _: None)
    assert (whole.inputs, whole.outputs, whole.max_batch_size) == ((), (), 0)


def test_missing_fields_of_a_draft_are_completed(completed):
    draft = 'input [ { name: "IN" } ]\noutput [ { name: "OUT" dims: [ 2 ] } ]\n'
    whole = completed(
        draft,
        returns(
            lambda c: c.add_input(TENSOR),
            lambda c: c.add_output({**TENSOR, "name": "OUT", "dims": [2]}),
        ),
    )
    assert [(t.datatype, t.dims) for t in whole.inputs + whole.outputs] == [
        ("INT32", (1,)),
        ("INT32", (2,)),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("parameters", {"a": {"string_value": "b"}}),
        ("version_policy", {"all": {}}),
        ("instance_group", [{"count": 3, "kind": "KIND_CPU"}]),
        ("default_model_filename", "other.py"),
        ("model_warmup", [{"name": "w", "batch_size": 1}]),
    ],
)
def test_everything_else_stays_as_it_was(completed, field, value):
    whole = completed(WHOLE, returns(sets(**{field: value})))
    assert whole.to_dict()[field] != value
    assert (whole.name, whole.parameters, whole.version_policy.kind) == ("m", {}, "latest")
    assert [group.count for group in whole.instance_groups] == [1]


def test_omitted_fields_are_removed_except_scheduler_and_policy(completed):
    config = (
        "max_batch_size: 4\nsequence_batching { }\nmodel_transaction_policy { decoupled: true }\n"
    )
    whole = completed(config + WHOLE, lambda _: "{}")
    assert (whole.max_batch_size, whole.inputs, whole.decoupled) == (0, (), True)
    assert whole.message.WhichOneof("scheduling_choice") == "sequence_batching"


def test_a_scheduler_that_is_chosen_stays_as_it_is(completed):
    change = sets(dynamic_batching={"max_queue_delay_microseconds": 7})
    whole = completed(f"max_batch_size: 4\ndynamic_batching {{ }}\n{WHOLE}", returns(change))
    assert whole.to_dict()["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert whole.to_dict()["dynamic_batching"]["preferred_batch_size"] == [4]


@pytest.mark.parametrize(
    ("config", "preferred"),
    [("dynamic_batching { }\n", [8]), ("max_batch_size: 4\ndynamic_batching { }\n", [4])],
)
def test_preferred_sizes_are_filled_in_once(completed, config, preferred):
    whole = completed(config + WHOLE, returns(lambda c: c.set_max_batch_size(8)))
    assert whole.to_dict()["dynamic_batching"]["preferred_batch_size"] == preferred


def test_a_model_may_choose_sequences(completed):
    whole = completed(WHOLE, returns(sets(max_batch_size=4, sequence_batching={"oldest": {}})))
    batching = whole.to_dict()["sequence_batching"]
    assert batching["max_sequence_idle_microseconds"] == 1_000_000
    assert batching["oldest"]["preferred_batch_size"] == [4]


def test_numbers_are_taken_as_triton_takes_them(completed):
    whole = completed(None, returns(sets(max_batch_size=4.0, input=[{**TENSOR, "dims": 3}])))
    assert (whole.max_batch_size, whole.inputs[0].dims) == (4, (3,))


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("[]", r"returned '\[\]'; expected a ModelConfig that holds a dict"),
        ("null", "returned 'null'; expected a ModelConfig that holds a dict"),
        ('{"no_such": 1}', 'returned no valid configuration: .*no field named "no_such"'),
        ('{"max_batch_size": "x"}', "returned no valid configuration: .*max_batch_size"),
        ('{"max_batch_size": 4.5}', "returned no valid configuration: .*4.5"),
        ('{"input": [{"name": "\\ud800"}]}', "returned no valid configuration: "),
        ('{"input": 5}', "returned no valid configuration: "),
        ('{"input": [[1]]}', "returned no valid configuration: "),
        ('{"max_batch_size": NaN}', "returned no valid configuration: "),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "returned no valid configuration: "),
        ('{"a":' * 100_000, "returned no valid configuration: "),
        ("[" * 5_000_000, "of 5000000 characters; expected at most 4194304"),
        ('{"input": [{"name": "IN"}]}', "model input 'IN' must specify 'data_type' for m"),
        (
            '{"input": [{"name": "IN", "data_type": "TYPE_INT8"}]}',
            "model input 'IN' must specify 'dims' for m",
        ),
        ('{"max_batch_size": -1}', "'max_batch_size' must be non-negative value for m"),
        ('{"ensemble_scheduling": {}}', "ensemble scheduling cannot be set for model 'm'"),
    ],
)
def test_malformed_configurations_are_refused(completed, returned, text):
    with pytest.raises(BridgeError, match=text) as caught:
        completed(WHOLE, lambda _: returned)
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_an_incomplete_draft_that_nobody_completes_is_refused(completed):
    with pytest.raises(BridgeError, match="model input 'IN' must specify 'data_type' for m"):
        completed('input [ { name: "IN" } ]\n', lambda _: None)


def test_a_draft_is_checked_but_for_its_tensors(tmp_path):
    directory = write_model(tmp_path, "max_batch_size: -1\n" + WHOLE)
    with pytest.raises(BridgeError, match="must be non-negative"):
        load_model_config(directory, gpu_count=0, draft=True)


def test_without_completion_there_must_be_a_whole_file(tmp_path):
    directory = write_model(tmp_path, None)
    with pytest.raises(BridgeError, match="failed to open text file for read"):
        load_model_config(directory, gpu_count=0)
    (directory / "config.pbtxt").write_text('input [ { name: "IN" } ]\n')
    with pytest.raises(BridgeError, match="must specify 'data_type'"):
        load_model_config(directory, gpu_count=0)


def test_notices_are_those_of_the_draft(completed):
    whole = completed("optimization { priority: PRIORITY_MAX }\n" + WHOLE, lambda _: None)
    assert len(whole.notices) == 1
    assert "optimization.priority" in whole.notices[0]


def test_another_version_policy(completed, tmp_path):
    whole = completed(WHOLE, returns(lambda c: c.set_max_batch_size(8)))
    (tmp_path / "other").mkdir()
    directory = write_model(tmp_path / "other", "version_policy { all { } }\n")
    other = load_model_config(directory, gpu_count=0, draft=True)
    changed = whole.with_version_policy(other)
    assert (changed.version_policy.kind, changed.max_batch_size) == ("all", 8)
    assert changed.to_dict()["version_policy"] == {"all": {}}
    assert whole.to_dict()["version_policy"] == {"latest": {"num_versions": 1}}
