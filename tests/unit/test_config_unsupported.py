"""Unsupported settings of a configuration, which are reported and never ignored."""

import numpy as np
import pytest

from gpubridge.config import load_model_config, unsupported_features
from gpubridge.engine.scheduling.sequence_requests import sequence_batching, state_settings
from gpubridge.pb_utils import Tensor
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.transport.context import RequestContext
from tests.unit.model_configs import INPUT, MINIMAL, OUTPUT, PYTHON, cases, write_model


def load(repository, config):
    return load_model_config(write_model(repository, config), gpu_count=0)


WITHOUT_EFFECT = """
platform: "x"
    model 'm': the field 'platform' has no effect on a Python model
optimization { eager_batching: true }
    model 'm': the field 'optimization.eager_batching' has no effect on a Python model
parameters { key: "INPUT_PLACEMNT" value { string_value: "host" } }
    model 'm': the parameter 'INPUT_PLACEMNT' has no effect on the server; did you mean INPUT_PLACEMENT?
instance_group { host_policy: "h" }
    model 'm', instance group 'm_0': the field 'host_policy' has no effect here
"""


class TestNotServedYet:
    @pytest.mark.parametrize(
        ("rest", "field"),
        [
            ("instance_group [ { passive: true } ]", "instance_group 'm_0' passive"),
            ("model_repository_agents { agents { } }", "model_repository_agents"),
            ("batch_input { }", "batch_input"),
            ("batch_output { }", "batch_output"),
        ],
    )
    def test_is_reported_by_field_and_model(self, tmp_path, rest, field):
        (sentence,) = unsupported_features(load(tmp_path, MINIMAL + rest))
        assert sentence.startswith(f"model 'm': the field '{field}' is not supported yet: ")

    @pytest.mark.parametrize(
        ("rest", "field", "what"),
        [
            (
                "instance_group [ { rate_limiter { } } ]",
                "instance_group 'm_0' rate_limiter",
                "without limits",
            ),
            (
                'cc_model_filenames { key: "9.0" value: "f" }',
                "cc_model_filenames",
                "one model file is used",
            ),
            ("model_operations { }", "model_operations", "no operation libraries"),
        ],
    )
    def test_fields_that_triton_loads_at_its_defaults_are_notices(
        self, tmp_path, rest, field, what
    ):
        config = load(tmp_path, MINIMAL + rest)
        assert unsupported_features(config) == []
        (notice,) = config.notices
        assert notice.startswith(f"model 'm': the field '{field}' has no effect: ")
        assert what in notice

    def test_limits_that_a_flag_asks_for_are_missed(self, tmp_path):
        config = load(tmp_path, MINIMAL + "instance_group [ { rate_limiter { } } ]")
        (sentence,) = unsupported_features(config, rate_limited=True)
        assert "rate_limiter' is not supported yet" in sentence
        assert "--rate-limit asks for it" in sentence

    def test_labels(self, tmp_path):
        model_dir = write_model(
            tmp_path,
            PYTHON
            + 'output { name: "X" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "l.txt" }',
        )
        (model_dir / "l.txt").write_text("cat\ndog\n")
        config = load_model_config(model_dir, gpu_count=0)
        assert config.outputs[0].labels == (b"cat", b"dog")
        assert unsupported_features(config) == []

    def test_ensemble(self, tmp_path):
        config = load(
            tmp_path,
            'platform: "ensemble" ensemble_scheduling { step { model_name: "a" } }'
            + INPUT
            + OUTPUT,
        )
        assert config.backend == ""
        assert config.instance_groups == ()
        assert unsupported_features(config) == []

    @pytest.mark.parametrize(
        "rest",
        [
            "response_cache { enable: false }",
            "model_transaction_policy { decoupled: true }",
            "model_repository_agents { }",
        ],
    )
    def test_switched_off_is_not_reported(self, tmp_path, rest):
        assert unsupported_features(load(tmp_path, MINIMAL + rest)) == []

    @pytest.mark.parametrize(("rest", "notice"), cases(WITHOUT_EFFECT))
    def test_without_effect_is_noticed(self, tmp_path, rest, notice):
        config = load(tmp_path, MINIMAL + rest)
        assert config.notices == (notice,)
        assert unsupported_features(config) == []


def test_states_that_may_grow_are_served(tmp_path):
    """Each state has the size that the model gave it."""
    state = (
        'input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [-1] use_growable_memory: true '
        "use_same_buffer_for_input_output: true"
    )
    config = load(tmp_path, f"{MINIMAL}sequence_batching {{ state {{ {state} }} }}")
    assert not list(unsupported_features(config))
    states = SequenceStates(state_settings(sequence_batching(config), tmp_path), batched=False)
    context = RequestContext(state=(1, True))
    for size in (1, 3, 2):
        states.inputs((1, False))
        states.keep(context, [Tensor("T", np.full(size, 7, np.float32))])
        assert states.inputs((1, False))[0].as_numpy().tolist() == [7] * size
