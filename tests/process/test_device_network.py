"""Models on a GPU: where they run, and what tensors that come from and go to the network cost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.process.device_models import (
    DOUBLE,
    WHERE,
    running_device_server,
    write_device_model,
)
from tests.process.server import write_code_model, write_model

COUNT = 20_000
NBYTES = 4 * COUNT
# Calls of which no request makes any, by their beginnings; what is slow, or waits without being counted.
FORBIDDEN = (
    "cuIpc",
    "cuMemAlloc",
    "cuMemFree",
    "cuDevicePrimary",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
)
WORDS = {
    "inputs": 'name: "IN" data_type: TYPE_FP32 dims: [-1]',
    "outputs": 'name: "OUT" data_type: TYPE_STRING dims: [1]',
}


def placement(value, name="INPUT_PLACEMENT"):
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "uploaded", DOUBLE, config=placement("device"))
    write_device_model(repository, "where", WHERE, gpus="0, 1", config="max_batch_size: 0", **WORDS)
    write_model(repository, "auto", WHERE, **WORDS, config="instance_group [{ kind: KIND_AUTO }]")
    write_model(repository, "implied", WHERE, **WORDS)
    write_model(
        repository,
        "second",
        WHERE,
        **WORDS,
        config="instance_group [{ kind: KIND_GPU count: 2 gpus: [1] }]",
    )
    write_code_model(repository, "host", config="instance_group [{ kind: KIND_CPU }]")
    with running_device_server(repository) as served:
        yield served


def said(served, model, times=1):
    with ThreadPoolExecutor(times) as pool:
        return {answer[1][0] for answer in pool.map(served.infer, [model] * times, [[1.0]] * times)}


@pytest.mark.parametrize("model", ["where", "auto", "implied"])
def test_an_instance_runs_on_each_gpu(served, model):
    name = model if model == "implied" else f"{model}_0"
    assert said(served, model, 16) == {f"GPU {i} {name}_{i} {i} True" for i in (0, 1)}


def test_an_instance_runs_on_the_gpu_that_is_named(served):
    assert said(served, "second", 16) <= {f"GPU 1 second_0_{i} 1 True" for i in (0, 1)}


def test_an_output_of_the_gpu_goes_to_the_network_with_one_copy_and_one_wait(served):
    values = np.random.default_rng(1).random(COUNT, np.float32)
    for _ in range(3):
        with served.doing("double", d2h=(NBYTES, 1), waits=1):
            assert served.infer("double", values) == (200, (2 * values).tolist())


def test_an_input_of_the_network_goes_to_the_gpu_with_one_copy(served):
    values = np.random.default_rng(2).random(COUNT, np.float32)
    for _ in range(3):
        with served.doing("uploaded", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1):
            assert served.infer("uploaded", values) == (200, (2 * values).tolist())


def test_a_request_calls_the_driver_for_its_copies_only(served):
    values = np.ones(COUNT, np.float32)
    for _ in range(3):
        served.infer("uploaded", values)
    (pid,) = pids_of(served, "uploaded")
    before = len(served.machine.calls(pid=pid))
    for _ in range(4):
        served.infer("uploaded", values)
    calls = [call.name for call in served.machine.calls(pid=pid)][before:]
    assert not [name for name in calls if name.startswith(FORBIDDEN)]
    assert calls.count("cuEventSynchronize") <= 4
    # Half of these are the model's kernel.
    assert calls.count("cuMemcpyHtoDAsync") == calls.count("cuMemcpyDtoHAsync") == 8


def pids_of(served, model):
    def runs(pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:  # it has ended meanwhile, perhaps between opening and reading
            return False
        return any(word.startswith(f"{model}_") for word in words)

    return [pid for pid in served.server.stubs() if runs(pid)]


def test_a_stub_without_a_gpu_loads_nothing_of_it(served):
    (pid,) = pids_of(served, "host")
    assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()
    (pid,) = pids_of(served, "double")
    assert "libcuda" in Path(f"/proc/{pid}/maps").read_text()


def test_a_server_without_models_on_a_gpu_loads_nothing_of_it(tmp_path):
    write_code_model(tmp_path, config="instance_group [{ kind: KIND_CPU }]")
    with running_device_server(tmp_path) as served:
        assert served.server.ask("self.said = 1") == (200, "1")
        assert "libcuda" not in Path(f"/proc/{served.server.pid}/maps").read_text()
        assert served.machine.calls() == []
