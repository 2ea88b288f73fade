"""Models that call other models: whose memory it is, who waits for whom, who dies."""

from __future__ import annotations

import json

import pytest

from tests.process.callers import PRELUDE, run, write_models
from tests.process.server import running_server, wait_until, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    with running_server(repository) as running:
        yield running


# -- memory -------------------------------------------------------------------------------------------


def copied(server, model):
    labels = f'{{kind="host",model="{model}",version="1"}}'
    return server.metrics()["gpubridge_copied_bytes_total" + labels]


def test_an_input_and_an_answer_are_handed_on_without_a_copy(tmp_path):
    write_models(tmp_path)
    chain = PRELUDE.replace(
        "import asyncio",
        "import numpy as np\nimport triton_python_backend_utils as pb_utils\nimport asyncio",
    )
    write_model(
        tmp_path,
        "chain",
        chain
        + """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "IN")
            same = pb_utils.Tensor._received("B", "FP32", a._shape, a._source, a._place)
            a = pb_utils.Tensor._received("A", "FP32", a._shape, a._source, a._place)
            first = call(inputs=[a, same]).exec().output_tensors()[0]
            again = pb_utils.Tensor._received("A", "FP32", first._shape, first._source, first._place)
            last = call(inputs=[again, same]).exec().output_tensors()[0]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", last.as_numpy())]))
        return responses
""",
    )
    with running_server(tmp_path) as server:
        values = [float(i) for i in range(25_000)]
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [25_000], "data": values}]}
        before = copied(server, "add_sub")
        _, _, answer = server.request("POST", "/v2/models/chain/infer", json.dumps(body))
        assert json.loads(answer)["outputs"][0]["data"] == [3 * value for value in values]
        # Each answer is copied once, into its model's output memory: SUM only was asked for.
        assert copied(server, "add_sub") - before == 2 * 100_000
        assert copied(server, "chain") == 2 * 100_000


def test_a_called_model_cannot_change_what_its_caller_looks_at(server):
    said = run(
        server,
        "a = tensor('A', [-4, 1])\nsaid = show(call(inputs=[a, tensor('B', [1, 1])]).exec())",
    )
    assert "read-only" in said


def test_answers_that_are_kept_stay_what_they_are(server):
    said = run(
        server,
        "kept = [call(i).exec().output_tensors()[0].as_numpy() for i in range(300)]\n"
        "said = [float(k[0]) for k in kept] == [i + 1.0 for i in range(300)]",
    )
    assert said == "True"


# -- circles and deaths -------------------------------------------------------------------------------


def test_a_circle_is_refused_by_name(server):
    inner = "said = show(call(model='caller', inputs=[tensor('IN', ['pass'], object)], outputs=[]).exec())"
    said = run(server, inner)
    assert said.startswith(
        "UNAVAILABLE: Model caller - Error when running inference: this call would"
    )
    assert "caller waits for caller" in said
    code = (
        f"inner = PRELUDE + {inner.replace('said =', 'self.said =')!r}\n"
        "said = show(call(model='other', inputs=[tensor('IN', [inner], object)], outputs=[]).exec())"
    )
    said = run(server, f"PRELUDE = {PRELUDE!r}\n{code}")
    assert "caller waits for other waits for caller" in said


def test_no_circle_where_another_instance_can_answer(tmp_path):
    write_models(tmp_path, count=2)
    with running_server(tmp_path) as server:
        code = "said = show(call(model='caller', inputs=[tensor('IN', ['self.said = 5'], object)], outputs=[]).exec())"
        assert run(server, code) == "{'OUT': [b'5']}"


def test_a_called_model_that_dies_fails_only_the_calls_it_had(server):
    said = run(server, "said = show(call(-3).exec()), show(call(1).exec())")
    assert "UNAVAILABLE: Stub process 'add_sub_0' is not healthy. It exited with code 3" in said
    assert "{'SUM': [2.0]}" in said


def test_a_caller_that_dies_leaves_nothing(tmp_path):
    write_models(tmp_path)
    with running_server(tmp_path) as server:
        body = PRELUDE + "it = repeat(-1).exec(decoupled=True)\nnext(it); os._exit(4)"
        document = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [body]}]}
        status, _, _ = server.request("POST", "/v2/models/caller/infer", json.dumps(document))
        assert status == 503
        wait_until(server.is_ready, "the stub to be back", server)

        def over():
            stats = json.loads(server.request("GET", "/v2/models/repeat/stats")[2])["model_stats"][
                0
            ]
            return stats["inference_stats"]["success"]["count"] == 1

        wait_until(over, "the called model to stop", server)
        assert run(server, "said = show(call(1).exec())") == "{'SUM': [2.0]}"
        assert server.stop() == 0
