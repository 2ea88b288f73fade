"""Instances, versions and files of models, as the configuration asks for them."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_code_model, write_model

IDENTITY = """
arguments = self.args
self.said = ' '.join(arguments[key] for key in (
    'model_instance_name', 'model_instance_kind', 'model_instance_device_id', 'model_version'))
"""
# Answers which process it is; first it does what the request's id says.
TURNING = """
import fcntl, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if request.request_id():
            task, path = request.request_id().split()
            with open(path + "/ran", "a") as file:
                file.write("x")
            if task == "hold":
                fcntl.flock(open(path + "/end"), fcntl.LOCK_SH)
        pid = np.array([os.getpid()], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)])
"""
VERSIONS = {
    "latest": ("", [3]),
    "latest_2": ("version_policy { latest { num_versions: 2 } }", [2, 3]),
    "every": ("version_policy { all {} }", [1, 2, 3]),
    "named": ("version_policy { specific { versions: [1, 3] } }", [1, 3]),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repositories = [tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("more")]
    models = repositories[0]
    write_code_model(models, "m", config="instance_group [{ count: 3 }]")
    write_code_model(
        models, "groups", config='instance_group [{ count: 2 }, { name: "other", kind: KIND_CPU }]'
    )
    write_code_model(models, "default")
    write_model(
        models,
        "turning",
        TURNING,
        outputs='name: "OUT" data_type: TYPE_INT32 dims: [1]',
        config="instance_group [{ count: 2 }]",
    )
    write_code_model(models, "auto", config="instance_group [{ kind: KIND_AUTO }]")
    write_code_model(models, "gpu", config="instance_group [{ kind: KIND_GPU }]")
    for name, (policy, _) in VERSIONS.items():
        for version in (1, 2, 3):
            write_code_model(models, name, version=version, config=policy)
    named = write_code_model(models, "named_file", config='default_model_filename: "main.py"')
    (named / "1" / "model.py").rename(named / "1" / "main.py")
    (named / "1" / "sibling.py").write_text("value = 'beside'")
    write_code_model(repositories[1], "elsewhere")
    with running_server(repositories, "--gpu-fallback=host") as running:
        yield running


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def said(server, code, model):
    status, text = server.ask(code, model)
    assert status == 200, text
    return text


def names(server, threads, model, count):
    """Identities of a model's instances, from requests that meet inside them."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Path(folder) / "gate")
        meet = f"open(f'{folder}/met{{os.getpid()}}', 'w').close(); {gate.wait}"
        found = [threads.submit(said, server, f"{IDENTITY}\n{meet}", model) for _ in range(count)]
        wait_until(lambda: len(list(Path(folder).glob("met*"))) == count, "all to meet", server)
        gate.open()
        return sorted(each.result() for each in found)


def test_the_instances_of_a_group_work_at_the_same_time(server, threads):
    assert names(server, threads, "m", 3) == [f"m_0_{i} CPU 0 1" for i in range(3)]


def test_instances_that_were_quick_work_at_the_same_time(server, threads):
    # One instance has done all of this, and is given the next requests, too.
    for _ in range(200):
        said(server, "self.said = ''", "m")
    assert names(server, threads, "m", 3) == [f"m_0_{i} CPU 0 1" for i in range(3)]


def test_requests_behind_slow_ones_move_to_another_instance_once(server, threads, tmp_path):
    for _ in range(200):
        said(server, "self.said = ''", "m")
    note = f"import tempfile; tempfile.mkstemp(dir={str(tmp_path)!r}, prefix='ran')\n"
    gates = [Gate(tmp_path / f"gate{number}") for number in range(3)]
    slow = [threads.submit(said, server, note + gate.wait, "m") for gate in gates]
    try:
        wait_until(lambda: len(list(tmp_path.glob("ran*"))) == 3, "all instances are at work")
        waiting = [threads.submit(said, server, note, "m") for _ in range(5)]
        pending = 'nv_inference_pending_request_count{model="m",version="1"}'
        wait_until(lambda: server.metrics()[pending] == 8, "the others to wait", server)
        gates[1].open()
        for each in waiting:
            each.result(timeout=60)
        assert sum(each.done() for each in slow) <= 1
    finally:
        for gate in gates:
            gate.open()
    for each in slow:
        each.result(timeout=60)
    # Each instance has come to what it was sent before these.
    names(server, threads, "m", 3)
    assert len(list(tmp_path.glob("ran*"))) == 8


def turn(server, task="", folder=""):
    """Have the model that turns slow do something; returns the process that did."""
    if folder:
        folder.mkdir(exist_ok=True)
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
    body = json.dumps({"id": f"{task} {folder}".strip(), "inputs": [tensor]})
    status, _, answer = server.request("POST", "/v2/models/turning/infer", body)
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"][0]


def gate_in(folder):
    folder.mkdir()
    return Gate(folder / "end")


def test_requests_behind_an_instance_that_turns_slow_move_once(server, threads, tmp_path):
    # It takes microseconds: more requests wait at the instance that is at work, not at the other.
    for _ in range(200):
        turn(server)
    first, *others = [tmp_path / name for name in ("first", "second", "third")]
    noted = [tmp_path / f"noted{number}" for number in range(6)]
    gates = [gate_in(folder) for folder in (first, *others)]
    slow = threads.submit(turn, server, "hold", first)
    try:
        wait_until((first / "ran").exists, "the slow request to begin", server)
        waiting = [threads.submit(turn, server, "note", folder) for folder in noted]
        served = {each.result(timeout=100) for each in waiting}
        assert not slow.done()
    finally:
        gates[0].open()
    assert len({slow.result(timeout=100)} | served) == 2
    # The slow one has come to all that it was sent when both work at the same time.
    held = [threads.submit(turn, server, "hold", folder) for folder in others]
    try:
        for folder in others:
            wait_until((folder / "ran").exists, "both to be at work", server)
    finally:
        for gate in gates:
            gate.open()
    assert len({each.result(timeout=100) for each in held}) == 2
    assert [(folder / "ran").read_text() for folder in noted] == ["x"] * 6


def test_each_group_has_its_instances_and_names(server, threads):
    found = names(server, threads, "groups", 3)
    assert found == ["groups_0_0 CPU 0 1", "groups_0_1 CPU 0 1", "other_0 CPU 0 1"]


@pytest.mark.parametrize(
    ("model", "name"), [("default", "default_0"), ("elsewhere", "elsewhere_0")]
)
def test_a_model_without_groups_has_one_instance(server, model, name):
    assert said(server, IDENTITY, model).split()[0] == name
    assert said(server, "self.said = os.environ.get('HOME')", model) == os.environ["HOME"]


@pytest.mark.parametrize("model", ["auto", "gpu"])
def test_without_a_gpu_its_instances_run_on_the_host_when_that_is_allowed(server, model):
    if "no GPU is used" not in server.log():
        pytest.skip("there is a GPU")
    assert said(server, IDENTITY, model) == f"{model}_0_0 CPU 0 1"
    notice = "model 'gpu', instance group 'gpu_0': KIND_GPU runs on the host, because there is no"
    assert notice in server.log()


@pytest.mark.parametrize("model", VERSIONS)
def test_the_version_policy_decides_which_versions_run(server, model):
    expected = VERSIONS[model][1]
    assert [version for name, version in server.index() if name == model] == expected
    assert said(server, IDENTITY, model).split()[-1] == str(expected[-1])
    for version in (1, 2, 3):
        ready, _, _ = server.request("GET", f"/v2/models/{model}/versions/{version}/ready")
        assert (ready == 200) == (version in expected)


def test_a_model_is_read_from_the_file_that_its_configuration_names(server):
    assert said(server, "from sibling import value; self.said = value", "named_file") == "beside"


def test_a_dead_instance_leaves_its_work_to_the_others(server, threads):
    def die_or_answer(number):
        code = "os._exit(1)" if number == 3 else f"self.said = {number}"
        return server.ask(code)

    answers = list(threads.map(die_or_answer, range(16)))
    assert [status for status, _ in answers].count(503) == 1
    assert [text for _, text in answers[4:]] == [str(i) for i in range(4, 16)]
    wait_until(server.is_ready, "the instance to come back", server)
