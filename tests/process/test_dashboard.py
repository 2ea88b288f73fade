"""The queries of deploy/: a live server has every metric and every label that they name."""

import re

import pytest

from tests.codebase.test_deploy import METRIC, queries
from tests.process.server import STARTED, running_server, write_code_model
from tests.process.test_status import fetch

# A machine with one GPU, as the library of its driver tells of it.
PYNVML = """
from types import SimpleNamespace

class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(gpu): return "GPU-1"
def nvmlDeviceGetUtilizationRates(gpu): return SimpleNamespace(gpu=50)
def nvmlDeviceGetMemoryInfo(gpu): return SimpleNamespace(total=100, used=40)
def nvmlDeviceGetPowerUsage(gpu): return 1000
def nvmlDeviceGetEnforcedPowerLimit(gpu): return 2000
def nvmlDeviceGetTotalEnergyConsumption(gpu): return 3000
"""
LABELS = re.compile(r'(\w+)(?:=~?|!=)"')
_SCRAPED = {"job", "namespace", "pod"}
"""Labels that Prometheus adds."""

GROUPS = re.compile(r"by \(([^)]*)\)")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """The label names of each sample of a server whose model was used, failed, and fell back."""
    repository = tmp_path_factory.mktemp("repository")
    modules = tmp_path_factory.mktemp("modules")
    (modules / "pynvml.py").write_text(PYNVML)
    write_code_model(repository, config="instance_group [{ kind: KIND_GPU }]")
    hidden = {"PYTHONPATH": str(modules), "CUDA_VISIBLE_DEVICES": ""}
    given = {"environment": hidden, "command": STARTED}
    with running_server(repository, "--gpu-fallback=host", **given) as server:
        assert server.ask("self.said = 1") == (200, "1")
        server.ask("raise ValueError")
        page = fetch(server.metrics_url, "/metrics")[2].decode()
    found = {}
    for line in page.splitlines():
        name, labels = re.match(r"(#|\w+)(?:{(.*)})?", line).groups()
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


@pytest.mark.parametrize("name", ["dashboard", "alerts", "kserve"])
def test_a_server_answers_each_query(name, samples):
    for query in queries()[name]:
        asked = METRIC.findall(query)
        assert asked or "up{" in query
        assert set(asked) <= samples.keys(), query
        has = set.union(set(), *(samples[metric] for metric in asked))
        named = {label.strip() for group in GROUPS.findall(query) for label in group.split(",")}
        named |= set(LABELS.findall(query))
        assert not asked or named - _SCRAPED <= has, query
