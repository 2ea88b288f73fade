"""Processes that see the GPUs in orders of their own: they mean the same ones all the same."""

import json
import sys

import numpy as np

from tests.process.controlled import control, only
from tests.process.device_models import (
    ARENA,
    DOUBLE,
    WHERE,
    running_device_server,
    write_device_model,
)
from tests.process.server import descendants
from tests.process.test_device_clients import COUNT, NBYTES, Client, infer, prepared, region
from tests.process.test_device_edges import IN_ARENA, ensemble
from tests.process.test_device_network import WORDS, said
from tests.simcuda.processes import running_worker

TURNED = "1,0"


def interpreter(folder, visible):
    """Make an environment whose processes see these GPUs; returns the parameter that names it."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "python3"
    program.write_text(f'#!/bin/sh\nCUDA_VISIBLE_DEVICES={visible} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    value = f'value {{ string_value: "{folder}" }}'
    return f'parameters {{ key: "EXECUTION_ENV_PATH" {value} }}'


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def test_numbers_are_those_of_the_server(tmp_path):
    write_device_model(tmp_path, "double", IN_ARENA)
    environment = {"CUDA_VISIBLE_DEVICES": TURNED}
    with running_device_server(tmp_path, environment=environment) as served:
        # The first of the server's is the machine's second.
        assert served.infer("double", values())[0] == 200
        assert served.machine.used(1) >= ARENA
        assert served.machine.used(0) == 0
        with running_worker(served.machine) as worker:
            client = Client(worker, served.server)
            given = values()
            client.allocate("in", NBYTES, device=1)
            client.write("in", given)
            status, answer = client.register("in", NBYTES, device=1)
            assert status == 400
            error = json.loads(answer)["error"]
            assert "register it with the device it was allocated on" in error
            assert "got memory on device 0" in error
            assert client.register("in", NBYTES, device=0) == (200, "")
            with served.doing("double", d2h=(NBYTES, 1), waits=1):
                status, answer = infer(served, "double", region("in"))
            assert (status, answer["outputs"][0]["data"]) == (200, (2 * given).tolist())
            assert client.post("unregister") == (200, "")


def test_a_stub_that_sees_them_in_another_order_is_on_the_same_gpu(tmp_path):
    turned = interpreter(tmp_path / "turned_environment", TURNED)
    repository = tmp_path / "models"
    write_device_model(repository, "first", DOUBLE)
    write_device_model(repository, "turned", DOUBLE, config=turned)
    write_device_model(repository, "where", WHERE, config=turned, tensors=WORDS)
    ensemble(repository, "both", ["first", "turned"])
    with running_device_server(repository) as served:
        # The server may have memory there, for tensors of other tests' models.
        stubs = descendants(served.server.pid)
        assert not any(served.machine.used(1, pid) for pid in stubs)
        given = values()
        # Nothing of the edge is seen by the host.
        with (
            served.doing("first", d2d=(NBYTES, 1)),
            served.doing("turned", d2h=(NBYTES, 1), waits=1),
        ):
            assert served.infer("both", given) == (200, (4 * given).tolist())
        # The number by which its libraries know the GPU is that of the process.
        assert said(served, "where") == {"GPU 1 where_0_0 1 True"}
        with running_worker(served.machine) as worker:
            client = Client(worker, served.server)
            prepared(client, "in")
            client.write("in", given)
            with served.doing("turned", d2h=(NBYTES, 1), waits=1):
                status, answer = infer(served, "turned", region("in"))
            assert (status, answer["outputs"][0]["data"]) == (200, (2 * given).tolist())
            assert client.post("unregister") == (200, "")


def test_a_stub_that_does_not_see_its_gpu_does_not_load(tmp_path):
    config = interpreter(tmp_path / "environment", "1")
    repository = tmp_path / "models"
    write_device_model(repository, "blind", DOUBLE, config=config)
    write_device_model(repository, "double", DOUBLE)
    with running_device_server(repository, *only("double")) as served:
        status, reason = control(served.server, "load", "blind")
        assert status == 400
        assert "is not seen by this process" in reason
        assert "check CUDA_VISIBLE_DEVICES" in reason
        assert served.server.is_ready("double")
