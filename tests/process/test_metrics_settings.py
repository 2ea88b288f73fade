"""Metrics whose buckets and labels a model's configuration asks for; `test_figures` has those of flags."""

import queue

import numpy as np
import tritonclient.grpc as triton

from tests.process.flag_sets import METRICS
from tests.process.gates import Gate
from tests.process.model_sources import sending
from tests.process.server import running_server, wait_until, write_model

CONFIG = """
model_transaction_policy { decoupled: true }
model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 0.001, 250, 100000 ] } } }
metric_tags { key: "team" value: "vision" }
"""
LABELS = '_team="vision",model="several",version="1"'
FAMILY = "nv_inference_first_response_histogram_ms"
FIRST = f"{FAMILY}_count{{{LABELS}}}"


def test_a_histogram_of_its_own_bounds_counts_the_first_response_only(tmp_path):
    gate = Gate(tmp_path / "gate")
    # Sends its second response when it may.
    several = sending(f"send(OUT=value)\n{gate.wait}\nsend(OUT=value)")
    write_model(tmp_path / "models", "several", several, config=CONFIG)
    answers = queue.Queue()
    tensor = triton.InferInput("IN", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    with running_server(tmp_path / "models", *METRICS) as server:
        with triton.InferenceServerClient(server.grpc_url) as client:
            key = {"triton-grpc-protocol-my_key": "v"}
            client.start_stream(lambda result, error: answers.put(error), headers=key)
            client.async_stream_infer("several", [tensor], enable_empty_final_response=True)
            assert answers.get(timeout=150) is None
            wait_until(lambda: server.metrics()[FIRST] == 1, "the first response to count", server)
            gate.open()
            assert [answers.get(timeout=150) for _ in range(2)] == [None] * 2
            client.stop_stream()
        # The client may have its answers a moment before the server counts them.
        counted = f"nv_inference_count{{{LABELS}}}"
        wait_until(lambda: server.metrics()[counted] == 1, "the request to count", server)
        found = server.metrics()
    bounds = ("0.001", "250", "100000", "+Inf")
    # It counted before there was a second one; and that one does not.
    buckets = [found[f'{FAMILY}_bucket{{{LABELS},le="{bound}"}}'] for bound in bounds]
    assert buckets in ([0, 1, 1, 1], [0, 0, 1, 1])
    assert found[FIRST] == 1
