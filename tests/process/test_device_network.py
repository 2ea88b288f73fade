"""Models on a GPU: where they run, and what tensors that come from and go to the network cost."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.device_models import (
    DOUBLE,
    WHERE,
    running_device_server,
    write_device_model,
)
from tests.process.server import write_code_model, write_model

WORDS = "IN FP32 [-1] > OUT STRING [1]"


def placement(value, name="INPUT_PLACEMENT"):
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


@pytest.fixture(scope="module")
def served(repository):
    write_device_model(repository, "double", DOUBLE)
    write_device_model(
        repository, "where", WHERE, gpus="0, 1", config="max_batch_size: 0", tensors=WORDS
    )
    write_model(
        repository, "auto", WHERE, tensors=WORDS, config="instance_group [{ kind: KIND_AUTO }]"
    )
    write_model(repository, "implied", WHERE, tensors=WORDS)
    write_model(
        repository,
        "second",
        WHERE,
        tensors=WORDS,
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
