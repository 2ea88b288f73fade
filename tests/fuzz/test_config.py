"""Texts of config.pbtxt: a configuration that can be told, or an error of ours that says where."""

import json
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.config import (
    ModelConfig,
    finish_model_config,
    load_model_config,
    unsupported_features,
)
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.grpc.messages import encode_message
from gpubridge.protocol.metadata import model_metadata
from tests.fuzz.budget import fuzzed, mutations

_PARTS = [
    b'name: "m"',
    b'backend: "python"',
    b"max_batch_size: 8",
    b"max_batch_size: -1",
    b'input { name: "A" data_type: TYPE_FP32 dims: [ -1, 3 ] optional: true }',
    b'input [ { name: "B" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } } ]',
    b'input { name: "C" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }',
    b'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }',
    b'output { name: "L" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "../x" }',
    b"instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_GPU gpus: [ 0 ] } ]",
    b'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "v" } }',
    b"version_policy { specific { versions: [ 3, 1 ] } }",
    b"version_policy { latest { num_versions: 99999999999 } }",
    b"model_transaction_policy { decoupled: true }",
    b"dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }",
    b"dynamic_batching { priority_levels: 3 default_priority_level: 9 }",
    b"dynamic_batching { default_queue_policy { timeout_action: DELAY max_queue_size: 2 } }",
    b"sequence_batching { direct { } max_sequence_idle_microseconds: 5 }",
    (
        b'sequence_batching { oldest { max_candidate_sequences: 2 } control_input { name: "START" '
        b"control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"
    ),
    b'sequence_batching { state { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: 1 } }',
    b"response_cache { enable: true }",
    b'ensemble_scheduling { step { model_name: "x" model_version: -1 } }',
    b'platform: "ensemble"',
    b'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" source_input: "A" }',
    b'model_warmup { name: "w" batch_size: 1 }',
    b"optimization { graph { level: 1 } input_pinned_memory { enable: true } }",
    b"# a comment \xc3\xa9",
]
_CONFIGS = st.lists(st.sampled_from(_PARTS), max_size=8).map(b"\n".join)
_TEXTS = st.one_of(
    _CONFIGS,
    mutations(_CONFIGS),
    mutations(_CONFIGS, 1),
    st.binary(max_size=60),
    st.integers(1, 3000).map(lambda depth: b"input { " * depth),
    st.integers(1, 3000).map(lambda depth: b"input [ " * depth),
)


def test_a_text_is_a_configuration_or_refused(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()

    @fuzzed(4)
    @given(_TEXTS, st.sampled_from([0, 2]))
    def load(text: bytes, gpus: int) -> None:
        (directory / "config.pbtxt").write_bytes(text)
        try:
            config = load_model_config(directory, gpu_count=gpus)
        except BridgeError as error:
            refused = error
        else:
            unsupported_features(config)
            encode_message("ModelConfigResponse", config=config.message)
            encode_message("ModelMetadataResponse", **model_metadata(config, [1]))
            return
        assert refused.code == ErrorCode.INVALID_ARG
        refused.message.encode(errors="strict")

    load()


_WORDS = """
    name max_batch_size input output dims data_type optional reshape shape dynamic_batching
    sequence_batching oldest direct state ensemble_scheduling step model_transaction_policy
    decoupled preferred_batch_size priority_queue_policy label_filename parameters x
"""
_NAMES = st.sampled_from(_WORDS.split())
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["TYPE_FP32", "TYPE_NONE", "IN", "../x", "\ud800"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)
_TENSOR = st.fixed_dictionaries(
    {"name": st.one_of(st.just("IN"), _VALUES), "data_type": st.just("TYPE_FP32")},
    optional={"dims": st.one_of(st.just([1]), _VALUES), "optional": _VALUES, "reshape": _VALUES},
)
_RETURNED = st.one_of(
    _VALUES,
    st.dictionaries(_NAMES, st.one_of(_VALUES, st.lists(_TENSOR, max_size=2)), max_size=4),
).map(json.dumps)


def test_returned_configurations_are_valid_or_refused(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    drafts = [
        load_model_config(directory, gpu_count=0, draft=True, override=text)
        for text in ("{}", '{"max_batch_size": 4, "dynamic_batching": {}}')
    ]

    @fuzzed(4)
    @given(
        st.sampled_from(drafts),
        st.one_of(
            _RETURNED,
            mutations(_RETURNED.map(str.encode)).map(
                lambda raw: raw.decode(errors="surrogateescape")
            ),
            st.text(),
        ),
    )
    def finish(draft: ModelConfig, text: str) -> None:
        try:
            config = finish_model_config(draft, text, directory, gpu_count=0)
        except BridgeError as error:
            refused = error
        else:
            encode_message("ModelConfigResponse", config=config.message)
            encode_message("ModelMetadataResponse", **model_metadata(config, [1]))
            return
        assert refused.code == ErrorCode.INVALID_ARG
        refused.message.encode(errors="strict")

    finish()
