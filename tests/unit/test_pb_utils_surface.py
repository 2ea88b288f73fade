"""The names models import, the logger, the host, and a model tested outside of a server."""

import importlib.util
import sys

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.pb_utils import c_module, host
from gpubridge.stub.loader import register_aliases

pytestmark = pytest.mark.both_runtimes

Failure = pb_utils.TritonModelException

# Recorded from a running Triton 2.51, plus InferenceResponse.parameters of later releases.
PB_UTILS = """
    InferenceRequest InferenceResponse Logger MetricFamily ModelConfig PreferredMemory Tensor
    TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START TRITONSERVER_REQUEST_RELEASE_ALL
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE TRITONSERVER_RESPONSE_COMPLETE_FINAL TRITON_STRING_TO_NUMPY
    Batch TritonError TritonModelException deserialize_bytes_tensor get_input_config_by_name
    get_input_tensor_by_name get_model_dir get_output_config_by_name get_output_tensor_by_name
    is_model_ready load_model numpy_to_triton_type serialize_byte_tensor triton_string_to_numpy
    triton_to_numpy_type unload_model using_decoupled_model_transaction_policy
"""
# gpubridge's own is the last.
PB_UTILS = [*PB_UTILS.split(), "device_arena"]
EMBEDDED = """
    COUNTER GAUGE HISTOGRAM InferenceRequest InferenceResponse InferenceResponseSender InferenceTrace
    Logger MemoryType Metric MetricFamily MetricKind PreferredMemory ResponseIterator SharedMemory
    TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU Tensor TritonError TritonModelException
    is_model_ready load_model shared_memory unload_model
"""
EMBEDDED = EMBEDDED.split()
METHODS = {
    "Tensor": "as_numpy device empty from_dlpack is_cpu name shape to_dlpack triton_dtype",
    "InferenceRequest": "async_exec correlation_id exec flags get_response_sender inputs "
    "is_cancelled output parameters request_id requested_output_names set_flags set_release_flags span "
    "timeout trace",
    "InferenceResponse": "error has_error output_tensors parameters",
    "Logger": "ERROR INFO LogLevel VERBOSE WARNING log log_error log_info log_verbose log_warn",
    "MetricFamily": "COUNTER GAUGE HISTOGRAM Metric",
    "InferenceTrace": "get_context",
    "Metric": "increment observe set value",
}


@pytest.fixture
def server():
    log = []
    host.attach(host.Host("/models/m/1", lambda *record: log.append(record)))
    yield log
    host.detach()


def test_every_name_is_there_and_listed():
    assert sorted(pb_utils.__all__) == sorted(PB_UTILS)
    assert sorted(c_module.__all__) == sorted(EMBEDDED)
    for name in PB_UTILS:
        assert hasattr(pb_utils, name)
    for name in EMBEDDED:
        assert hasattr(c_module, name)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_there_and_no_other(name):
    public = {method for method in dir(getattr(c_module, name)) if not method.startswith("_")}
    assert public == set(METHODS[name].split())


def test_classes_show_the_module_models_know():
    for name in EMBEDDED:
        thing = getattr(c_module, name)
        if isinstance(thing, type):
            assert thing.__module__ == "c_python_backend_utils", name
    with pytest.raises(Failure) as caught:
        pb_utils.Tensor("", np.zeros(1))
    shown = f"{caught.type.__module__}.{caught.type.__qualname__}"
    assert shown == "c_python_backend_utils.TritonModelException"


def test_enumerations_read_as_models_know_them():
    code = pb_utils.TritonError("text", pb_utils.TritonError.UNAVAILABLE).code()
    assert f"{code} {code!r}" == "__ErrorCode.UNAVAILABLE <__ErrorCode.UNAVAILABLE: 4>"
    assert str(pb_utils.Logger.INFO) == "LogLevel.INFO"
    assert f"{pb_utils.TRITONSERVER_MEMORY_GPU}" == "MemoryType.TRITONSERVER_MEMORY_GPU"
    assert str(pb_utils.MetricFamily.COUNTER) == "MetricKind.COUNTER"
    for member in (code, pb_utils.Logger.INFO, pb_utils.TRITONSERVER_MEMORY_GPU):
        assert type(member).__module__ == "c_python_backend_utils"
        assert member == int(member)


def test_shims_are_the_same_names():
    import c_python_backend_utils
    import triton_python_backend_utils

    for name in PB_UTILS:
        assert getattr(triton_python_backend_utils, name) is getattr(pb_utils, name)
    for name in EMBEDDED:
        assert getattr(c_python_backend_utils, name) is getattr(c_module, name)


def test_aliases_in_a_process_that_has_no_shims(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton_python_backend_utils", raising=False)
    monkeypatch.delitem(sys.modules, "c_python_backend_utils", raising=False)
    register_aliases()
    try:
        import c_python_backend_utils
        import triton_python_backend_utils

        for name in PB_UTILS:
            assert getattr(triton_python_backend_utils, name) is getattr(pb_utils, name)
        assert c_python_backend_utils is c_module
        # Not a module of ours, which has that name.
        with pytest.raises(AttributeError, match="'tensor'; did you mean Tensor"):
            triton_python_backend_utils.tensor  # noqa: B018
        assert importlib.util.find_spec("triton_python_backend_utils") is not None
    finally:
        sys.modules.pop("triton_python_backend_utils")
        sys.modules.pop("c_python_backend_utils")


@pytest.mark.parametrize(
    ("invented", "real"),
    [
        ("Response", "InferenceResponse"),
        ("InferRequest", "InferenceRequest"),
        ("get_input_by_name", "get_input_tensor_by_name"),
    ],
)
def test_names_that_tutorials_invent_are_told_the_real_ones(invented, real):
    with pytest.raises(
        AttributeError, match=f"has no attribute '{invented}'; did you mean {real}\\?"
    ):
        getattr(pb_utils, invented)
    assert not hasattr(pb_utils, "__wrapped__")


def test_a_real_triton_gets_its_own_module(tmp_path, monkeypatch):
    (tmp_path / "triton_python_backend_utils.py").write_text(
        "get_model_dir = 'to be set by the stub'"
    )
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    embedded = (*sys.builtin_module_names, "c_python_backend_utils")
    monkeypatch.setattr("sys.builtin_module_names", embedded)
    monkeypatch.delitem(sys.modules, "triton_python_backend_utils", raising=False)
    try:
        import triton_python_backend_utils

        assert triton_python_backend_utils.get_model_dir == "to be set by the stub"
        assert not hasattr(triton_python_backend_utils, "Tensor")
    finally:
        sys.modules.pop("triton_python_backend_utils")


def test_names_of_later_versions_say_so():
    with pytest.raises(Failure, match="is not supported by this version of gpubridge yet"):
        c_module.shared_memory.free_memory()


def test_classes_without_a_constructor_say_so():
    for name in ("InferenceResponseSender", "Metric", "ResponseIterator", "Logger"):
        with pytest.raises(TypeError, match="No constructor defined!"):
            getattr(c_module, name)()


def test_logs_go_to_the_server_with_the_callers_line(server):
    pb_utils.Logger.log_info("one")
    pb_utils.Logger.log_warn("two")
    pb_utils.Logger.log_error("three")
    pb_utils.Logger.log_verbose(b"four")
    pb_utils.Logger.log("five")
    pb_utils.Logger.log(message="six", level=pb_utils.Logger.ERROR)
    assert [(level, message) for level, message, _, _ in server] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
        (3, "four"),
        (0, "five"),
        (2, "six"),
    ]
    assert {filename for _, _, filename, _ in server} == {__file__}
    first = server[0][3]
    assert [line - first for _, _, _, line in server] == list(range(6))


def test_logs_go_to_stderr_without_a_server(capsys):
    pb_utils.Logger.log_warn("careful")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("W ")
    assert shown.err.endswith("] careful\n")
    assert __file__ in shown.err


def test_model_dir_outside_of_a_server_says_what_to_do():
    with pytest.raises(Failure, match="got no server around; in a test, replace it"):
        pb_utils.get_model_dir()


def test_datatype_functions():
    for number in range(1, 14):
        assert (
            pb_utils.numpy_to_triton_type(np.dtype(pb_utils.triton_to_numpy_type(number))) == number
        )
    assert pb_utils.triton_to_numpy_type(14) is None
    for unknown in (np.dtype("c8"), np.dtype("S3"), np.dtype(">f4"), bool, np.str_):
        assert pb_utils.numpy_to_triton_type(unknown) is None


def test_string_serialisation_functions():
    encoded = b"\1\0\0\0a\2\0\0\0bc"
    assert pb_utils.serialize_byte_tensor(np.array([b"a", b"bc"])) == encoded
    assert pb_utils.serialize_byte_tensor(np.array(["a"])) is None
