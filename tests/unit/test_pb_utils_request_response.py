"""Requests, responses and errors as models make and read them."""

import ast
import collections
import json

import numpy as np
import pytest

from gpubridge import pb_utils
from tests.unit.model_configs import cases

pytestmark = pytest.mark.both_runtimes

Failure = pb_utils.TritonModelException


def tensor(name="A"):
    return pb_utils.Tensor(name, np.zeros(2, np.float32))


def request(**keywords):
    given = {"inputs": [tensor()], "requested_output_names": ["B"], "model_name": "m", **keywords}
    return pb_utils.InferenceRequest(**given)


def test_arguments_by_position_keep_tritons_order():
    made = pb_utils.InferenceRequest("id", 5, [tensor()], ["B"], "m", 2, 1, 100)
    assert made.request_id() == "id"
    assert made.correlation_id() == 5
    assert made.flags() == 1
    assert made.timeout() == 100
    assert made._model_name == "m"
    assert made._model_version == 2


@pytest.mark.parametrize(
    "keywords",
    [
        {"request_id": 3},
        {"inputs": tensor()},
        {"inputs": [3]},
        {"requested_output_names": "BC"},
        {"requested_output_names": [None]},
        {"model_version": "1"},
        {"model_version": 1.0},
        {"flags": -1},
        {"timeout": -5},
        {"preferred_memory": 1},
        {"trace": 3},
    ],
)
def test_other_types_are_type_errors(keywords):
    with pytest.raises(TypeError):
        request(**keywords)


def test_requested_output_names_can_be_passed_on():
    names = request(requested_output_names=["B", "C", "B"]).requested_output_names()
    assert names == {"B", "C"}
    assert request(requested_output_names=names).requested_output_names() == names


@pytest.mark.parametrize(
    ("keyword", "value", "expected"),
    [
        ("timeout", 1 << 64, "int of 0 to 18446744073709551615 for timeout"),
        ("timeout", -1, "int of 0 to 18446744073709551615 for timeout"),
        ("flags", 1 << 32, "int of 0 to 4294967295 for flags"),
        ("model_version", 1 << 63, "int of -9223372036854775808 to 9223372036854775807 for model_"),
        (
            "inputs",
            [pb_utils.Tensor("\ud800", np.zeros(1))],
            "str without lone surrogates for the name of an",
        ),
        ("request_id", "\ud800", "str without lone surrogates for request_id"),
        ("model_name", "\ud800", "str without lone surrogates for model_name"),
        ("correlation_id", "\ud800", "str without lone surrogates for correlation_id"),
        ("requested_output_names", ["\ud800"], "str without lone surrogates for an element of"),
    ],
)
def test_values_that_no_request_can_carry(keyword, value, expected):
    with pytest.raises(TypeError, match=expected):
        request(**{keyword: value})


def test_numbers_of_numpy_are_numbers():
    made = request(
        timeout=np.int64(5), flags=np.uint8(1), model_version=np.array(3), correlation_id=7
    )
    made.set_flags(np.int32(2))
    assert (made.timeout(), made.flags(), made._model_version) == (5, 2, 3)
    assert {type(number) for number in (made.timeout(), made.flags())} == {int}
    with pytest.raises(TypeError, match="expected int of 0 to 4294967295 for flags"):
        request(flags=np.float32(1))


@pytest.mark.parametrize("kind", [tuple, collections.deque, lambda of: np.array(of, object)])
def test_other_sequences_are_lists(kind):
    tensor = pb_utils.Tensor("A", np.zeros(1))
    made = request(inputs=kind([tensor]), requested_output_names=kind(["B"]))
    assert made.inputs() == [tensor]
    assert made.requested_output_names() == {"B"}
    assert pb_utils.InferenceResponse(kind([tensor])).output_tensors() == [tensor]


@pytest.mark.parametrize(
    "what", ["A", b"A", {"A": 1}, iter(["A"]), np.array("A"), np.array([["A"]])]
)
def test_values_other_than_lists_are_refused(what):
    with pytest.raises(TypeError, match="expected list for requested_output_names"):
        request(requested_output_names=what)


@pytest.mark.parametrize("decoupled", [None, "yes"])
def test_decoupled_is_a_truth_value(decoupled):
    with pytest.raises(TypeError, match="expected bool for decoupled"):
        request().exec(decoupled=decoupled)


def test_the_largest_values_of_a_request_are_carried():
    most = (1 << 64) - 1
    made = request(correlation_id=most, timeout=most, flags=(1 << 32) - 1, request_id="ü")
    assert (made.correlation_id(), made.timeout(), made.flags()) == (most, most, (1 << 32) - 1)
    with pytest.raises(TypeError, match="int of 0 to 4294967295 for flags"):
        made.set_flags(1 << 32)


OF_A_REQUEST = """
inputs [None]
    Input tensor for request with id '7' and model name 'm' should not be empty.
requested_output_names [""]
    Requested output name for request with id '7' and model name 'm' should not be empty.
correlation_id 1.5
    Correlation ID must be integer or string
correlation_id b"x"
    Correlation ID must be integer or string
correlation_id -1
    Correlation ID must be integer or string
correlation_id 18446744073709551616
    Correlation ID must be integer or string
parameters []
    Expect N8pybind114dictE, got <class 'list'>
parameters {1: 2}
    Expect parameters keys to have type str, found type <class 'int'>
parameters {"a": 1.5}
    Expect parameters values to have type bool/int/str, found type <class 'float'>
parameters {"a": None}
    Expect parameters values to have type bool/int/str, found type <class 'NoneType'>
"""


@pytest.mark.parametrize(("given", "text"), cases(OF_A_REQUEST))
def test_values_that_have_no_counterpart(given, text):
    name, value = given.split(" ", 1)
    with pytest.raises(Failure) as caught:
        request(**{name: ast.literal_eval(value), "request_id": "7"})
    assert str(caught.value) == text


def test_parameters_are_json_text():
    given = {"a": 1, "b": True, "c": 'x\n"é', "d": -3}
    assert json.loads(request(parameters=given).parameters()) == given
    assert request(parameters=None).parameters() == "{}"


def test_lists_handed_out_are_the_callers_own():
    made = request()
    made.inputs().clear()
    made.requested_output_names().clear()
    assert len(made.inputs()) == 1
    assert made.requested_output_names() == {"B"}


class Origin:
    """Stands for the process around the model."""

    left = False
    sender = object()

    def cancelled(self):
        return self.left

    def response_sender(self):
        return self.sender


def test_a_received_request():
    inputs = [tensor("X"), tensor("Y")]
    origin = Origin()
    made = pb_utils.InferenceRequest._received(
        inputs, "id", "seq", ("O", "P"), 3, 9, '{"k": 1}', "m", 4, origin
    )
    assert made.inputs() == inputs
    assert made.request_id() == "id"
    assert made.correlation_id() == "seq"
    assert made.requested_output_names() == {"O", "P"}
    assert (made.flags(), made.timeout(), made.parameters()) == (3, 9, '{"k": 1}')
    assert pb_utils.get_input_tensor_by_name(made, "Y") is inputs[1]
    assert pb_utils.get_input_tensor_by_name(made, "Z") is None
    assert made.is_cancelled() is False
    origin.left = True
    assert made.is_cancelled() is True
    assert made.get_response_sender() is origin.sender


def test_calls_of_other_models_say_why_they_fail():
    for call in (request().exec, request().async_exec):
        with pytest.raises(Failure, match=r"^BLS is only supported during the 'execute' function."):
            call(decoupled=False)
    with pytest.raises(
        Failure, match=r"get_response_sender\(\): expected a request that the model"
    ):
        request().get_response_sender()


def test_a_response_of_tensors():
    outputs = [tensor("A"), tensor("B")]
    made = pb_utils.InferenceResponse(output_tensors=outputs)
    assert made.output_tensors() == outputs
    assert made.has_error() is False
    assert made.error() is None
    assert made.parameters() == "{}"
    assert pb_utils.get_output_tensor_by_name(made, "B") is outputs[1]
    assert pb_utils.get_output_tensor_by_name(made, "C") is None
    outputs.clear()
    assert len(made.output_tensors()) == 2


@pytest.mark.parametrize(
    "keywords", [{"output_tensors": None}, {"output_tensors": [3]}, {"error": "x"}]
)
def test_response_type_errors(keywords):
    with pytest.raises(TypeError):
        pb_utils.InferenceResponse(**keywords)


def test_error_codes():
    names = (
        "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED"
    )
    for number, name in enumerate(names.split()):
        code = getattr(pb_utils.TritonError, name)
        assert int(code) == number
        assert code is getattr(getattr(pb_utils.TritonError, "__ErrorCode"), name)
        assert pb_utils.TritonError("m", code).code() is code
    assert pb_utils.TritonError(message="m").code() is pb_utils.TritonError.INTERNAL
    assert pb_utils.TritonError(b"m").message() == "m"


@pytest.mark.parametrize("arguments", [(), (None,), (3,), ("m", None), ("m", 1)])
def test_error_type_errors(arguments):
    with pytest.raises(TypeError):
        pb_utils.TritonError(*arguments)
