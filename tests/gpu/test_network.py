"""Tensors between the network and models on a GPU: values, and copies by count."""

import numpy as np
import pytest

from tests.gpu.lane import LIBRARIES, needs_library, running_lane_server
from tests.gpu.models import write_lab, write_stream
from tests.process.device_models import ARENA, WHERE
from tests.process.server import write_model

COUNT = 50_000
NBYTES = 4 * COUNT


@pytest.fixture(scope="module", params=LIBRARIES)
def served(request, machine, tmp_path_factory):
    needs_library(request.param)
    repository = tmp_path_factory.mktemp("models")
    write_lab(repository, request.param)
    write_stream(repository, request.param)
    with running_lane_server(machine, repository) as served:
        served.library = request.param
        yield served


# Memory of its library's, of the bridge's, of its input; what `as_numpy` copies; what is born in the arena.
@pytest.mark.parametrize("does", ["double", "kept", "final", "passed", "host", "born"])
def test_an_input_goes_up_and_an_output_comes_down_with_one_copy_each(served, rng, does):
    if (served.library, does) == ("driver", "born"):
        pytest.skip("device_arena() is for libraries that allocate")
    for _ in range(3):
        values = rng.random(COUNT, np.float32)
        with served.costing("lab", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=(1, 1)):
            answer = served.infer("lab", values, parameters={"do": does})
        assert answer == (200, (values if does == "passed" else 2 * values).tolist())


@pytest.mark.parametrize("does", ["double", "kept", "final", "host"])
def test_a_tensor_of_no_elements_costs_nothing(served, does):
    with served.costing("lab", waits=(0, 1)):
        assert served.infer("lab", [], parameters={"do": does}) == (200, [])


def test_each_answer_of_a_decoupled_model_is_copied_once(served, rng):
    import tritonclient.grpc as library

    values = rng.random(COUNT, np.float32)
    given = library.InferInput("IN", [COUNT], "FP32").set_data_from_numpy(values)
    answers = []
    with (
        served.costing("stream", h2d=(NBYTES, 1), d2h=(5 * NBYTES, 5), waits=(5, 5)),
        library.InferenceServerClient(served.server.grpc_url) as protocol,
    ):
        protocol.start_stream(lambda result, error: answers.append((result, error)))
        protocol.async_stream_infer("stream", [given])
        protocol.stop_stream()
    assert [error for _, error in answers] == [None] * 5
    for times, (result, _) in zip((2, 4, 8, 16, 32), answers, strict=True):
        assert np.array_equal(result.as_numpy("OUT"), times * values)


@pytest.mark.parametrize("placed", [True, False], ids=["arena", "beyond"])
def test_tensors_larger_than_the_arena_are_served(machine, tmp_path, rng, placed):
    """The input stays on the host then, which is said and counted; the output needs no arena."""
    count = (ARENA // 4 if placed else ARENA) // 4
    write_lab(tmp_path, "driver")
    with running_lane_server(machine, tmp_path) as served:
        import tritonclient.http as library

        values = rng.random(count, np.float32)
        given = library.InferInput("IN", [count], "FP32").set_data_from_numpy(values)
        big = rng.random(2 * ARENA // 4, np.float32)
        over = library.InferInput("IN", [big.size], "FP32").set_data_from_numpy(big)
        with library.InferenceServerClient(served.server.http_url) as protocol:
            for tensor, sent in ((given, values), (over, big)):
                answer = protocol.infer("lab", [tensor]).as_numpy("OUT")
                assert np.array_equal(answer, 2 * sent)
        assert "stays in host memory" in served.server.log()


def test_two_instances_and_every_gpu_answer(machine, client, tmp_path):
    count = client.devices()
    gpus = ", ".join(map(str, range(count)))
    write_model(
        tmp_path,
        "where",
        WHERE,
        tensors="> OUT STRING [1]",
        config=f"instance_group [{{ kind: KIND_GPU count: 2 gpus: [{gpus}] }}]",
    )
    with running_lane_server(machine, tmp_path) as served:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8 * count) as pool:
            said = list(pool.map(lambda _: served.infer("where", [1.0]), range(16 * count)))
    assert {status for status, _ in said} == {200}
    words = {answer[0] for _, answer in said}
    assert {(w.split()[1], w.split()[3]) for w in words} == {(str(i), str(i)) for i in range(count)}
    assert len(words) == 2 * count
