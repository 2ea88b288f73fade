"""The gauge of requests that await their execution: what it says of five requests, for each kind of model."""

from contextlib import ExitStack
from queue import SimpleQueue

import numpy as np
import tritonclient.grpc as triton

from tests.process.ensembles import write_ensemble
from tests.process.gates import Gate
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

# Decoupled, and answered by threads after `execute` has returned.
THREADS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=[request.get_response_sender()]).start()

    def answer(self, sender):
        {wait}
        tensor = pb_utils.Tensor("OUT", np.ones(1, np.float32))
        sender.send(pb_utils.InferenceResponse([tensor]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
# Of five requests (figures of Triton 2.51).
WAITING = {"plain": 4, "two": 3, "decoupled": 4, "threads": 0, "batched": 3, "sequences": 4, "e": 0}
BATCHED = ("batched", "sequences")


def write(repository, gate):
    plain = answering(f"{gate.wait}\nreturn respond(OUT=value)")
    decoupled = sending(f"{gate.wait}\nsend(OUT=value)")
    delayed = "max_batch_size: 2 dynamic_batching { max_queue_delay_microseconds: 1000000 }"
    for name, source, config in [
        ("plain", plain, ""),
        ("two", plain, "instance_group { count: 2 }"),
        ("decoupled", decoupled, DECOUPLED),
        ("threads", THREADS.format(wait=gate.wait), DECOUPLED),
        ("batched", plain, delayed),
        ("sequences", plain, "max_batch_size: 1 sequence_batching { }"),
        ("member", plain, ""),
    ]:
        write_model(repository, name, source, config=config)
    write_ensemble(repository, "e", "member IN=IN > OUT=OUT", inputs="IN", outputs="OUT")


def test_of_five_requests_those_that_are_not_executed_wait(tmp_path):
    gate = Gate(tmp_path / "gate")
    write(tmp_path / "models", gate)
    outcomes = SimpleQueue()
    with running_server(tmp_path / "models") as server, ExitStack() as clients:

        def gauge(name):
            found = server.metrics()
            return {model: found[f'{name}{{model="{model}",version="1"}}'] for model in WAITING}

        clients.callback(gate.open)
        for model in WAITING:
            client = clients.enter_context(triton.InferenceServerClient(server.grpc_url))
            client.start_stream(lambda result, error: outcomes.put((result, error)))
            tensor = triton.InferInput("IN", [1, 1] if model in BATCHED else [1], "FP32")
            tensor.set_data_from_numpy(np.ones(tensor.shape(), np.float32))
            for at in range(5):
                sequence = (
                    {"sequence_id": 1, "sequence_start": not at} if model == "sequences" else {}
                )
                client.async_stream_infer(model, [tensor], **sequence)
        wait_until(lambda: gauge("nv_inference_pending_request_count") == WAITING, "them", server)
        assert gauge("gpubridge_open_requests") == dict.fromkeys(WAITING, 5)
        gate.open()
        for _ in range(5 * len(WAITING)):
            _, error = outcomes.get(timeout=120)
            assert error is None
        assert gauge("nv_inference_pending_request_count") == dict.fromkeys(WAITING, 0)
