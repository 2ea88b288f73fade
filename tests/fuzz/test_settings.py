"""Changes of settings for logs and traces, over both protocols."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.errors import ErrorCode
from gpubridge.protocol.grpc.settings import (
    log_changes as grpc_log_changes,
    trace_changes as grpc_trace_changes,
)
from gpubridge.protocol.settings import log_changes, log_document, trace_changes, trace_document
from gpubridge.telemetry.logs import LogSettings
from gpubridge.telemetry.trace_settings import TraceSettings
from tests.fuzz.budget import fuzzed, mutations
from tests.fuzz.json_values import VALUES, json_bytes
from tests.fuzz.refusals import tried

_REFUSALS = (
    ErrorCode.INVALID_ARG,
    ErrorCode.INTERNAL,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED,
)
_SETTINGS = st.dictionaries(
    st.sampled_from(
        [
            "log_info",
            "log_verbose_level",
            "log_format",
            "log_file",
            "trace_level",
            "trace_rate",
            "trace_count",
            "log_frequency",
            "trace_mode",
        ]
    ),
    st.one_of(VALUES, st.sampled_from(["-1", "5x", "9" * 5000, "٣", ["TIMESTAMPS"]])),
)


@fuzzed()
@given(
    st.one_of(_SETTINGS.map(json_bytes), mutations(_SETTINGS.map(json_bytes), 2)),
    st.binary(max_size=60),
)
def test_settings_are_understood_or_refused(document, message):
    """What is understood are settings: told to clients, they are understood as the same."""
    for changes in (_change(log_changes, document), _change(grpc_log_changes, message)):
        settings = replace(LogSettings(), **changes)
        told = json.loads(log_document(settings))
        assert told.pop("log_file") == ""
        assert replace(LogSettings(), **log_changes(json_bytes(told))) == settings
    _, by_grpc = _change(grpc_trace_changes, message) or ("", {})
    for changes in (_change(trace_changes, document), by_grpc):
        settings = replace(TraceSettings(), **{k: v for k, v in changes.items() if v is not None})
        told = json.loads(trace_document(settings))
        assert told.pop("trace_file") == ""
        assert replace(TraceSettings(), **trace_changes(json_bytes(told))) == settings


def _change(change, body):
    """Return the change that a body asks for; none where it is refused."""
    changes, refusal = tried(change, body)
    if refusal is None:
        return changes
    assert refusal.code in _REFUSALS
    return {}
