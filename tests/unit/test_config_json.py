"""A loaded configuration in Triton's JSON form.

The expected texts are what Triton 2.51 answered at ``GET /v2/models/m/config`` for the same
config.pbtxt, and what it gave models as ``args["model_config"]``.
"""

import json
from pathlib import Path

import pytest

from gpubridge.config import complete_model_config, parse_model_config
from tests.unit.model_configs import MINIMAL, PYTHON, cases

MINIMAL_AS_TRITON_PRINTS_IT = (
    '{"name":"m","platform":"","backend":"python","runtime":"","version_policy":{"latest":'
    '{"num_versions":1}},"max_batch_size":0,"input":[{"name":"X","data_type":"TYPE_FP32","format":'
    '"FORMAT_NONE","dims":[4],"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,'
    '"is_non_linear_format_io":false}],"output":[{"name":"Y","data_type":"TYPE_FP32","dims":[4],'
    '"label_filename":"","is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":'
    '[],"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":'
    '{"enable":true},"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,'
    '"eager_batching":false},"instance_group":[{"name":"m","kind":"KIND_CPU","count":1,"gpus":[],'
    '"secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],'
    '"default_model_filename":"model.py","cc_model_filenames":{},"metric_tags":{},"parameters":{},'
    '"model_warmup":[]}'
)


def complete(text):
    return complete_model_config(parse_model_config(text, "text"), Path("m"), gpu_count=0)


def test_minimal_configuration_letter_by_letter():
    assert complete(MINIMAL).to_json() == MINIMAL_AS_TRITON_PRINTS_IT


def test_dict_and_text_are_the_same():
    config = complete(MINIMAL + 'parameters { key: "\\u00e9" value { string_value: "\\n" } }')
    assert json.loads(config.to_json()) == config.to_dict()
    assert config.to_dict()["parameters"] == {"\u00e9": {"string_value": "\n"}}
    assert config.to_spaced_json() == json.dumps(config.to_dict())


def test_each_dict_is_the_callers_own():
    config = complete(MINIMAL)
    config.to_dict()["input"] = []
    assert config.to_json() == MINIMAL_AS_TRITON_PRINTS_IT


PRINTED = """
max_batch_size: 4 dynamic_batching { }
    "dynamic_batching":{"preferred_batch_size":[4],"max_queue_delay_microseconds":0,
    "preserve_ordering":false,"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{}}
dynamic_batching { }
    "dynamic_batching":{"preferred_batch_size":[],
max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 2 ] priority_levels: 2
max_queue_delay_microseconds: 100000000000 default_priority_level: 1 default_queue_policy {
timeout_action: DELAY default_timeout_microseconds: 18446744073709551615 } priority_queue_policy { key: 2
value: { max_queue_size: 3 } } }
    "dynamic_batching":{"preferred_batch_size":[2],"max_queue_delay_microseconds":100000000000,
    "preserve_ordering":false,"priority_levels":2,"default_priority_level":1,"default_queue_policy":{
    "timeout_action":"DELAY","default_timeout_microseconds":18446744073709551615,
    "allow_timeout_override":false,"max_queue_size":0},"priority_queue_policy":{"2":{
    "timeout_action":"REJECT","default_timeout_microseconds":0,"allow_timeout_override":false,
    "max_queue_size":3}}}
max_batch_size: 4 sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_READY
fp32_false_true: [ 0, 0.1 ] } } oldest { } }
    "sequence_batching":{"oldest":{"max_candidate_sequences":0,"preferred_batch_size":[4],
    "max_queue_delay_microseconds":0,"preserve_ordering":false},"max_sequence_idle_microseconds":1000000,
    "control_input":[{"name":"S","control":[{"kind":"CONTROL_SEQUENCE_READY","int32_false_true":[],
    "fp32_false_true":[0,0.1],"bool_false_true":[],"data_type":"TYPE_INVALID"}]}],"state":[],
    "iterative_sequence":false}
sequence_batching { max_sequence_idle_microseconds: 5 direct { } }
    "sequence_batching":{"direct":{"max_queue_delay_microseconds":0,"minimum_slot_utilization":0},
    "max_sequence_idle_microseconds":5,
version_policy { all { } }
    "version_policy":{"all":{}}
version_policy { }
    "version_policy":{}
version_policy { specific { versions: [ 3, 1 ] } }
    "version_policy":{"specific":{"versions":[3,1]}}
model_transaction_policy { decoupled: true }
    "model_transaction_policy":{"decoupled":true}
optimization { input_pinned_memory { enable: false } }
    "optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":false},
    "output_pinned_memory":{"enable":true},
instance_group [ { count: 0 }, { name: "g" kind: KIND_CPU rate_limiter { resources { name: "R" count: 4 }
} } ]
    "instance_group":[{"name":"m_0","kind":"KIND_CPU","count":1,"gpus":[],"secondary_devices":[],
    "profile":[],"passive":false,"host_policy":""},{"name":"g","kind":"KIND_CPU","count":1,
    "rate_limiter":{"resources":[{"name":"R","global":false,"count":4}],"priority":0},"gpus":[],
    "secondary_devices":[],
instance_group [ { secondary_devices { kind: KIND_NVDLA device_id: 2 } } ]
    "secondary_devices":[{"kind":"KIND_NVDLA","device_id":"2"}]
optimization { cuda { graph_spec { input { key: "X" value { dim: [ 4 ] } } } } }
    "graph_spec":[{"batch_size":0,"input":{"X":{"dim":["4"]}}}]
model_warmup [ { name: "w" inputs { key: "X" value: { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
} ]
    "model_warmup":[{"name":"w","batch_size":0,"inputs":{"X":{"data_type":"TYPE_FP32","dims":[4],
    "zero_data":true}},"count":0}]
"""


@pytest.mark.parametrize(("rest", "printed"), cases(PRINTED))
def test_fields_as_triton_prints_them(rest, printed):
    assert printed.replace(" ", "") in complete(MINIMAL + rest).to_json()


def test_reshape_to_a_scalar_is_kept():
    config = complete(
        PYTHON
        + "max_batch_size: 1 input "
        + '{ name: "X" data_type: TYPE_STRING dims: [ 1 ] reshape { } }'
    )
    assert '"dims":[1],"reshape":{"shape":[]},' in config.to_json()
