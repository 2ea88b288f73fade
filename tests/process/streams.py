"""Models that answer by themselves, and a gRPC stream to ask them through."""

import queue

import numpy as np
import pytest

from tests.process.server import write_model

triton = pytest.importorskip("tritonclient.grpc")

SCRIPTED = """
import asyncio, os, threading, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
kept = []

def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(value)], object))])

def failure(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))

def refused(call):
    try:
        call()
    except pb_utils.TritonModelException as error:
        return answer(error)
    return answer("accepted")

class TritonPythonModel:
    def execute(self, requests):
        returned = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy().item().decode()
            names = {**globals(), "request": request, "result": None}
            exec(code, names)
            returned.append(names["result"])
        return RETURNED
"""
COROUTINES = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

met = None

class TritonPythonModel:
    async def execute(self, requests):
        global met
        met = met or asyncio.Event()
        for request in requests:
            sender = request.get_response_sender()
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy().item().decode()
            if code == "fail":
                raise ValueError("no such luck")
            if code == "wait":
                await met.wait()
            else:
                met.set()
            out = pb_utils.Tensor("OUT", np.array([code], object))
            sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STRINGS = "CODE STRING [1] > OUT STRING [1]"
DECOUPLED = "model_transaction_policy { decoupled: true }"


def write_models(repository):
    scripted = SCRIPTED.replace("RETURNED", "None")
    write_model(repository, "m", scripted, config=DECOUPLED, tensors=STRINGS)
    write_model(repository, "one", SCRIPTED.replace("RETURNED", "returned"), tensors=STRINGS)
    write_model(repository, "silent", scripted, tensors=STRINGS)
    write_model(repository, "coroutines", COROUTINES, config=DECOUPLED, tensors=STRINGS)


class Stream:
    """A gRPC stream; gives its answers in the order in which they come."""

    def __init__(self, server):
        self.answers = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, code, name="", model="m", final=True):
        tensor = triton.InferInput("CODE", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([code], object))
        self.client.async_stream_infer(
            model, [tensor], request_id=name, enable_empty_final_response=final
        )

    def take(self):
        """The next answer: its id, its text or None, and whether it is the last."""
        result, error = self.answers.get(timeout=150)
        if error is not None:
            return error.message()
        message = result.get_response()
        data = result.as_numpy("OUT")
        text = None if data is None else data.item().decode()
        return message.id, text, message.parameters["triton_final_response"].bool_param
