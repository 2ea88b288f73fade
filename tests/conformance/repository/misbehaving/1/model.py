"""Goes wrong in the way that the request's MODE names."""

import numpy as np
import triton_python_backend_utils as pb_utils


def good():
    return pb_utils.Tensor("OUT", np.array([1.0, 2.0], dtype=np.float32))


def extra():
    return pb_utils.Tensor("EXTRA", np.array([3], dtype=np.int32))


def respond(*tensors, error=None):
    return [pb_utils.InferenceResponse(output_tensors=list(tensors), error=error)]


def named(value):
    return pb_utils.Tensor("OUT", np.array(value))


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def fail(error):
    raise error


FAULTS = {
    "none": lambda: respond(good(), extra()),
    "raise_value_error": lambda: fail(ValueError("planted value error")),
    "raise_model_exception": lambda: fail(pb_utils.TritonModelException("planted exception")),
    "raise_not_ascii": lambda: fail(ValueError("gepflanzt: \u00e4\u00f6\u00fc \u2603")),
    "raise_quotes": lambda: fail(ValueError('a "quoted"\ttext\nof two lines \\ end')),
    "raise_empty": lambda: fail(ValueError()),
    "raise_unprintable": lambda: fail(Unprintable()),
    "return_none": lambda: None,
    "return_empty_list": list,
    "return_two_responses": lambda: respond(good()) * 2,
    "return_none_item": lambda: [None],
    "return_string": lambda: "junk",
    "return_integer": lambda: 7,
    "return_list_of_integers": lambda: [7],
    "return_tuple": lambda: tuple(respond(good(), extra())),
    "return_generator": lambda: (r for r in respond(good(), extra())),
    "return_bare_response": lambda: respond(good(), extra())[0],
    "no_outputs": respond,
    "missing_output": lambda: respond(good()),
    "unknown_output": lambda: respond(
        good(), pb_utils.Tensor("UNKNOWN", np.zeros(1, dtype=np.int8))
    ),
    "duplicate_output": lambda: respond(good(), good()),
    "wrong_dtype": lambda: respond(named(np.array([1, 2], dtype=np.int64)), extra()),
    "wrong_dims": lambda: respond(named(np.zeros(3, dtype=np.float32)), extra()),
    "wrong_rank": lambda: respond(named(np.zeros((2, 2), dtype=np.float32)), extra()),
    "empty_tensor": lambda: respond(named(np.zeros(0, dtype=np.float32)), extra()),
    "scalar_tensor": lambda: respond(named(np.float32(5)), extra()),
    "nan_and_infinity": lambda: respond(
        named(np.array([np.nan, np.inf], dtype=np.float32)), extra()
    ),
    "error_default": lambda: respond(error=pb_utils.TritonError("planted error")),
    "error_with_outputs": lambda: respond(
        good(), error=pb_utils.TritonError("planted error with outputs")
    ),
    "error_empty": lambda: respond(error=pb_utils.TritonError("")),
    "bad_dtype_tensor": lambda: respond(named(np.array([1 + 2j]))),
    "nameless_tensor": lambda: respond(pb_utils.Tensor("", np.zeros(2, dtype=np.float32))),
    "bad_output_list": lambda: [pb_utils.InferenceResponse(output_tensors=["junk"])],
    "raise_system_exit": lambda: fail(SystemExit(3)),
    "raise_keyboard_interrupt": lambda: fail(KeyboardInterrupt("planted interrupt")),
}


def answer(mode):
    if mode.startswith("error_code_"):
        code = getattr(pb_utils.TritonError, mode[len("error_code_") :])
        return respond(error=pb_utils.TritonError("planted " + mode, code))
    return FAULTS[mode]()


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        mode = pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy()[0].decode()
        return answer(mode)
