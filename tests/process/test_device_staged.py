"""The server's own copies between GPUs and host memory: by pinned pieces, beside everything else."""

import json
import threading

import numpy as np
import pytest
from tritonclient.utils import shared_memory as shm

from tests.process.client_memory import memory
from tests.process.device_models import (
    DOUBLE,
    on_device,
    running_device_server,
    write_device_model,
)
from tests.process.server import wait_until, write_model
from tests.process.test_device_clients import Client, infer, region
from tests.process.test_device_edges import HOST
from tests.process.test_device_network import pids_of
from tests.simcuda.processes import running_worker

COUNT = 1_300_001
NBYTES = 4 * COUNT
PIECE = 2 << 20
INVALID_VALUE = 1
LARGE = 65 << 20

# Copies from its GPU to memory of the bridge, and back, with its own library; says what the driver says.
OWN = on_device(
    f"""
pb_utils.Tensor.empty("D", [1], np.uint8, "cuda")
values = request.output("OUT", [{LARGE} // 4], np.float32).as_numpy()
there = library.array("large", [{LARGE}], np.uint8).__cuda_array_interface__["data"][0]
copies = [d.cuMemcpyDtoHAsync(values.ctypes.data, there, values.nbytes, library.stream),
          d.cuMemcpyHtoDAsync(there, values.ctypes.data, values.nbytes, library.stream)]
ok(d.cuStreamSynchronize(library.stream))
return pb_utils.Tensor("OUT", np.array([int(code) for code, in copies], np.float32))
"""
)


@pytest.fixture(scope="module")
def served(repository):
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "own", OWN)
    with running_device_server(repository) as served:
        yield served


@pytest.fixture
def client(served):
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        for name in ("in", "out"):
            client.allocate(name, NBYTES)
            assert client.register(name, NBYTES) == (200, "")
        yield client
        assert client.post("unregister")[0] == 200


def ask(served, client, seed):
    """Have the model on the host double what is in the client's memory; return whether that is right."""
    given = np.random.default_rng(seed).random(COUNT, np.float32)
    client.write("in", given)
    client.write("out", np.zeros(COUNT, np.float32))
    status, answer = infer(served, "host", region("in", NBYTES), region("out", NBYTES), count=COUNT)
    return status, answer.get("error") or bool((client.read("out", COUNT) == 2 * given).all())


def test_a_large_tensor_goes_in_pinned_pieces_and_counts_as_one_copy(served, client):
    pid = served.server.pid
    before, spun = len(served.machine.calls(pid=pid)), served.machine.activity(pid).spun
    for seed in range(3):
        with served.doing("host", d2h=(NBYTES, 1), h2d=(NBYTES, 1), waits=2):
            assert ask(served, client, seed) == (200, True)
    calls = served.machine.calls(pid=pid)[before:]
    copies = [call for call in calls if call.name.startswith("cuMemcpy")]
    assert {call.name for call in copies} == {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"}
    assert all(call.arguments[0] <= PIECE and call.arguments[1] == 1 for call in copies)
    assert sum(call.arguments[0] for call in copies) == 3 * 2 * NBYTES
    assert len([call for call in calls if call.name == "cuMemHostAlloc"]) <= 8
    assert served.machine.activity(pid).spun == spun


def test_others_are_answered_while_the_server_copies(served, client):
    served.machine.delay(500_000)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(served, client, 7)))
    before = len(served.machine.calls("cuMemcpyDtoHAsync", served.server.pid))
    try:
        thread.start()
        wait_until(
            lambda: len(served.machine.calls("cuMemcpyDtoHAsync", served.server.pid)) > before,
            "the copy to have begun",
            served.server,
        )
        # The loop goes on, and so does the thread that calls the driver.
        assert served.server.request("GET", "/v2/health/live")[0] == 200
        assert client.status()[0] == 200
        assert not answers
    finally:
        served.machine.delay(200)
        thread.join()
    assert answers == [(200, True)]


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"])
def test_a_copy_that_fails_costs_its_own_request(served, client, call):
    assert ask(served, client, 1) == (200, True)
    served.machine.fail(call, INVALID_VALUE, nth=2)
    status, error = ask(served, client, 2)
    served.machine.heal()
    assert (status, f"{call} failed" in error) == (500, True)
    # Nothing of what failed is kept: else the memory could not be unregistered.
    for seed in (3, 4):
        assert ask(served, client, seed) == (200, True)


def test_an_output_goes_from_the_gpu_to_system_memory_of_a_client_in_pinned_pieces(served):
    """That memory is not pinned: the driver would copy it alone, and use a whole processor."""
    with memory(NBYTES) as (key, handle):
        values = shm.get_contents_as_numpy(handle, np.float32, [COUNT])
        body = json.dumps({"key": key, "offset": 0, "byte_size": NBYTES})
        path = "/v2/systemsharedmemory"
        assert served.server.request("POST", f"{path}/region/out/register", body)[0] == 200
        given = np.random.default_rng(9).random(COUNT, np.float32)
        with running_worker(served.machine) as worker:
            client = Client(worker, served.server)
            client.allocate("in", NBYTES)
            assert client.register("in", NBYTES) == (200, "")
            client.write("in", given)
            (pid,) = pids_of(served, "double")
            for _ in range(2):
                values[:] = 0
                before = len(served.machine.calls("cuMemcpyDtoHAsync", pid))
                with served.doing("double", d2h=(NBYTES, 1), waits=1):
                    status, answer = infer(
                        served, "double", region("in", NBYTES), region("out", NBYTES), count=COUNT
                    )
                assert (status, answer.get("error")) == (200, None)
                assert (values == 2 * given).all()
                copies = served.machine.calls("cuMemcpyDtoHAsync", pid)[before:]
                # One of them is the model's own, and as large as all.
                assert all(call.arguments[1] == 1 for call in copies)
                assert sorted(call.arguments[0] for call in copies)[-2] <= PIECE
            assert client.post("unregister")[0] == 200
        assert served.server.request("POST", f"{path}/unregister")[0] == 200


def test_a_model_copies_large_memory_of_the_bridge_itself(served):
    (pid,) = pids_of(served, "own")

    def pinned():
        calls = served.machine.calls("cuMemHostRegister", pid)
        return any(call.arguments[0] >= LARGE for call in calls)

    assert served.infer("own", [1.0]) == (200, [0, 0])
    wait_until(pinned, "the memory to be pinned", served.server)
    assert served.infer("own", [1.0]) == (200, [0, 0])
    for name in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"):
        assert served.machine.calls(name, pid)[-1].arguments == (LARGE, 1)
