"""The server's own context on a GPU is lost: whoever needs it goes by way of the host, and the rest goes on."""

import json
import os
import signal

import numpy as np
import pytest

from tests.process.device_models import DOUBLE, running_device_server, write_device_model
from tests.process.server import wait_until, write_model
from tests.process.test_device_clients import COUNT, NBYTES, Client, infer, prepared, region
from tests.process.test_device_edges import CALLER, HOST, ensemble
from tests.process.test_device_network import pids_of
from tests.simcuda.processes import running_worker

GONE = "whose exporter has freed it, or is gone"
LOST = "models continue and exchange tensors in host memory"


def values():
    return np.random.default_rng().random(COUNT, np.float32)


@pytest.fixture(scope="module")
def served(repository):
    for name in ("double", "other"):
        write_device_model(repository, name, DOUBLE)
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    write_device_model(repository, "call_host", CALLER)
    write_device_model(repository, "call_other", CALLER)
    ensemble(repository, "both", ["double", "other"])
    options = {"tolerated": GONE, "switches": {"dead_exporter": "fault"}}
    with running_device_server(repository, **options, own=True) as served:
        (other,) = pids_of(served, "other")
        with running_worker(served.machine) as worker:
            client = Client(worker, served.server)
            prepared(client, "dead")
            client.write("dead", np.ones(COUNT, np.float32))
            given = values()
            assert served.infer("call_host", given) == (200, (2 * given).tolist())
            worker.kill()
            # A model that looks at what is gone fails, and nobody else.
            assert infer(served, "double", region("dead"))[0] in (500, 503)
            wait_until(served.server.is_ready, "all models to be ready", served.server)
            assert pids_of(served, "other") == [other]
            # This one is on the host, so that it is the server that looks at it.
            status, answer = infer(served, "host", region("dead"))
            assert status == 500, answer
            assert "is lost" in answer["error"]
            assert client.post("region/dead/unregister") == (200, "")
        yield served


def test_everything_that_can_be_is_served(served):
    server = served.server
    names = ("double", "other", "call_host", "call_other")
    # The process that has looked at what is gone may be replaced yet.
    wait_until(lambda: all(pids_of(served, name) for name in names), "their processes", server)
    pids = [pids_of(served, name) for name in names]
    factors = {"double": 2, "host": 2, "both": 4, "call_other": 2, "call_host": 2}
    for _ in range(2):
        for model, factor in factors.items():
            given = values()
            assert served.infer(model, given) == (200, (factor * given).tolist()), model
    assert pids == [pids_of(served, name) for name in names]
    assert server.log().count(LOST) == 1
    counted = 'gpubridge_fallbacks_total{{model="{}",reason="device_not_shared",version="1"}}'
    assert all(server.metrics()[counted.format(name)] == 1 for name in ("double", "call_host"))


def test_stubs_that_start_afterwards_use_their_gpu_alone(served):
    (pid,) = pids_of(served, "double")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pids_of(served, "double") not in ([], [pid]), "a new stub", served.server)
    wait_until(lambda: served.server.is_ready("double"), "the model", served.server)
    given = values()
    status, answer = served.infer("both", given)
    assert (status, answer) == (200, (4 * given).tolist()), served.server.log()
    name = 'gpubridge_fallbacks_total{model="double",reason="device_not_shared",version="1"}'
    # The dead one may have been told to before it was killed.
    assert served.server.metrics()[name] in (1, 2)


def test_memory_of_clients_is_refused_with_the_reason(served):
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        client.allocate("in", NBYTES)
        status, answer = client.register("in", NBYTES)
        assert status == 500
        assert "is lost" in json.loads(answer)["error"]
    assert served.server.is_ready()
