"""The statistics extension and the metrics, against a load whose figures are known."""

import time

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

SLEEP = 0.05
CODE = answering(f"""
if value.min() < 0:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
time.sleep({SLEEP})
return respond(OUT=value)
""")
REQUESTS = [1, 3, 3, 8]


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "known", CODE, config="max_batch_size: 8")
    write_model(repository, "other", CODE, config="max_batch_size: 8")
    with running_server(repository) as running:
        with triton.InferenceServerClient(running.http_url) as client:
            before = time.monotonic_ns()
            for size in REQUESTS:
                ask(client, np.ones((size, 4), np.float32))
            for _ in range(2):
                with pytest.raises(InferenceServerException, match="negative"):
                    ask(client, -np.ones((1, 4), np.float32))
            running.spent_ns = time.monotonic_ns() - before
        yield running


def ask(client, data):
    tensor = triton.InferInput("IN", list(data.shape), "FP32").set_data_from_numpy(data)
    return client.infer("known", [tensor])


def test_every_figure_of_a_known_load(server):
    with triton.InferenceServerClient(server.http_url) as client:
        (model,) = client.get_inference_statistics("known", "1")["model_stats"]
    assert (model["name"], model["version"]) == ("known", "1")
    assert model["inference_count"] == sum(REQUESTS)
    assert model["execution_count"] == len(REQUESTS)
    assert 0 < time.time_ns() // 1_000_000 - model["last_inference"] < 600_000
    figures = model["inference_stats"]
    slept = len(REQUESTS) * SLEEP * 1e9
    parts = [
        figures[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert [part["count"] for part in parts] == [len(REQUESTS)] * 4
    assert all(part["ns"] > 0 for part in parts)
    assert figures["success"]["count"] == len(REQUESTS)
    assert figures["compute_infer"]["ns"] >= slept
    # The four steps are all that there is to a request.
    assert figures["success"]["ns"] == sum(part["ns"] for part in parts)
    assert figures["success"]["ns"] < server.spent_ns
    assert figures["fail"]["count"] == 2
    assert 0 < figures["fail"]["ns"] < slept
    assert figures["cache_hit"] == figures["cache_miss"] == {"count": 0, "ns": 0}
    sizes = {entry["batch_size"]: entry for entry in model["batch_stats"]}
    assert {size: entry["compute_infer"]["count"] for size, entry in sizes.items()} == {
        1: 1,
        3: 2,
        8: 1,
    }
    assert sum(e["compute_infer"]["ns"] for e in sizes.values()) == figures["compute_infer"]["ns"]


def test_the_metrics_say_the_same(server):
    found = server.metrics()
    labels = '{model="known",version="1"}'
    assert found[f"nv_inference_request_success{labels}"] == len(REQUESTS)
    assert found[f"nv_inference_count{labels}"] == sum(REQUESTS)
    assert found[f"nv_inference_exec_count{labels}"] == len(REQUESTS)
    failed = 'nv_inference_request_failure{model="known",reason="BACKEND",version="1"}'
    assert found[failed] == 2
    assert found[f"gpubridge_open_requests{labels}"] == 0
    spent = server.statistics("known")["inference_stats"]["success"]["ns"]
    assert found[f"nv_inference_request_duration_us{labels}"] == spent // 1000
