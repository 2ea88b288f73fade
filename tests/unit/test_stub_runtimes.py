"""A stub's two runtimes: what models see is made of compiled types, or of Python where there are none."""

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.pb_utils.request import RequestFields
from gpubridge.pb_utils.response import ResponseFields
from gpubridge.pb_utils.tensor import TensorFields
from gpubridge.tensor import native

compiled_only = pytest.mark.skipif(native.native() is None, reason=str(native.absence()))


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_variable_chooses_the_runtime_of_a_process(setting):
    code = (
        "from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor\n"
        "print({kind.__mro__[1].__module__ for kind in (InferenceRequest, InferenceResponse, Tensor)})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, native.DISABLE_VARIABLE: setting},
        capture_output=True,
        text=True,
        check=True,
    )
    compiled = setting == "0" and native.native() is not None
    assert ("gpubridge._native" in found.stdout) is compiled
    assert ("pb_utils.tensor" in found.stdout) is not compiled


@compiled_only
@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        (pb_utils.Tensor, TensorFields),
        (pb_utils.InferenceRequest, RequestFields),
        (pb_utils.InferenceResponse, ResponseFields),
    ],
)
def test_compiled_types_have_what_the_python_ones_have(kind, reference):
    expected = {name for name in vars(reference) if not name.startswith("__")}
    # Lookups in Python keep their index there.
    assert expected - {"_device_bytes", "_by_name"} <= set(dir(kind))


class Noted(np.ndarray):
    """An array whose end can be seen."""


def _cycle_of_a_tensor():
    array = np.zeros(2).view(Noted)
    array.tensor = pb_utils.Tensor("A", array)
    return weakref.ref(array)


def _cycle_of_a_response():
    array = np.zeros(2).view(Noted)
    response = pb_utils.InferenceResponse([pb_utils.Tensor("A", array)])
    response._tensors.append(response)
    return weakref.ref(array)


def _cycle_of_a_request():
    array = np.zeros(2).view(Noted)
    request = pb_utils.InferenceRequest(
        inputs=[pb_utils.Tensor("A", array)], requested_output_names=["B"], model_name="m"
    )
    request._inputs.append(request)
    return weakref.ref(array)


@pytest.mark.parametrize("make", [_cycle_of_a_tensor, _cycle_of_a_response, _cycle_of_a_request])
def test_cycles_through_what_models_see_are_collected(make):
    ended = make()
    gc.collect()
    assert ended() is None


def test_uninitialized_objects_raise_attribute_errors():
    for kind, name in (
        (pb_utils.Tensor, "name"),
        (pb_utils.Tensor, "shape"),
        (pb_utils.InferenceRequest, "inputs"),
        (pb_utils.InferenceRequest, "requested_output_names"),
        (pb_utils.InferenceResponse, "output_tensors"),
        (pb_utils.InferenceResponse, "has_error"),
    ):
        with pytest.raises(AttributeError):
            getattr(object.__new__(kind), name)()


def test_a_second_initialization_replaces_what_the_first_took():
    tensor = pb_utils.Tensor("A", np.zeros(3, np.float32))
    tensor.__init__("B", np.ones((1, 2), np.int64))
    assert (tensor.name(), tensor.shape(), tensor.as_numpy().tolist()) == ("B", [1, 2], [[1, 1]])
    tensor.__init__("C", np.array([b"x"], object))
    assert bytes(tensor._payload()) == b"\1\0\0\0x"
    tensor.__init__("D", np.zeros(1, np.uint8))
    assert bytes(tensor._payload()) == b"\0"
