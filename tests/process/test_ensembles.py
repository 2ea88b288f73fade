"""Ensembles on a real server: what flows, what is copied, what is said when something goes wrong."""

import json
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.process.ensembles import infer, write_models
from tests.process.raw_http import binary_request, connected, inference
from tests.process.server import LITTLE_MEMORY, running_server, wait_until
from tests.waits import polling

UNTIL_CANCELLED = polling("request.is_cancelled()")


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    with running_server(repository, *LITTLE_MEMORY) as running:
        yield running


def test_chain_diamond_and_an_ensemble_in_an_ensemble(server):
    assert infer(server, "chain", {"A": [1.0, 2.0]}) == {"B": [4.0, 5.0]}
    assert infer(server, "diamond", {"A": [1.0, 2.0]}) == {"B": [6.0, 8.0]}


def test_outputs_in_the_order_of_the_configuration_and_inputs_among_them(server):
    answer = infer(server, "fan", {"A": [1.0]})
    assert list(answer.items()) == [("B", [2.0]), ("C", [2.0]), ("A", [1.0])]
    assert infer(server, "around", {"A": [1.0]}) == {"B": [2.0]}


def test_optional_inputs(server):
    assert infer(server, "option", {"A": [1.0]}) == {"B": [1.0]}
    assert infer(server, "option", {"A": [1.0], "A2": [2.0]}) == {"B": [2.0]}


def test_members_see_what_the_client_says(server):
    parameters = {"sequence_id": 7, "sequence_start": True, "timeout": 9000000, "mine": "x"}
    (seen,) = infer(server, "seen", {"A": [1.0]}, id="name", parameters=parameters)["B"]
    assert json.loads(seen) == ["name", 7, 1, 9000000, '{"mine":"x"}', ["OUT"]]


def test_members_batch_requests_of_several_clients(server):
    before = server.statistics("add_batched")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: infer(server, "batched", {"A": [[i]]}), range(4)))
    assert answers == [{"B": [i + 1.0]} for i in range(4)]
    after = server.statistics("add_batched")
    assert after["inference_count"] - before["inference_count"] == 4
    # The delay is so long that only a full batch comes earlier.
    assert after["execution_count"] - before["execution_count"] == 1


def shapes(server, model, name, value):
    tensor = {"name": name, "datatype": "FP32", "shape": list(np.shape(value))}
    body = json.dumps({"inputs": [{**tensor, "data": np.ravel(value).tolist()}]})
    answer = json.loads(server.request("POST", f"/v2/models/{model}/infer", body)[2])
    return [output["shape"] for output in answer["outputs"]]


def test_shapes_are_those_that_members_that_batch_give(server):
    for value in ([[1.0, 2.0]], [[1.0], [2.0]]):
        assert shapes(server, "total", "IN", value) == [[len(value)]]
        assert shapes(server, "totals", "A", value) == [[len(value)]]
    status, error = infer(server, "total_refused", {"A": [[1.0, 2.0]]})
    assert status == 400
    assert "for model 'add_batched'. Expected [-1,-1], got [1]." in error


def test_outputs_of_members_that_do_not_batch_get_a_batch_dimension(server):
    # The ensemble's input loses its batch dimension on the way in.
    assert shapes(server, "add_one", "A", [[1.0, 2.0]]) == [[1, 2]]
    assert shapes(server, "total_added", "A", [[1.0, 2.0]]) == [[1, 1]]


def test_requests_in_parallel_get_their_own_answers(server):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: infer(server, "diamond", {"A": [float(i)]}), range(100)))
    assert answers == [{"B": [2.0 * i + 4]} for i in range(100)]


def test_an_ensemble_over_a_grpc_stream(server):
    triton = pytest.importorskip("tritonclient.grpc")
    with triton.InferenceServerClient(server.grpc_url) as client:
        tensor = triton.InferInput("A", [2], "FP32")
        tensor.set_data_from_numpy(np.array([1, 2], np.float32))
        assert client.infer("chain", [tensor]).as_numpy("B").tolist() == [4, 5]
        assert client.get_model_metadata("chain").platform == "ensemble"
        config = client.get_model_config("chain").config
        assert [step.model_name for step in config.ensemble_scheduling.step] == ["add"] * 3
        assert client.is_model_ready("chain")


def test_a_member_may_write_to_its_inputs(server):
    assert infer(server, "edits", {"A": [1.0]}) == {"B": [4.0], "N": [1.0], "M": [1.0]}
    # Neither another member nor the client sees that.
    assert infer(server, "edit_shared", {"A": [1.0]}) == {"A": [1.0], "B": [2.0], "N": [1.0]}
    assert infer(server, "edit_outside", {"A": [1.0]}) == {"B": [1.0], "C": [5.0]}
    assert infer(server, "edit_inside", {"A": [1.0]}) == {"B": [1.0]}


CALL = """
tensor = pb_utils.Tensor(NAME, np.array(VALUE))
request = pb_utils.InferenceRequest(
    model_name=MODEL, inputs=[tensor], requested_output_names=["B"])
response = request.exec()
self.said = response.error().message() if response.has_error() else (
    response.output_tensors()[0].as_numpy().tolist())
"""


def call(model, value):
    """Return code that calls a model."""
    value = f"{value!r}, np.float32" if isinstance(value, list) else f"[{value!r}], object"
    return CALL.replace("NAME", "'A'").replace("VALUE", value).replace("MODEL", repr(model))


def test_models_call_ensembles(server):
    assert infer(server, "other", {"IN": call("diamond", [1.0])}) == {"OUT": ["[6.0]"]}
    assert infer(server, "other", {"IN": call("edits", [1.0])}) == {"OUT": ["[4.0]"]}
    (error,) = infer(server, "other", {"IN": call("sequence", [[1.0]])})["OUT"]
    assert "in ensemble 'sequence', inference request to model 'steps' must specify" in error


def test_a_call_of_an_ensemble_that_would_wait_for_its_caller(server):
    (error,) = infer(server, "other", {"IN": call("codes", "")})["OUT"]
    assert "this call would never be answered: other waits for other" in error
    inner = "self.said = " + repr(call("around", [1.0]))
    assert infer(server, "codes", {"A": inner}) == {"B": ["[2.0]"]}


def test_tensors_between_members_are_not_copied(server):
    values = np.arange(1 << 18, dtype=np.float32)
    models = ("chain", "add")
    before = [server.copied(model) for model in models]
    field, body = binary_request([("A", "FP32", [values.size], values.tobytes())])
    status, fields, answer = server.request(
        "POST", "/v2/models/chain/infer", body, dict([field.split(": ")])
    )
    assert status == 200
    answer = answer[int(fields["Inference-Header-Content-Length"]) :]
    assert np.array_equal(np.frombuffer(answer, np.float32), values + 3)
    after = [server.copied(model) for model in models]
    # Of the request what came with its head; of each of the three members its own output.
    assert after[0] - before[0] <= 16 * 1024
    assert after[1] - before[1] == 3 * values.nbytes


def test_memory_goes_back(server):
    # Far more than all arenas have, one after the other: also what clients read of their own input.
    values = np.ones(1 << 20, np.float32)
    field, body = binary_request([("A", "FP32", [values.size], values.tobytes())])
    for model in ("chain", "fan", "around") * 6:
        path = f"/v2/models/{model}/infer"
        status, fields, answer = server.request("POST", path, body, dict([field.split(": ")]))
        assert status == 200, answer
    length = int(fields["Inference-Header-Content-Length"])
    assert np.all(np.frombuffer(answer[length:], np.float32) == 2)


def test_memory_goes_back_after_errors(server):
    values, odd = np.ones(1 << 20, np.float32), np.ones(2, np.float32)
    given = [("A", "FP32", [values.size], values), ("A2", "FP32", [2], odd)]
    field, body = binary_request([(*entry[:3], entry[3].tobytes()) for entry in given])
    for _ in range(12):
        status, _, answer = server.request(
            "POST", "/v2/models/option/infer", body, dict([field.split(": ")])
        )
        assert status == 500
        assert b"could not be broadcast" in answer


def test_the_error_of_a_member_is_that_of_the_ensemble(server):
    fail = "raise pb_utils.TritonModelException('no such luck')"
    status, error = infer(server, "codes", {"A": fail})
    assert status == 500
    assert error.startswith("in ensemble 'codes', ")
    assert "no such luck" in error
    assert infer(server, "codes", {"A": "self.said = 'self.said = 3'"}) == {"B": ["3"]}


def test_an_input_that_a_member_does_not_take(server):
    status, error = infer(server, "sequence", {"A": [[1.0]]})
    assert status == 400
    assert error == (
        "in ensemble 'sequence', inference request to model 'steps' must specify a non-zero or "
        "non-empty correlation ID"
    )
    parameters = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
    assert infer(server, "sequence", {"A": [[1.0]]}, parameters=parameters) == {"B": [2.0]}


def test_an_error_cancels_the_other_branches(server, tmp_path):
    seen = tmp_path / "seen"
    wait = (
        f"open({str(tmp_path / 'began')!r}, 'w').close()\n{UNTIL_CANCELLED}\n"
        f"open({str(seen)!r}, 'w').write(str(request.is_cancelled()))"
    )
    began = polling(f"os.path.exists({str(tmp_path / 'began')!r})")
    fail = f"{began}\nraise ValueError('first')"
    status, error = infer(server, "sides", {"A": fail, "A2": wait})
    assert status == 500
    assert "first" in error
    wait_until(lambda: seen.exists() and seen.read_text(), "the other branch to end", server)
    assert seen.read_text() == "True"


def test_a_client_that_goes_cancels_the_members(server, tmp_path):
    began, seen = tmp_path / "began", tmp_path / "seen"
    wait = (
        f"open({str(began)!r}, 'w').close()\n{UNTIL_CANCELLED}\n"
        f"open({str(seen)!r}, 'w').write(str(request.is_cancelled()))"
    )
    before = server.statistics("codes")["inference_stats"]["fail"]["count"]
    tensor = {"name": "A", "datatype": "BYTES", "shape": [1], "data": [wait]}
    with connected(server.http_url) as sock:
        sock.sendall(inference("codes", json.dumps({"inputs": [tensor]}).encode()))
        wait_until(began.exists, "the member to begin", server)
        # Not just no more requests: the connection is reset.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: seen.exists() and seen.read_text(), "the member to end", server)
    assert seen.read_text() == "True"
    assert server.statistics("codes")["inference_stats"]["fail"]["count"] == before + 1
    assert server.open_requests("codes") == 0


def test_a_member_that_dies_fails_its_requests_and_comes_back(server):
    status, error = infer(server, "codes", {"A": "self.said = 'os._exit(3)'"})
    assert status == 503
    assert re.match(r"in ensemble 'codes', Stub process 'other_0' is not healthy", error)
    wait_until(lambda: server.is_ready("codes"), "the ensemble to be ready again", server)
    assert infer(server, "codes", {"A": "self.said = 'self.said = 3'"}) == {"B": ["3"]}
