"""config.pbtxt to ModelConfig: what is accepted, and what is filled in."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.config import (
    InstanceGroup,
    TensorSpec,
    VersionPolicy,
    complete_model_config,
    load_model_config,
    parse_model_config,
    unsupported_features,
)
from gpubridge.errors import BridgeError
from gpubridge.model_io import InputForm, check_inputs
from tests.unit.model_configs import INPUT, MINIMAL, OUTPUT, PYTHON, model_config, write_model


def load(repository, config, gpu_count=0):
    return load_model_config(write_model(repository, config), gpu_count=gpu_count)


class TestAccepted:
    def test_equal_declarations_count_once_with_a_notice(self, tmp_path):
        config = load(tmp_path, MINIMAL + OUTPUT + INPUT + INPUT)
        assert [spec.name for spec in (*config.inputs, *config.outputs)] == ["X", "Y"]
        assert len(config.message.input) == len(config.message.output) == 1
        said = "is declared more than once in the same way; one declaration is enough"
        twice = [f"model 'm': {name} {said}" for name in ("input 'X'", "input 'X'", "output 'Y'")]
        assert list(config.notices) == twice

    def test_an_ensemble_may_declare_an_output_twice(self, tmp_path):
        step = 'step { model_name: "n" input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
        text = f'platform: "ensemble" {INPUT}{OUTPUT}{OUTPUT}ensemble_scheduling {{ {step} }}'
        config = load(tmp_path, text)
        assert [spec.name for spec in config.outputs] == ["Y"]
        assert len(config.notices) == 1

    def test_every_field_of_a_full_configuration_is_read(self, tmp_path):
        config = load(
            tmp_path,
            PYTHON
            + """
            max_batch_size: 8
            input [
              { name: "A" data_type: TYPE_STRING dims: [ -1, 3 ] optional: true },
              { name: "B" data_type: TYPE_BF16 dims: [ 1 ] reshape { shape: [ ] } },
              { name: "C" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
            ]
            output { name: "A" data_type: TYPE_BOOL dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
            instance_group [ { count: 2 kind: KIND_CPU }, { name: "g" kind: KIND_MODEL } ]
            parameters { key: "k" value { string_value: "v" } }
            default_model_filename: "other.py"
            version_policy { specific { versions: [ 3, 1 ] } }
            model_transaction_policy { decoupled: true }
            """,
        )
        assert config.name == "m"
        assert config.backend == "python"
        assert config.max_batch_size == 8
        assert config.inputs == (
            TensorSpec("A", "BYTES", (-1, 3), optional=True),
            TensorSpec("B", "BF16", (1,), reshape=()),
            TensorSpec("C", "INT64", (-1,), allow_ragged_batch=True),
        )
        assert config.outputs == (TensorSpec("A", "BOOL", (2,), reshape=(1, 2)),)
        assert config.instance_groups == (
            InstanceGroup("m_0", 2, "KIND_CPU"),
            InstanceGroup("g", 1, "KIND_MODEL"),
        )
        assert config.parameters == {"k": "v"}
        assert config.default_model_filename == "other.py"
        assert config.version_policy == VersionPolicy("specific", versions=(3, 1))
        assert config.decoupled

    def test_defaults_of_a_minimal_configuration(self, tmp_path):
        config = load(tmp_path, MINIMAL)
        assert config.max_batch_size == 0
        assert config.default_model_filename == "model.py"
        assert config.version_policy == VersionPolicy("latest", latest=1)
        assert config.instance_groups == (InstanceGroup("m", 1, "KIND_CPU"),)
        assert not config.decoupled
        assert config.notices == ()
        assert unsupported_features(config) == []

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ("version_policy { all { } }", VersionPolicy("all")),
            ("version_policy { }", VersionPolicy("all")),
            ("version_policy { latest { num_versions: 3 } }", VersionPolicy("latest", latest=3)),
            ("version_policy { latest { } }", VersionPolicy("latest", latest=0)),
        ],
    )
    def test_version_policy(self, tmp_path, policy, expected):
        assert load(tmp_path, MINIMAL + policy).version_policy == expected

    @pytest.mark.parametrize("rest", ["", "default_model_filename: 'model.py'"])
    def test_backend_is_python_where_only_a_model_py_speaks(self, tmp_path, rest):
        assert load(tmp_path, INPUT + OUTPUT + rest).backend == "python"

    @pytest.mark.parametrize(
        ("dims", "shape"),
        [
            ("[ 4 ]", "[ 2, 2 ]"),
            ("[ -1, 4 ]", "[ -1, 2, 2 ]"),
            ("[ 2, -1, 4, -1, 6 ]", "[ 2, -1, 2, 2, -1, 3, 2 ]"),
            ("[ -1, 1 ]", "[ -1 ]"),
        ],
    )
    def test_reshape_that_keeps_the_size(self, tmp_path, dims, shape):
        tensor = (
            f'input {{ name: "X" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }}'
        )
        assert load(tmp_path, PYTHON + tensor).inputs[0].reshape is not None

    def test_text_format_in_all_its_spellings(self, tmp_path):
        config = load(
            tmp_path,
            "backend: 'py' \"thon\", max_batch_size: 0x10; # comment\n"
            'input < name: "X" data_type: 11 dims: 4 dims: 5 >',
        )
        assert config.max_batch_size == 16
        assert config.inputs == (TensorSpec("X", "FP32", (4, 5)),)

    def test_the_message_given_is_not_changed(self, tmp_path):
        message = parse_model_config(MINIMAL, "text")
        before = message.SerializeToString(deterministic=True)
        completed = complete_model_config(message, write_model(tmp_path, None), gpu_count=1)
        assert message.SerializeToString(deterministic=True) == before
        assert completed.message.name == "m"


class TestInstanceGroups:
    @pytest.mark.parametrize(
        ("text", "gpu_count", "expected"),
        [
            ("", 2, InstanceGroup("m", 1, "KIND_GPU", (0, 1))),
            ("{ kind: KIND_GPU }", 2, InstanceGroup("m_0", 1, "KIND_GPU", (0, 1))),
            ("{ kind: KIND_GPU gpus: [ 1 ] }", 2, InstanceGroup("m_0", 1, "KIND_GPU", (1,))),
            ("{ count: 3 }", 0, InstanceGroup("m_0", 3, "KIND_CPU")),
            ("{ count: 3 }", 1, InstanceGroup("m_0", 3, "KIND_GPU", (0,))),
            ("{ gpus: [ 1 ] }", 2, InstanceGroup("m_0", 1, "KIND_GPU", (1,))),
            ("{ kind: KIND_CPU }", 2, InstanceGroup("m_0", 1, "KIND_CPU")),
            ("{ kind: KIND_MODEL }", 2, InstanceGroup("m_0", 1, "KIND_MODEL")),
            ("{ count: 0 passive: true kind: KIND_CPU }", 0,
             InstanceGroup("m_0", 1, "KIND_CPU")),
        ],
    )  # fmt: skip
    def test_resolved(self, tmp_path, text, gpu_count, expected):
        config = load(tmp_path, MINIMAL + (f"instance_group [ {text} ]" if text else ""), gpu_count)
        assert config.instance_groups == (expected,)
        assert config.notices == ()

    @pytest.mark.parametrize(
        ("group", "gpu_count", "fallback", "kind", "why"),
        [
            ("gpus: [ 0, 3 ]", 1, "none", "AUTO", "not all of the GPUs [0, 3] exist"),
            ("kind: KIND_GPU gpus: 0", 0, "host", "GPU", "there is no GPU"),
        ],
    )
    def test_on_the_host_for_want_of_a_gpu(self, tmp_path, group, gpu_count, fallback, kind, why):
        model_dir = write_model(tmp_path, MINIMAL + f"instance_group [ {{ {group} }} ]")
        config = load_model_config(model_dir, gpu_count=gpu_count, gpu_fallback=fallback)
        assert config.instance_groups == (InstanceGroup("m_0", 1, "KIND_CPU"),)
        said = f"model 'm', instance group 'm_0': KIND_{kind} runs on the host, because {why}"
        assert config.notices == (said,)

    def test_fallback_does_not_hide_a_wrong_gpu_id(self, tmp_path):
        model_dir = write_model(tmp_path, MINIMAL + "instance_group [ { kind: KIND_GPU gpus: 7 } ]")
        with pytest.raises(BridgeError, match="unsupported gpu id 7"):
            load_model_config(model_dir, gpu_count=1, gpu_fallback="host")


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_survives_as_a_parameter(value):
    escaped = "".join(f"\\{byte:03o}" for byte in value.encode())
    text = f'{PYTHON}parameters {{ key: "k" value {{ string_value: "{escaped}" }} }}'
    message = parse_model_config(text, "text")
    assert complete_model_config(message, Path("m"), gpu_count=0).parameters == {"k": value}


def test_an_optional_input_in_place_of_a_required_one_reaches_the_model_with_one_warning(caplog):
    config = model_config("A FP32 [1];B FP32 [1] optional: true;C FP32 [1] optional: true")
    for name in "B", "B", "C":
        check_inputs("", [InputForm(name, "FP32", (1,), 4)], config)
    (warning,) = caplog.messages
    assert "without the required input(s) ['A']: these had input(s) ['B']" in warning
