"""Failures on a GPU: processes that die, memory that is short, a driver that fails."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.process.device_models import (
    ARENA,
    DOUBLE,
    HANDLES,
    SMALL_ARENA,
    running_device_server,
    write_device_model,
)
from tests.process.gates import Gate
from tests.process.server import wait_until, write_model
from tests.process.test_device_clients import Client, infer, prepared, region
from tests.process.test_device_edges import HOST, IN_ARENA, ensemble
from tests.process.test_device_network import pids_of, placement
from tests.simcuda.processes import running_worker

COUNT = 20_000
ILLEGAL_ADDRESS = 700

# Doubles its input, but only when it is told to.
SLOW = DOUBLE.replace(
    "    def answer(self, request):",
    """    def answer(self, request):
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        open(os.path.join(folder, "begun"), "w").close()
        fcntl.flock(open(os.path.join(folder, "go")), fcntl.LOCK_SH)""",
)


def values():
    return np.random.default_rng().random(COUNT, np.float32)


@pytest.mark.parametrize("handles", HANDLES)
def test_handed_over_memory_of_a_dead_stub_stays_while_in_use(tmp_path, handles):
    write_device_model(tmp_path, "arena", IN_ARENA)
    write_device_model(tmp_path, "slow", SLOW)
    ensemble(tmp_path, "both", ["arena", "slow"])
    marks, gate = tmp_path / "slow", Gate(tmp_path / "slow" / "go")
    closing, freeing = {
        "auto": ("cuIpcCloseMemHandle", "cuMemFree"),
        "fd": ("cuMemAddressFree", "cuMemAddressFree"),
    }[handles]
    with (
        # A failure stops the server first, which ends the request that the pool waits for.
        ThreadPoolExecutor(1) as pool,
        running_device_server(tmp_path, handles=handles) as served,
    ):
        given = values()
        future = pool.submit(served.infer, "both", given)
        wait_until((marks / "begun").exists, "the second model to begin", served.server)
        (pid,) = pids_of(served, "arena")
        served.wait_until_complete(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pids_of(served, "arena") not in ([], [pid]), "a new stub", served.server)
        wait_until(served.server.is_ready, "the server to be ready", served.server)
        gate.open()
        assert future.result() == (200, (4 * given).tolist())
        # The dead stub's arena goes when the other has closed it; what the libraries have stays.
        wait_until(
            lambda: any(call.pid == served.server.pid for call in served.machine.calls(freeing)),
            "the arena of the dead stub to be freed",
            served.server,
        )
        assert served.machine.used(0) < 3 * ARENA
        (reader,) = pids_of(served, "slow")
        order = [
            (call.pid, call.name)
            for call in served.machine.calls()
            if call.name in (closing, freeing)
        ]
        closed = order.index((reader, closing))
        assert closed < order.index((served.server.pid, freeing))
        assert served.infer("both", given) == (200, (4 * given).tolist())


def test_tensors_stay_on_the_gpu_while_their_consumer_restarts(tmp_path):
    write_device_model(tmp_path, "arena", IN_ARENA)
    write_device_model(tmp_path, "last", DOUBLE)
    ensemble(tmp_path, "both", ["arena", "last"])
    given = values()
    with running_device_server(tmp_path) as served:
        server = served.server
        assert served.infer("both", given) == (200, (4 * given).tolist())
        # After the second death in a row the next process starts a moment later.
        for _ in range(2):
            wait_until(lambda: server.is_ready("last"), "a stub", server)
            (pid,) = pids_of(served, "last")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not server.is_ready("last"), "the death to be noticed", server)
        with served.doing("arena"):
            assert served.infer("both", given) == (200, (4 * given).tolist())
        copies = [
            call.name for call in served.machine.calls(pid=server.pid) if "Memcpy" in call.name
        ]
        assert copies == []


def test_a_tensor_larger_than_the_arena(tmp_path):
    write_device_model(tmp_path, "first", DOUBLE, config=placement("device"))
    write_device_model(tmp_path, "second", DOUBLE)
    ensemble(tmp_path, "both", ["first", "second"])
    with running_device_server(tmp_path, arena=SMALL_ARENA) as served:
        given = np.ones(600_000, np.float32)
        with (
            served.doing("first", d2h=(given.nbytes, 1), waits=1),
            served.doing("second", d2h=(given.nbytes, 1), waits=1),
        ):
            assert served.infer("both", given) == (200, (4 * given).tolist())
        reasons = {name for name, value in served.server.metrics().items() if "fallbacks" in name}
        assert any("device_input_on_host" in name for name in reasons)


def test_an_error_that_stays_ends_the_stub_and_nobody_else(tmp_path):
    write_device_model(tmp_path, "double", DOUBLE)
    write_device_model(tmp_path, "other", DOUBLE)
    with running_device_server(tmp_path) as served:
        given = values()
        assert served.infer("double", given)[0] == 200
        pids = pids_of(served, "double"), pids_of(served, "other")
        # Late enough that the answer waits for it.
        served.machine.delay(5000)
        served.machine.fail("cuEventSynchronize", ILLEGAL_ADDRESS)
        status, error = served.infer("double", given)
        assert status == 500
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in error
        served.machine.heal()
        wait_until(lambda: pids_of(served, "double") != pids[0], "a new stub", served.server)
        wait_until(served.server.is_ready, "the stub to be back", served.server)
        assert served.infer("double", given) == (200, (2 * given).tolist())
        assert served.infer("other", given) == (200, (2 * given).tolist())
        assert pids_of(served, "other") == pids[1]


def test_nothing_is_left_behind(tmp_path):
    write_device_model(tmp_path, "double", DOUBLE)
    with running_device_server(tmp_path, handles="fd") as served:
        assert served.infer("double", values())[0] == 200
        served.server.stop()
        assert served.machine.used(0) == 0


@pytest.fixture(scope="module")
def dying(repository):
    for name in ("double", "other"):
        write_device_model(repository, name, DOUBLE)
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    with running_device_server(
        repository, tolerated="whose exporter has freed it, or is gone"
    ) as served:
        yield served


# Where what is gone is an error, the server's own context is lost, too: tests/process/test_device_server_lost.py
@pytest.mark.parametrize("becomes", ["stale", "held"])
def test_a_client_that_dies_takes_nobody_with_it(dying, becomes):
    served = dying
    served.machine.set(dead_exporter=becomes)
    (other,) = pids_of(served, "other")
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        prepared(client, "dead")
        client.write("dead", np.ones(COUNT, np.float32))
        assert infer(served, "double", region("dead"))[0] == 200
        worker.kill()
        for model in ("double", "host"):
            assert infer(served, model, region("dead"))[0] == 200
        assert client.post("region/dead/unregister") == (200, "")
        # Nobody has it any more: a driver that has held it frees it.
        wait_until(
            lambda: served.machine.used(0, worker.pid) == 0, "its memory to go", served.server
        )
    for model in ("double", "other", "host"):
        assert served.infer(model, np.ones(COUNT, np.float32)) == (200, [2.0] * COUNT)
    assert pids_of(served, "other") == [other]
