"""GPUs whose memory does not cross processes: models run there, and tensors cross in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.process.device_models import ARENA, DOUBLE, DeviceServer, write_device_model
from tests.process.server import running_server
from tests.process.test_device_edges import CALLER
from tests.simcuda.machine import running_machine

COUNT = 50_000
NBYTES = 4 * COUNT
UPLOADED = 'parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }'


@pytest.fixture(
    scope="module",
    params=[("cuIpcGetMemHandle", 801), ("cuIpcOpenMemHandle", 801), ("cuIpcOpenMemHandle", 201)],
    ids=lambda fault: f"{fault[0]}-{fault[1]}",
)
def served(request, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "uploaded", DOUBLE, config=UPLOADED)
    write_device_model(repository, "call_double", CALLER)
    with running_machine() as machine:
        machine.fail(*request.param)
        flag = f"--backend-config=python,device-arena-bytes={ARENA}"
        environment = dict(machine.environment())
        with running_server(repository, flag, environment=environment) as server:
            yield DeviceServer(server, machine)
        assert machine.violations() == []


def test_a_model_on_the_gpu_answers(served):
    values = np.random.default_rng(1).random(COUNT, np.float32)
    with served.doing("double", d2h=(NBYTES, 1), waits=1):
        assert served.infer("double", values) == (200, (2 * values).tolist())
    with served.doing("uploaded", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1):
        assert served.infer("uploaded", values) == (200, (2 * values).tolist())


def test_models_on_one_gpu_pass_tensors_through_host_memory(served):
    values = np.random.default_rng(2).random(COUNT, np.float32)
    with served.doing("call_double", d2h=(NBYTES, 1), waits=1):
        assert served.infer("call_double", values) == (200, (2 * values).tolist())


def test_nobody_holds_an_arena_that_only_one_could_use(served):
    # Each of the three stubs has its own.
    assert served.machine.used(0) < 4 * ARENA


def test_the_reason_is_logged_once_and_counted(served):
    page = served.server.metrics()
    labels = 'model="double",reason="device_memory_not_shared",version="1"'
    assert page[f"gpubridge_fallbacks_total{{{labels}}}"] == 1
