"""Every configuration that is refused, with the exact message."""

import os

import pytest

from gpubridge.config import load, load_model_config, parse_model_config
from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.model_configs import INPUT, MINIMAL, OUTPUT, PYTHON, cases, write_model


def refusal(repository, config, gpu_count=0):
    with pytest.raises(BridgeError) as caught:
        load_model_config(write_model(repository, config), gpu_count=gpu_count)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message.replace(str(repository), "REPO")


NAMES = {
    "MINIMAL": MINIMAL,
    "PYTHON": PYTHON,
    "INPUT": INPUT,
    "OUTPUT": OUTPUT,
    "NAMED": 'name: "X" data_type: TYPE_FP32',
    "ON_THE_HOST": "; --gpu-fallback=host runs such instances on the CPU",
    "BACKENDS": (
        "expected one of python, image_preproc, onnxruntime, pytorch as backend in REPO/m/config.pbtxt"
    ),
}

# The message that Triton 2.51 logs for the same configuration, word for word.
REFUSED_AS_TRITON_DOES = r"""
$PYTHON output { data_type: TYPE_FP32 dims: [ 4 ] }
    model output must specify 'name' for m
$PYTHON output { name: "X" data_type: TYPE_INVALID dims: [ 4 ] }
    model output 'X' must specify 'data_type' for m
$PYTHON input { $NAMED dims: [ ] } max_batch_size: 4
    model input 'X' must specify 'dims' for m
$PYTHON output { $NAMED dims: [ -2 ] }
    model output 'X' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m
$PYTHON input { $NAMED dims: [ 1 ] reshape { } }
    model input 'X' cannot have empty reshape for non-batching model as scalar tensors are not supported for
    m
$PYTHON input { $NAMED dims: [ 4 ] reshape { } } max_batch_size: 4
    model input 'X' has different size for dims and reshape for m
$PYTHON input { $NAMED dims: [ 1 ] reshape { shape: [ 0 ] } }
    model input 'X' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for
    m
$PYTHON output { $NAMED dims: [ 4 ] reshape { shape: [ 2, 3 ] } }
    model output 'X' has different size for dims and reshape for m
$PYTHON input { $NAMED dims: [ 4 ] reshape { shape: [ -1 ] } }
    model input 'X' has different size for dims and reshape for m
$PYTHON input { $NAMED dims: [ -1, -1 ] reshape { shape: [ -1 ] } }
    model input 'X' has different number of variable-size dimensions for dims and reshape for m
$PYTHON input { $NAMED dims: [ 2, -1, 4 ] reshape { shape: [ 4, -1, 2 ] } }
    model input 'X' has different size for dims and reshape for m
$PYTHON input { $NAMED dims: [ 4 ] is_shape_tensor: true }
    shape tensors are only supported for TensorRT platform for m
$PYTHON output { $NAMED dims: [ 4 ] is_non_linear_format_io: true }
    Non-linear IO format is only supported for the TensorRT platform for m
$PYTHON input { $NAMED dims: [ 4 ] format: FORMAT_NHWC }
    model input NHWC/NCHW require 3 dims for m
$PYTHON output { $NAMED dims: [ 4 ] label_filename: "l.txt" }
    failed to open text file for read REPO/m/l.txt: No such file or directory
$MINIMAL instance_group [ { kind: KIND_MODEL gpus: [ 0 ] } ]
    instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs
$MINIMAL instance_group [ { }, { kind: KIND_GPU } ]
    instance group m_1 of model m has kind KIND_GPU but no GPUs are available$ON_THE_HOST
$MINIMAL instance_group [ { profile: "1" } ]
    instance group m_0 of model m and platform specifies profile field which is only supported for TensorRT
    models
$MINIMAL max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }
    dynamic batching preferred size must be <= max batch size for m
$MINIMAL max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 0 ] }
    dynamic batching preferred size must be positive for m
$MINIMAL max_batch_size: 4 sequence_batching { oldest { preferred_batch_size: 8 } }
    sequence batching preferred batch size must be <= max batch size for m
$MINIMAL max_batch_size: 4 dynamic_batching { priority_levels: 2 }
    default priority level must be in range [1, 2] for m
$MINIMAL max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1
priority_queue_policy { key: 5 value { } } }
    priority queue policy must have priority level in range [1, 2] for m
$MINIMAL response_cache { enable: true } model_transaction_policy { decoupled: true }
    Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable
    the response cache.
$MINIMAL response_cache { enable: true } sequence_batching { }
    Response Cache does not currently support model m with sequence batching scheduler. Please disable the
    response cache.
$MINIMAL ensemble_scheduling { }
    ensemble scheduling cannot be set for model 'm' whose platform is not ensemble
platform: "ensemble" $INPUT
    ensemble scheduling must be set for ensemble m whose platform is ensemble
platform: "ensemble" ensemble_scheduling { } $INPUT
    must specify 'step' for ensemble 'm'
platform: "ensemble" ensemble_scheduling { step { } } $MINIMAL
    Ensemble model 'm' must have platform type 'ensemble' and empty backend type
backend: "onnxruntime" platform: "pytorch_libtorch" $INPUT $OUTPUT
    unexpected 'platform' and 'backend' pair, got:pytorch_libtorch, onnxruntime
platform: "ensemble" ensemble_scheduling { step { } } instance_group { } $INPUT
    instance group should not be specified for ensemble 'm'
platform: "ensemble" ensemble_scheduling { step { } } optimization { } $INPUT
    optimization should not be specified for ensemble 'm'
"""

TOO_MANY = {
    "sequence_batching { oldest { max_candidate_sequences: 2000000 } }": "max_candidate_sequences",
    "max_batch_size: 2000000 sequence_batching { }": "max_batch_size of sequences",
    'model_warmup { name: "w" count: 4000000000 }': "count of warmup sample 'w'",
    "".join(f'parameters {{ key: "{i}" value {{ }} }}' for i in range(10_001)): "parameters",
}


@pytest.mark.parametrize(("config", "what"), TOO_MANY.items(), ids=TOO_MANY.values())
def test_counts_are_bounded(tmp_path, config, what):
    assert refusal(tmp_path, MINIMAL + config).startswith(f"{what} of model 'm': expected at most ")


UNKNOWN_NAMES = {
    'python_lib: "x"': 'no field named "python_lib". A Python model has backend: "python".',
    "instance_groups [ { count: 1 } ]": 'named "instance_groups". Did you mean instance_group?',
    'input { name: "X" dtype: TYPE_FP32 }': 'no field named "dtype". Did you mean data_type?',
    'input { name: "X" data_type: FP32 }': "no value named FP32. Did you mean TYPE_FP32?",
}


@pytest.mark.parametrize(("config", "told"), UNKNOWN_NAMES.items())
def test_unknown_names_are_told_the_real_ones(config, told):
    with pytest.raises(BridgeError) as caught:
        parse_model_config(config, "config.pbtxt")
    assert caught.value.message.endswith(told)


# Triton says these in other words, or lets the model through and fails later.
REFUSED_IN_OUR_WORDS = r"""
backend: "dali"
    unable to find backend library for backend 'dali' of model 'm': there is none of that name here,
    $BACKENDS (your own backend is a file dali/model.py in the directory that --backend-directory
    names)
platform: "tensorrt_plan"
    unable to find backend library for backend 'tensorrt' of model 'm': there is none of that name here,
    $BACKENDS (your own backend is a file tensorrt/model.py in the directory that
    --backend-directory names)
platform: "bogus"
    unexpected platform type 'bogus' for m: $BACKENDS
default_model_filename: "other.py"
    Could not determine backend for model 'm' with no backend in model configuration: $BACKENDS
$MINIMAL runtime: "libother.so"
    unable to find backend library 'libother.so' for model 'm': this server runs Python models itself;
    remove the field 'runtime'
$MINIMAL input { name: "X" data_type: TYPE_INT32 dims: [ 4 ] }
    model input 'X' is declared more than once for m, in different ways; every input needs a name of its own
$MINIMAL output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
    model output 'Y' is declared more than once for m, in different ways; every output needs a name of its
    own
$PYTHON input { name: "X" data_type: 99 dims: [ 4 ] }
    model input 'X' has unknown 'data_type' 99 for m
$MINIMAL metric_tags { key: "a b" value: "c" }
    metric_tags of model m: expected a key of letters, digits and underscores that begins with no digit, got
    'a b'
$MINIMAL instance_group [ { name: "a\nb" } ]
    instance group 'a\nb' of model m: expected a name of at most 1024 characters, none of them a control
    character
$MINIMAL instance_group [ { count: -1 } ]
    instance group m_0 of model m has count -1; expected at least 1
$MINIMAL instance_group [ { kind: 9 } ]
    instance group m_0 of model m has unexpected kind 9
$MINIMAL instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]
    instance group m_0 of model m specifies invalid or unsupported gpu id 0. GPUs of this machine are: none$ON_THE_HOST
$MINIMAL default_model_filename: "../1/model.py"
    default_model_filename '../1/model.py' of model 'm' leads out of the version directory; give a path
    inside it, such as model.py
$MINIMAL parameters { key: "INPUT_PLACEMENT" value { string_value: "gpu" } }
    Incorrect value for INPUT_PLACEMENT: 'gpu' in model 'm', expected one of source, device, host
$MINIMAL parameters { key: "INPUT_SHARING" value { string_value: "" } }
    Incorrect value for INPUT_SHARING: '' in model 'm', expected one of copy, share
$MINIMAL dynamic_batching { default_queue_policy { timeout_action: 7 } }
    dynamic_batching.default_queue_policy.timeout_action: expected one of REJECT, DELAY, got the number 7
$MINIMAL dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: 7 } } }
    dynamic_batching.priority_queue_policy.timeout_action: expected one of REJECT, DELAY, got the number 7
$PYTHON input { $NAMED dims: [ 4 ] format: 9 }
    input.format: expected one of FORMAT_NONE, FORMAT_NHWC, FORMAT_NCHW, got the number 9
$MINIMAL sequence_batching { control_input { name: "X" } }
    model input 'X' of m: expected one source, got an input of clients and a control input; give one of them
    another name
$MINIMAL sequence_batching { control_input { name: "C" } state { input_name: "C" output_name: "S" } }
    model input 'C' of m: expected one source, got a control input and a state; give one of them another name
"""


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "message"), cases(REFUSED_AS_TRITON_DOES + REFUSED_IN_OUR_WORDS, NAMES)
    )
    def test_with_these_words(self, tmp_path, config, message):
        assert refusal(tmp_path, config) == message

    @pytest.mark.parametrize(
        ("config", "line", "column"),
        [
            ('backend: "python"\ninput {\n  data_type: TYPE_FP33\n}', 3, 14),
            ('backend: "python"\nfrobnicate: 3', 2, 1),
            ('backend: "python"\nmax_batch_size: "x"', 2, 17),
            ("max_batch_size: 99999999999", 1, 17),
            ('backend: "a"\nbackend: "b"', 2, 10),
            ("dynamic_batching { }\nsequence_batching { }", 2, 1),
            ('input [\n  { name: "X" }\n  { name: "Y" }\n]', 3, 3),
        ],
    )
    def test_syntax_with_file_line_and_column(self, tmp_path, config, line, column):
        message = refusal(tmp_path, config)
        assert message.startswith(
            f"failed to read text proto from REPO/m/config.pbtxt: {line}:{column} : "
        )

    def test_no_config_says_where_and_what_to_write(self, tmp_path):
        assert refusal(tmp_path, None) == (
            "failed to open text file for read REPO/m/config.pbtxt: No such file or directory; "
            'write there at least: backend: "python", max_batch_size, and every input and output '
            "with name, data_type and dims"
        )

    @pytest.mark.parametrize("file", ["config.pbtxt", "labels"])
    @pytest.mark.parametrize("kind", ["FIFO", "device", "endless", "long"])
    def test_a_file_that_might_never_end(self, tmp_path, file, kind):
        labelled = (
            MINIMAL + 'output { name: "Z" data_type: TYPE_FP32 dims: 1 label_filename: "labels" }'
        )
        path = write_model(tmp_path, labelled) / file
        path.unlink(missing_ok=True)
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "long":
            with path.open("wb") as long:
                long.truncate((16 << 20) + 1)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else "/proc/self/mem")
        with pytest.raises(BridgeError) as caught:
            load_model_config(tmp_path / "m", gpu_count=0)
        assert caught.value.code is ErrorCode.INVALID_ARG

    def test_config_that_is_a_directory(self, tmp_path):
        model_dir = write_model(tmp_path, None)
        (model_dir / "config.pbtxt").mkdir()
        with pytest.raises(BridgeError, match=r"config\.pbtxt: Is a directory"):
            load_model_config(model_dir, gpu_count=0)

    def test_no_model_directory(self, tmp_path):
        with pytest.raises(BridgeError, match="does not exist") as caught:
            load_model_config(tmp_path / "nowhere", gpu_count=0)
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_more_inputs_than_are_parsed_in_a_moment_are_refused_unparsed(tmp_path, monkeypatch):
    many = 50_000
    monkeypatch.setattr(load, "text_format", None)
    monkeypatch.setattr(load, "message_from_json", None)
    said = (
        f"expected at most 32768 inputs, outputs and other messages in a configuration, got {many}"
    )
    for parse, text in (
        (lambda text: load.parse_model_config(text, "config.pbtxt"), "input { }" * many),
        (load.parse_config_override, f'{{"input": [{", ".join(["{}"] * (many - 1))}]}}'),
    ):
        with pytest.raises(BridgeError, match=said):
            parse(text)
