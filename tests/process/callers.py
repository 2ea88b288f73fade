"""Models that call other models: the code that they are sent may."""

import json
import re

from tests.process.model_sources import answering
from tests.process.server import write_code_model, write_model
from tests.waits import polling

ADD_SUB = answering(
    """
b = request.inputs()[1].as_numpy()
first = float(value.flat[0]) if value.size else 0
if first == -1:
    raise ValueError("minus one")
if first == -2:
    error = pb_utils.TritonError("coded", pb_utils.TritonError.NOT_FOUND)
    return pb_utils.InferenceResponse(error=error)
if first == -3:
    os._exit(3)
if first == -4:
    value[:] = 7
return respond({"seen": request.parameters()}, SUM=value + b, DIFFERENCE=value - b)
"""
)
REPEAT = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
four = threading.Barrier(4, timeout=20)

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().flat[0])
            sender = request.get_response_sender()
            def send(count=count, sender=sender):
                sent = 0
                if 4 <= count < 8:
                    # Answered when four calls are there.
                    four.wait()
                while sent < count if count >= 0 else not sender.is_cancelled():
                    out = pb_utils.Tensor("OUT", np.array([sent], np.int32))
                    sender.send(pb_utils.InferenceResponse([out]))
                    sent += 1
                    if count < 0 and sent == 32:
                        # More would use a processor for as long as nobody cancels it.
                        UNTIL_CANCELLED
                if count == -2:
                    error = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error))
                sender.send(flags=FINAL)
            threading.Thread(target=send).start()
""".replace("UNTIL_CANCELLED", polling("sender.is_cancelled()"))
PRELUDE = """
import asyncio, threading
def tensor(name, values, dtype=np.float32):
    return pb_utils.Tensor(name, np.array(values, dtype))
def call(*values, model="add_sub", outputs=("SUM",), **more):
    inputs = more.pop("inputs", None)
    if inputs is None:
        inputs = [tensor("A", values or [1, 2]), tensor("B", [1] * (len(values) or 2))]
    return pb_utils.InferenceRequest(
        model_name=model, inputs=inputs, requested_output_names=list(outputs), **more
    )
def repeat(count, **more):
    return call(model="repeat", inputs=[tensor("COUNT", [count], np.int32)], outputs=["OUT"], **more)
def shaped(*values):
    return call(model="shaped", inputs=[tensor("IN", values)], outputs=["ROW", "PAIR"])
def show(response):
    if response.has_error():
        return f"{response.error().code().name}: {response.error().message()}"
    return {t.name(): t.as_numpy().tolist() for t in response.output_tensors()}
"""


def write_models(repository, count=1):
    tensors = "A FP32 [-1]; B FP32 [-1] > SUM FP32 [-1]; DIFFERENCE FP32 [-1]"
    write_model(repository, "add_sub", ADD_SUB, tensors=tensors)
    write_model(
        repository,
        "repeat",
        REPEAT,
        config="model_transaction_policy { decoupled: true }",
        tensors="COUNT INT32 [1] > OUT INT32 [1]",
    )
    for name in ("caller", "other"):
        write_code_model(repository, name, config=f"instance_group [{{ count: {count} }}]")


def run(server, code, model="caller"):
    """Run code in a model; returns what it put into ``said``."""
    code = PRELUDE + re.sub(r"(?<!\.)\bsaid =", "self.said =", code)
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}]}
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    document = json.loads(answer)
    assert status == 200, document
    return document["outputs"][0]["data"][0]


def answered(server, model):
    return server.statistics(model)["inference_stats"]["success"]["count"]
