"""Metrics that are asked for by flags and configurations, after a load whose figures are known."""

import queue

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.process.flag_sets import METRICS
from tests.process.gates import Gate
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

SLEEP = 0.02
PLAIN = answering(f"""
time.sleep({SLEEP})
error = pb_utils.TritonError("negative") if value.min() < 0 else None
return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)], error)
""")
BUCKETS = """
model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 0.001, 250, 100000 ] } } }
metric_tags { key: "team" value: "vision" }
"""
LABELS = '{_team="vision",model="several",version="1"}'
COUNT = f"nv_inference_count{LABELS}"
FIRST = f"nv_inference_first_response_histogram_ms_count{LABELS}"
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "plain", PLAIN)
    gate = Gate(tmp_path_factory.mktemp("gate") / "gate")
    # Sends its second response when it may.
    several = sending(f"send(OUT=value)\n{gate.wait}\nsend(OUT=value)")
    write_model(repository, "several", several, config=DECOUPLED + BUCKETS)
    with running_server(repository, *METRICS) as server:
        with over_http.InferenceServerClient(server.http_url) as client:
            for _ in range(4):
                client.infer("plain", [given(over_http, 1)])
            with pytest.raises(InferenceServerException, match="negative"):
                client.infer("plain", [given(over_http, -1)])
        answers = queue.Queue()
        with over_grpc.InferenceServerClient(server.grpc_url) as client:
            key = {"triton-grpc-protocol-my_key": "v"}
            client.start_stream(lambda result, error: answers.put(error), headers=key)
            tensors = [given(over_grpc, 1)]
            client.async_stream_infer("several", tensors, enable_empty_final_response=True)
            assert answers.get(timeout=150) is None
            wait_until(lambda: server.metrics()[FIRST] == 1, "the first response to count", server)
            gate.open()
            assert [answers.get(timeout=150) for _ in range(2)] == [None] * 2
            client.stop_stream()
        # The client may have its answers a moment before the server counts them.
        wait_until(lambda: server.metrics()[COUNT] == 1, "the request to count", server)
        yield server.metrics()


def given(client, value):
    return client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.array([value], np.float32))


def test_summaries_know_the_requests_that_succeeded(found):
    labels = 'model="plain",version="1"'
    for step in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        assert found[f"nv_inference_{step}_summary_us_count{{{labels}}}"] == 4
    least = SLEEP * 1e6
    family = "nv_inference_compute_infer_summary_us"
    assert found[f"{family}_sum{{{labels}}}"] >= 4 * least
    middle, most = (
        found[f'{family}{{model="plain",version="1",quantile="{quantile}"}}']
        for quantile in ("0.5", "1")
    )
    assert least <= middle <= most


def test_a_histogram_counts_the_first_response_only(found):
    family = "nv_inference_first_response_histogram_ms"

    def buckets(model, bounds, tag=""):
        return [
            found[f'{family}_bucket{{{tag}model="{model}",version="1",le="{le}"}}'] for le in bounds
        ]

    assert buckets("plain", ("100", "500", "2000", "5000", "+Inf"))[-1] == 4
    # It counted before there was a second one; and that one does not.
    several = buckets("several", ("0.001", "250", "100000", "+Inf"), '_team="vision",')
    assert several in ([0, 1, 1, 1], [0, 0, 1, 1])
    assert found[FIRST] == 1
