"""Changes of settings for logs and traces, over both protocols."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.errors import ErrorCode
from gpubridge.protocol.control import log_changes, log_document, trace_changes, trace_document
from gpubridge.protocol.grpc import control as grpc
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.schema import message_class
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import TRACE_LEVELS, TraceSettings
from tests.fuzz.budget import fuzzed, mutations
from tests.fuzz.json_values import VALUES, json_bytes
from tests.fuzz.refusals import tried

_REFUSALS = (
    ErrorCode.INVALID_ARG,
    ErrorCode.INTERNAL,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED,
)
_NUMBERS = st.sampled_from([0, 1, 5, -1, -2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32])
_TEXTS = st.one_of(_NUMBERS.map(str), st.sampled_from(["5x", "9" * 5000, "٣", ""]))
_LEVELS = st.lists(st.sampled_from(["TIMESTAMPS", "TENSORS", "OFF", "MAX"]), max_size=2)
_LOG = {
    "log_info": st.booleans(),
    "log_warning": st.booleans(),
    "log_error": st.booleans(),
    "log_verbose_level": _NUMBERS,
    "log_format": st.sampled_from(["default", "ISO8601", ""]),
}
_TRACE = {
    "trace_level": _LEVELS,
    "trace_rate": _TEXTS,
    "trace_count": _TEXTS,
    "log_frequency": _TEXTS,
    "trace_mode": st.sampled_from(["triton", "opentelemetry"]),
}


def _some(kinds):
    """A few members: one that is wrong refuses all, so most have a value of their kind."""
    right = st.sampled_from(sorted(kinds)).flatmap(
        lambda name: st.tuples(st.just(name), kinds[name])
    )
    wrong = st.tuples(st.sampled_from([*kinds, "log_file", "trace_file"]), VALUES)
    member = st.integers(0, 9).flatmap(lambda n: right if n else wrong)
    return st.lists(member, max_size=3).map(dict)


def _documents(kinds):
    bodies = _some(kinds).map(json_bytes)
    return st.integers(0, 3).flatmap(lambda n: bodies if n else mutations(bodies, 2))


@st.composite
def _log_messages(draw):
    message = message_class("LogSettingsRequest")()
    for name, value in draw(_some(_LOG)).items():
        if type(value) is bool:
            message.settings[name].bool_param = value
        elif type(value) is int and 0 <= value < 1 << 32:
            message.settings[name].uint32_param = value
        else:
            message.settings[name].string_param = repr(value) if type(value) is not str else "x"
    return message.SerializeToString()


@st.composite
def _trace_messages(draw):
    message = message_class("TraceSettingRequest")()
    for name, value in draw(_some(_TRACE)).items():
        told = [each for each in (value if type(value) is list else [value]) if _is_text(each)]
        message.settings[name].value.extend(told)
    return message.SerializeToString()


def _grpc_log_changes(data):
    return grpc.log_changes(parse_message("LogSettingsRequest", data))


def _grpc_trace_changes(data):
    return grpc.trace_changes(parse_message("TraceSettingRequest", data))


def _is_text(value):
    return type(value) is str and value.isprintable()


@fuzzed(3)
@given(_documents(_LOG), st.one_of(_log_messages(), mutations(_log_messages()), st.binary()))
def test_settings_of_logs_are_understood_or_refused(document, message):
    """Settings that are understood are reported to clients in a form that means the same."""
    for changes in (_change(log_changes, document), _change(_grpc_log_changes, message)):
        settings = replace(LogSettings(), **changes)
        assert {settings.info, settings.warning, settings.error} <= {True, False}
        assert settings.verbose_level in range(1 << 32)
        assert settings.format in LOG_FORMATS
        told = log_document(settings)
        assert told.pop("log_file") == ""
        assert replace(LogSettings(), **log_changes(json_bytes(told))) == settings


@fuzzed(3)
@given(_documents(_TRACE), st.one_of(_trace_messages(), mutations(_trace_messages()), st.binary()))
def test_settings_of_traces_are_understood_or_refused(document, message):
    """Likewise; what is cleared is as it was in the beginning."""
    for changes in (_change(trace_changes, document), _change(_grpc_trace_changes, message)):
        # The mode cannot be changed while a server runs.
        assert type(changes.pop("mode", "")) is str
        settings = replace(TraceSettings(), **{k: v for k, v in changes.items() if v is not None})
        assert set(settings.level) <= set(TRACE_LEVELS)
        assert settings.rate in range(1 << 32)
        assert settings.log_frequency in range(1 << 32)
        assert settings.count == -1 or 0 < settings.count < 1 << 31
        told = trace_document(settings)
        assert told.pop("trace_file") == ""
        assert replace(TraceSettings(), **trace_changes(json_bytes(told))) == settings


def _change(change, body):
    """Return the change that a body asks for; none where it is refused."""
    changes, refusal = tried(change, body)
    if refusal is None:
        return changes
    assert refusal.code in _REFUSALS
    return {}
