"""Runs the code that it is sent, with the sender of the request as ``sender``."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def answer(value):
    said = pb_utils.Tensor("SAID", np.array([str(value)], np.object_))
    return pb_utils.InferenceResponse([said])


def refused(call):
    """The text of what a call raises, as a response."""
    try:
        call()
    except Exception as error:
        return answer(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    return answer("no error")


def wrong(call):
    """The class of what a call raises, as a response."""
    try:
        call()
    except Exception as error:
        return answer(type(error).__name__)
    return answer("no error")


class TritonPythonModel:
    def execute(self, requests):
        returned = None
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            names = {**globals(), "request": request, "sender": request.get_response_sender()}
            exec(code, names)
            returned = names.get("returned", returned)
        return returned
