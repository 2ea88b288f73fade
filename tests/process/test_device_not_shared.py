"""A GPU whose memory other processes cannot open: models run there, at no more cost than they must."""

from __future__ import annotations

import numpy as np
import pytest

from tests.process.device_models import ARENA, DOUBLE, DeviceServer, write_device_model
from tests.process.server import running_server
from tests.simcuda.machine import lawful_machine

COUNT = 20_000
NBYTES = 4 * COUNT
UPLOADED = 'parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "uploaded", DOUBLE, config=UPLOADED)
    with lawful_machine() as machine:
        machine.refuse_legacy_handles()
        machine.refuse_memory_fds()
        flag = f"--backend-config=python,device-arena-bytes={ARENA}"
        environment = dict(machine.environment())
        with running_server(repository, flag, environment=environment) as server:
            yield DeviceServer(server, machine)


def test_a_model_has_its_gpu_and_an_arena_there(served):
    values = np.random.default_rng(1).random(COUNT, np.float32)
    with served.doing("double", d2h=(NBYTES, 1), waits=1):
        assert served.infer("double", values) == (200, (2 * values).tolist())
    with served.doing("uploaded", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1):
        assert served.infer("uploaded", values) == (200, (2 * values).tolist())


def test_the_server_keeps_no_arena_that_nobody_uses(served):
    assert served.infer("uploaded", [1.0]) == (200, [2.0])
    # The stub that its inputs are uploaded for has its own.
    assert ARENA <= served.machine.used(0) < 2 * ARENA
