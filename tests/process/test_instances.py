"""Instances, versions and files of models, as the configuration asks for them."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_code_model

IDENTITY = """
arguments = self.args
self.said = ' '.join(arguments[key] for key in (
    'model_instance_name', 'model_instance_kind', 'model_instance_device_id', 'model_version'))
"""
VERSIONS = {
    "latest": ("", [3]),
    "named": ("version_policy { specific { versions: [1, 3] } }", [1, 3]),
}


@pytest.fixture(scope="module")
def server(repository):
    write_code_model(repository, "m", config="instance_group [{ count: 3 }]")
    write_code_model(
        repository,
        "groups",
        config='instance_group [{ count: 2 }, { name: "other", kind: KIND_CPU }]',
    )
    write_code_model(repository, "auto", config="instance_group [{ kind: KIND_AUTO }]")
    write_code_model(repository, "gpu", config="instance_group [{ kind: KIND_GPU }]")
    for name, (policy, _) in VERSIONS.items():
        for version in (1, 2, 3):
            write_code_model(repository, name, version=version, config=policy)
    named = write_code_model(repository, "named_file", config='default_model_filename: "main.py"')
    (named / "1" / "model.py").rename(named / "1" / "main.py")
    (named / "1" / "sibling.py").write_text("value = 'beside'")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with running_server(repository, "--gpu-fallback=host", environment=hidden) as running:
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


def test_the_instances_of_a_group_work_at_the_same_time_though_one_was_quick(server, threads):
    assert names(server, threads, "m", 3) == [f"m_0_{i} CPU 0 1" for i in range(3)]
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
        wait_until(lambda: server.open_requests() == 8, "the others to wait", server)
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


def test_each_group_has_its_instances_and_names(server, threads):
    found = names(server, threads, "groups", 3)
    assert found == ["groups_0_0 CPU 0 1", "groups_0_1 CPU 0 1", "other_0 CPU 0 1"]


def test_a_model_without_groups_has_one_instance(server):
    assert said(server, IDENTITY, "named_file").split()[0] == "named_file_0"
    assert said(server, "self.said = os.environ.get('HOME')", "named_file") == os.environ["HOME"]


def test_without_a_gpu_its_instances_run_on_the_host_when_that_is_allowed(server):
    for model in ("auto", "gpu"):
        assert said(server, IDENTITY, model) == f"{model}_0_0 CPU 0 1"
    fallback = 'gpubridge_fallbacks_total{{model="{}",reason="no_gpu",version="1"}}'
    metrics = server.metrics()
    assert [metrics.get(fallback.format(model), 0) for model in ("auto", "gpu", "m")] == [0, 1, 0]
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
