"""execute_batch: the requests of a batch as arrays, in both stub runtimes and on the GPU."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
import tritonclient.http

from gpubridge.errors import BridgeError
from tests.process.device_models import running_device_server, write_device_model
from tests.process.server import PURE, running_server, write_model
from tests.process.test_device_edges import ensemble

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
"""
DOUBLE = f"""{HEAD}
    def execute_batch(self, batch):
        values = batch["IN"]
        for index, request in enumerate(batch.requests):
            if request.inputs()[0].as_numpy().min() < 0:
                batch.errors[index] = pb_utils.TritonError(
                    "negative", pb_utils.TritonError.INVALID_ARG)
        if values.max() > 100:
            raise ValueError("too large")
        together = np.full((len(values), 1), len(batch.requests), np.int32)
        return {{"OUT": values * 2, "TOGETHER": together}}
"""
BATCHED = """
max_batch_size: 8
output [{ name: "TOGETHER" data_type: TYPE_INT32 dims: [1] }]
"""
WAITING = """
dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 20000000 }
"""
RAGGED = "IN FP32 [-1] allow_ragged_batch: true"


def padding(text):
    return f'parameters {{ key: "BATCH_PADDING" value {{ string_value: {json.dumps(text)} }} }}'


def model_of(gpubridge_model, folder, body, config="max_batch_size: 8", **tensors):
    write_model(folder, "m", HEAD + body, config=config, **tensors)
    return gpubridge_model(folder / "m")


@pytest.mark.parametrize("environment", [{}, PURE], ids=["compiled", "python"])
def test_a_server_executes_a_batch_as_one_array(tmp_path, environment):
    write_model(tmp_path, "double", DOUBLE, config=BATCHED + WAITING)
    with running_server(tmp_path, environment=environment) as server:

        def ask(values):
            given = np.float32(values)
            inputs = [tritonclient.http.InferInput("IN", given.shape, "FP32")]
            inputs[0].set_data_from_numpy(given)
            with tritonclient.http.InferenceServerClient(server.http_url) as client:
                try:
                    answer = client.infer("double", inputs)
                except tritonclient.http.InferenceServerException as error:
                    return error.message()
            return answer.as_numpy("OUT").tolist(), answer.as_numpy("TOGETHER").tolist()

        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(ask, [[[1, 2]], [[-1, 0]], [[3, 4]], [[5, 6]]]))
        assert answers == [([[2, 4]], [[4]]), "negative", ([[6, 8]], [[4]]), ([[10, 12]], [[4]])]
        assert ask([[1], [2], [3], [4]]) == ([[2], [4], [6], [8]], [[1]] * 4)
        assert "ValueError: too large" in ask([[101]] * 4)
        assert ask([[1]] * 4)[0] == [[2]] * 4


def test_requests_of_several_rows_get_theirs(gpubridge_model, tmp_path):
    write_model(tmp_path, "double", DOUBLE, config=BATCHED)
    model = gpubridge_model(tmp_path / "double")
    first, wrong, last = model.batch([{"IN": [[1], [2]]}, {"IN": [[-3]]}, {"IN": [[4], [5], [6]]}])
    assert first["OUT"].tolist() == [[2], [4]]
    assert last["OUT"].tolist() == [[8], [10], [12]]
    assert wrong.message == "negative"
    failed = model.batch([{"IN": [[1]]}, {"IN": [[101]]}])
    assert all("ValueError: too large" in each.message for each in failed)


def test_what_it_returns_may_be_of_any_library(gpubridge_model, tmp_path):
    body = """
    def execute_batch(self, batch):
        return {"OUT": Foreign(batch["IN"] + 1)}

class Foreign:
    # All that a library shows of its arrays.
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
"""
    model = model_of(gpubridge_model, tmp_path, body)
    answers = model.batch([{"IN": [[1, 2]]}, {"IN": [[3, 4], [5, 6]]}])
    assert [each["OUT"].tolist() for each in answers] == [[[2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    "kind", ["np.asarray(x)", "pb_utils.Tensor('OUT', x)", "list(map(list, x))"]
)
def test_strings_and_other_forms_of_outputs(gpubridge_model, tmp_path, kind):
    body = f"""
    def execute_batch(self, batch):
        assert batch.names == ["IN"] and batch.sizes == [2, 1] and "X" not in batch
        assert batch.get("X") is None and batch.shapes("IN") == [(2, 1), (1, 1)]
        x = np.array([[word + b"!"] for word in batch["IN"].reshape(-1)], object)
        return {{"OUT": {kind}}}
"""
    strings = "IN STRING [1] > OUT STRING [1]"
    model = model_of(gpubridge_model, tmp_path, body, tensors=strings)
    first, second = model.batch([{"IN": [["a"], ["b"]]}, {"IN": [["c"]]}])
    assert first["OUT"].tolist() == [[b"a!"], [b"b!"]]
    assert second["OUT"].tolist() == [[b"c!"]]


def test_a_coroutine_is_awaited(gpubridge_model, tmp_path):
    body = """
    async def execute_batch(self, batch):
        import asyncio
        await asyncio.sleep(0)
        return {"OUT": batch["IN"] + 1}
"""
    model = model_of(gpubridge_model, tmp_path, body)
    assert model({"IN": [[1]]})["OUT"].tolist() == [[2]]


def test_execute_batch_wins_over_execute(gpubridge_model, tmp_path):
    body = """
    def execute(self, requests):
        raise RuntimeError("for Triton")

    def execute_batch(self, batch):
        return {"OUT": batch["IN"]}
"""
    model = model_of(gpubridge_model, tmp_path, body)
    assert model({"IN": [[1]]})["OUT"].tolist() == [[1]]


@pytest.mark.parametrize(
    "config", ["", "max_batch_size: 4 model_transaction_policy { decoupled: true }"]
)
def test_where_it_cannot_be_used_the_model_does_not_load(gpubridge_model, tmp_path, config):
    body = """
    def execute_batch(self, batch):
        return {}
"""
    with pytest.raises(BridgeError, match="needs a max_batch_size of at least 1 and answers each"):
        model_of(gpubridge_model, tmp_path, body, config)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("None", "expected a dict of outputs by name in the execute_batch return, found type"),
        ("{'OUT': batch['IN'][:2]}", r"expected 3 rows in output 'OUT' .*the shape \[2, 1\]"),
        ("{'OUT': 7}", r"expected 3 rows in output 'OUT' .*the shape \[\]"),
        ("{'OUT': batch['X']}", "KeyError: 'X'"),
    ],
)
def test_a_wrong_return_is_an_error_of_the_batch(gpubridge_model, tmp_path, returned, text):
    body = f"""
    def execute_batch(self, batch):
        return {returned}
"""
    model = model_of(gpubridge_model, tmp_path, body)
    with pytest.raises(BridgeError, match=text):
        model({"IN": [[1], [2], [3]]})


LENGTHS = """
    def execute_batch(self, batch):
        lengths = [shape[1] for shape in batch.shapes("IN") for _ in range(shape[0])]
        assert lengths == [1, 3, 3]
        return {"OUT": batch["IN"]}
"""


@pytest.mark.parametrize(("text", "value"), [("0", 0), ('{"IN": -1.5}', -1.5)])
def test_ragged_rows_are_padded_as_configured(gpubridge_model, tmp_path, text, value):
    config = f"max_batch_size: 8\n{padding(text)}"
    model = model_of(gpubridge_model, tmp_path, LENGTHS, config, tensors=RAGGED)
    short, long = model.batch([{"IN": [[1]]}, {"IN": [[2, 3, 4], [5, 6, 7]]}])
    assert short["OUT"].tolist() == [[1, value, value]]
    assert long["OUT"].tolist() == [[2, 3, 4], [5, 6, 7]]


def test_ragged_strings_are_padded_with_nothing(gpubridge_model, tmp_path):
    ragged = "IN STRING [-1] allow_ragged_batch: true > OUT STRING [-1]"
    config = f"max_batch_size: 8\n{padding('0')}"
    body = """
    def execute_batch(self, batch):
        return {"OUT": batch["IN"]}
"""
    model = model_of(gpubridge_model, tmp_path, body, config, tensors=ragged)
    short, _ = model.batch([{"IN": [["a"]]}, {"IN": [["b", "c"]]}])
    assert short["OUT"].tolist() == [[b"a", b""]]


def test_ragged_rows_without_padding_are_refused(gpubridge_model, tmp_path):
    model = model_of(gpubridge_model, tmp_path, LENGTHS.replace("assert", "#"), tensors=RAGGED)
    refused = model.batch([{"IN": [[1]]}, {"IN": [[2, 3, 4]]}])
    for each in refused:
        assert "expected rows of one shape in input 'IN' of a batch, got [1], [3]" in each.message
        assert "BATCH_PADDING" in each.message
    assert model({"IN": [[1, 2]]})["OUT"].tolist() == [[1, 2]]


@pytest.mark.parametrize("text", ["much", "[1, 2]", '{"X": 1}', '{"IN": "a"}'])
def test_a_wrong_padding_does_not_load(gpubridge_model, tmp_path, text):
    with pytest.raises(BridgeError, match="BATCH_PADDING expects a number, or a JSON object"):
        model_of(gpubridge_model, tmp_path, LENGTHS, f"max_batch_size: 8\n{padding(text)}")


def batch_of(*arrays):
    return pb_utils.Batch(
        [
            pb_utils.InferenceRequest(
                model_name="m",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", array)],
            )
            for array in arrays
        ]
    )


def test_rows_that_lie_together_are_not_copied():
    memory = np.arange(12, dtype=np.float32).reshape(6, 2)
    batch = batch_of(memory[:1], memory[1:4], memory[4:])
    whole = batch["IN"]
    assert batch["IN"] is whole
    assert np.shares_memory(whole, memory)
    assert whole.tolist() == memory.tolist()
    assert np.shares_memory(batch_of(memory)["IN"], memory)
    assert batch.sizes == [1, 3, 2]
    apart = batch_of(memory[:1], memory[2:])["IN"]
    assert not np.shares_memory(apart, memory)
    assert apart.tolist() == memory[[0, 2, 3, 4, 5]].tolist()
    memory.flags.writeable = False
    assert not batch_of(memory[:1], memory[1:])["IN"].flags.writeable


def test_an_input_that_only_some_requests_have_is_refused():
    batch = batch_of(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
    batch._inputs[1] = []
    with pytest.raises(pb_utils.TritonModelException, match="or in none, got it in 1 of 2"):
        batch["IN"]


ON_DEVICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute_batch(self, batch):
        values = batch["IN"]
        assert not values.is_cpu() and values.shape() == [sum(batch.sizes), 2]
        return {"OUT": pb_utils.Tensor.from_dlpack("OUT", values)}
"""
PLACED = """
max_batch_size: 4
parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }
"""


@pytest.fixture(scope="module")
def device(repository):
    """A server with a model that gathers batches, two that take what it gives, and the two chains."""
    write_device_model(repository, "first", ON_DEVICE, config=PLACED + WAITING)
    write_device_model(repository, "single", ON_DEVICE, config=PLACED)
    write_device_model(repository, "gathering", ON_DEVICE, config=PLACED + WAITING)
    for last in ("single", "gathering"):
        ensemble(repository, f"first_{last}", ["first", last])
        config = repository / f"first_{last}" / "config.pbtxt"
        config.write_text(f"max_batch_size: 4\n{config.read_text()}")
    with running_device_server(repository) as server:
        yield server


ROWS = np.arange(8).reshape(4, 1, 2)


def ask_at_once(device, model):
    """Ask for each row by a client of its own; each gets back what it has sent."""
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda row: device.infer(model, row), ROWS))
    assert answers == [(200, row.ravel().tolist()) for row in ROWS]


def test_inputs_on_the_gpu_stay_there(device):
    with device.doing("first", h2d=(32, 1), d2h=(32, 1), waits=1):
        assert device.infer("first", ROWS.reshape(4, 2)) == (200, ROWS.ravel().tolist())
    # Four uploads, one join of rows that are not side by side, and an answer each.
    with device.doing("first", h2d=(32, 4), d2d=(32, 4), d2h=(32, 4), waits=4):
        ask_at_once(device, "first")


def test_cut_outputs_on_the_gpu_go_to_the_next_model_there(device):
    with device.doing("single", d2h=(32, 4), waits=4):
        ask_at_once(device, "first_single")


def test_rows_that_lie_together_on_the_gpu_are_not_copied(device):
    for _ in range(2):
        # The rows are pieces of one output: the second model's array is that output.
        with (
            device.doing("first", h2d=(32, 4), d2d=(32, 4)),
            device.doing("gathering", d2h=(32, 4), waits=4),
        ):
            ask_at_once(device, "first_gathering")
