"""tritonclient's own cuda_shared_memory, as users have it: it brings CUDA's runtime along."""

import json
import sys

import pytest

from tests.commands import run_command
from tests.gpu.lane import LIBRARIES, needs_library, running_lane_server
from tests.gpu.models import write_lab

pytestmark = pytest.mark.real_gpu

# A process of its own: this one has no business with a GPU.
_CLIENT = """
import importlib, json, sys
import numpy as np
import tritonclient.utils.cuda_shared_memory as memory

protocol, url, model, does = sys.argv[1:]
library = importlib.import_module(f"tritonclient.{protocol}")
client = library.InferenceServerClient(url)
count = 50_000
handles = {}
for name in ("in", "out"):
    handles[name] = memory.create_shared_memory_region(name, 4 * count, 0)
    client.register_cuda_shared_memory(name, memory.get_raw_handle(handles[name]), 0, 4 * count)
given = library.InferInput("IN", [count], "FP32")
given.set_shared_memory("in", 4 * count)
output = library.InferRequestedOutput("OUT")
output.set_shared_memory("out", 4 * count)
wrong = 0
for seed in range(3):
    values = np.random.default_rng().random(count, np.float32)
    memory.set_shared_memory_region(handles["in"], [values])
    memory.set_shared_memory_region(handles["out"], [np.full(count, np.nan, np.float32)])
    client.infer(model, [given], outputs=[output], parameters={"do": does})
    answer = memory.get_contents_as_numpy(handles["out"], np.float32, [count])
    wrong += int(np.sum(answer != 2 * values))
known = client.get_cuda_shared_memory_status()
names = [r.name for r in known.regions.values()] if protocol == "grpc" else [r["name"] for r in known]
client.unregister_cuda_shared_memory()
for handle in handles.values():
    memory.destroy_shared_memory_region(handle)
client.close()
print(json.dumps([wrong, sorted(names)]))
"""


@pytest.fixture(scope="module", params=LIBRARIES)
def served(request, machine, tmp_path_factory):
    needs_library("cuda_shared_memory")
    needs_library(request.param)
    repository = tmp_path_factory.mktemp("models")
    write_lab(repository, request.param)
    with running_lane_server(machine, repository) as served:
        yield served


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("does", "copies"), [("double", 3), ("final", 0)])
def test_tritonclient_s_regions_are_read_and_written_in_place(served, protocol, does, copies):
    url = served.server.http_url if protocol == "http" else served.server.grpc_url
    nbytes = 4 * 50_000
    with served.costing("lab", d2d=(copies * nbytes, copies), waits=(3, 3)):
        done = run_command([sys.executable, "-c", _CLIENT, protocol, url, "lab", does], timeout=100)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, ["in", "out"]]
