"""Clients' CUDA memory: registered, read and written where it is (`tests/gpu` has both protocols)."""

import base64
import io
import json
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from tests.process.device_models import (
    DOUBLE,
    LIBRARY,
    on_device,
    running_device_server,
    write_device_model,
)
from tests.process.gates import Gate
from tests.process.server import wait_until, write_model
from tests.process.test_device_edges import HOST, doubling_into, ensemble
from tests.process.test_device_network import pids_of, placement
from tests.simcuda.processes import running_worker

COUNT = 20_000
NBYTES = 4 * COUNT
BLOCK = 2 << 20

# Doubles its input into the place where the output is wanted.
IN_PLACE = doubling_into('request.output("OUT", given.shape(), np.float32, "cuda")')


# Keeps its first input, and answers with what it has kept.
KEEPER = (
    LIBRARY
    + """

class TritonPythonModel:
    def initialize(self, args):
        self.kept = None

    def execute(self, requests):
        given = requests[0].inputs()[0]
        self.kept = self.kept or given
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.kept.as_numpy())])]
"""
)


# Answers from the host while a stream of its own still has to do with its input.
LINGERING = on_device(
    """
given.__dlpack__(stream=library.stream)
folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
library.launch(lambda: fcntl.flock(open(os.path.join(folder, "go")), fcntl.LOCK_SH))
return pb_utils.Tensor("OUT", np.zeros(1, np.float32))
"""
)


@contextmanager
def _shared_file():
    """Give a file in memory, and the path by which another process opens it."""
    with io.FileIO(os.memfd_create("values"), "w+") as file:
        yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


class Client:
    """A client with memory on a GPU: what tritonclient would do, by the driver."""

    def __init__(self, worker, url_of):
        self.worker = worker
        self.url_of = url_of
        self.handles = {}

    def allocate(self, name, nbytes, device=0):
        self.handles[name] = bytes(
            self.worker.do(
                "start(told[2]); memory = globals().setdefault('memory', {});"
                "memory[told[0]] = int(ok(d.cuMemAlloc(told[1])));"
                "answer = raw(ok(d.cuIpcGetMemHandle(memory[told[0]])))",
                [name, nbytes, device],
            )
        )

    def write(self, name, values, offset=0):
        with _shared_file() as (file, path):
            file.write(values.tobytes())
            self.worker.do(
                "values = open(told[1], 'rb').read();"
                "ok(d.cuMemcpyHtoD(memory[told[0]] + told[2], values, len(values)))",
                [name, path, offset],
            )

    def read(self, name, count, offset=0):
        with _shared_file() as (file, path):
            self.worker.do(
                "open(told[3], 'wb').write(read(memory[told[0]] + told[2], told[1]))",
                [name, 4 * count, offset, path],
            )
            return np.frombuffer(file.read(), np.float32)

    def register(self, name, nbytes, device=0, of=None):
        handle = base64.b64encode(self.handles[of or name]).decode()
        body = {"raw_handle": {"b64": handle}, "device_id": device, "byte_size": nbytes}
        return self.post(f"region/{name}/register", body)

    def post(self, path, body=None):
        text = json.dumps(body) if body is not None else None
        status, _, answer = self.url_of.request("POST", f"/v2/cudasharedmemory/{path}", text)
        return status, answer.decode()

    def status(self, name=""):
        path = f"region/{name}/status" if name else "status"
        status, _, answer = self.url_of.request("GET", f"/v2/cudasharedmemory/{path}")
        return status, json.loads(answer)


@pytest.fixture(scope="module")
def served(repository):
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "second", DOUBLE)
    write_device_model(repository, "in_place", IN_PLACE)
    write_device_model(repository, "copies", DOUBLE, config=placement("copy", "INPUT_SHARING"))
    forced = placement("yes", "FORCE_CPU_ONLY_INPUT_TENSORS")
    write_device_model(repository, "forced", DOUBLE, config=forced)
    write_device_model(repository, "keeper", KEEPER)
    write_device_model(repository, "lingering", LINGERING)
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    ensemble(repository, "step", ["lingering"])
    with running_device_server(repository) as served:
        yield served


@pytest.fixture
def client(served):
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        yield client
        assert client.post("unregister")[0] == 200
        assert client.status() == (200, [])
        # Who has it open lets go before the client does.
        for name in client.handles:
            worker.do("ok(d.cuMemFree(memory.pop(told)))", name)


def region(name, nbytes=NBYTES, offset=0):
    return {
        "shared_memory_region": name,
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }


def infer(served, model, source, target=None, count=COUNT):
    entry = {"name": "IN", "datatype": "FP32", "shape": [count], "parameters": source}
    body = {"inputs": [entry]}
    if target is not None:
        body["outputs"] = [{"name": "OUT", "parameters": target}]
    status, _, answer = served.server.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    return status, json.loads(answer)


def prepared(client, *names):
    for name in names:
        # In a block of its own, which any driver opens.
        client.allocate(name, BLOCK)
        assert client.register(name, NBYTES + 256) == (200, "")


COSTS = {
    "double": {"d2d": (NBYTES, 1), "waits": 1},
    "in_place": {"waits": 1},
    "host": {"d2h": (NBYTES, 1), "h2d": (NBYTES, 1), "waits": 2},
    "copies": {"d2d": (2 * NBYTES, 2), "waits": 1},
    "forced": {"d2h": (NBYTES, 1), "d2d": (NBYTES, 1), "waits": 2},
}


@pytest.mark.parametrize("model", COSTS)
def test_from_and_to_memory_of_a_client(served, client, model):
    prepared(client, "in", "out")
    for offset in (0, 256, 0):
        given = np.random.default_rng(offset).random(COUNT, np.float32)
        client.write("in", given, offset)
        client.write("out", np.full(COUNT, np.nan, np.float32))
        with served.doing(model, **COSTS[model]):
            status, answer = infer(served, model, region("in", offset=offset), region("out"))
            assert status == 200, answer
        assert answer["outputs"][0].get("data") is None
        assert (client.read("out", COUNT) == 2 * given).all()


@pytest.mark.parametrize("opened", ["counted", "closed-once", "refused"])
def test_small_regions_of_a_client_share_a_block_where_the_driver_opens_it_twice(
    served, client, opened
):
    served.machine.set(same_block=opened)
    given = np.random.default_rng(6).random(COUNT, np.float32)
    for name in ("in", "out"):
        client.allocate(name, NBYTES)
    client.write("in", given)
    assert client.register("in", NBYTES) == (200, "")
    status, answer = client.register("out", NBYTES)
    if opened != "refused":
        assert infer(served, "double", region("in"), region("out"))[0] == 200
        assert (client.read("out", COUNT) == 2 * given).all()
        assert client.post("region/out/unregister") == (200, "")
    else:
        assert status == 400
        assert "use offsets, or allocate more than 1 MiB for each" in answer
    # The other one is as it was.
    status, answer = infer(served, "double", region("in"))
    assert (status, answer["outputs"][0]["data"]) == (200, (2 * given).tolist())


def test_a_region_is_opened_once_by_each_process(served, client):
    prepared(client, "in", "out")
    client.write("in", np.ones(COUNT, np.float32))
    infer(served, "double", region("in"), region("out"))
    before = len(served.machine.calls("cuIpcOpenMemHandle"))
    for _ in range(3):
        assert infer(served, "double", region("in"), region("out"))[0] == 200
    assert len(served.machine.calls("cuIpcOpenMemHandle")) == before


def test_a_model_that_keeps_what_is_the_clients_gets_copies_from_then_on(served, client):
    prepared(client, "in")
    client.write("in", np.ones(COUNT, np.float32))
    assert infer(served, "keeper", region("in"))[1]["outputs"][0]["data"] == [1] * COUNT
    with served.doing("keeper", d2d=(NBYTES, 1)):
        infer(served, "keeper", region("in"))
    name = 'gpubridge_fallbacks_total{model="keeper",reason="client_inputs_kept",version="1"}'
    assert served.server.metrics()[name] == 1
    # The model still has it open: it goes with its process.
    assert client.post("region/in/unregister") == (200, "")
    for pid in pids_of(served, "keeper"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: served.server.is_ready("keeper"), "the model to be back", served.server)


def test_status_and_unregister(served, client):
    prepared(client, "b", "a")
    rows = [{"name": n, "device_id": 0, "byte_size": NBYTES + 256} for n in ("a", "b")]
    assert client.status() == (200, rows)
    assert client.status("b") == (200, rows[1:])
    assert client.post("region/a/unregister") == (200, "")
    assert client.status() == (200, rows[1:])
    missing = {"error": "Unable to find cuda shared memory region: 'a'"}
    assert client.status("a") == (404, missing)
    # It is no system memory, and system memory's paths leave it alone.
    assert served.server.request("POST", "/v2/systemsharedmemory/unregister")[0] == 200
    assert served.server.request("GET", "/v2/systemsharedmemory/region/b/status")[0] == 404
    assert client.status() == (200, rows[1:])


def test_one_handle_under_two_names(served, client):
    prepared(client, "in")
    assert client.register("again", NBYTES + 256, of="in") == (200, "")
    client.write("in", np.ones(COUNT, np.float32))
    assert infer(served, "double", region("in"), region("again"))[0] == 200
    assert (client.read("in", COUNT) == 2).all()
    assert client.post("region/again/unregister") == (200, "")
    assert infer(served, "double", region("in"))[0] == 200


def test_a_region_is_free_when_the_last_stream_has_passed(served, client, repository):
    prepared(client, "in")
    client.write("in", np.ones(COUNT, np.float32))
    gate = Gate(repository / "lingering" / "go")
    # What a step of an ensemble looks at is in use as long as it does.
    assert infer(served, "step", region("in"))[0] == 200
    status, answer = client.post("region/in/unregister")
    assert status == 500
    assert "currently in use" in answer
    gate.open()
    wait_until(lambda: client.post("region/in/unregister")[0] == 200, "that", served.server)


def test_memory_that_a_process_cannot_open_fails_the_request_that_needs_it(served, client):
    given = np.random.default_rng().random(COUNT, np.float32)
    # Read by no model before: one that has read a client's memory opens new regions ahead.
    prepared(client, "in")
    client.write("in", given)
    # The server has it open: this is the model's process.
    served.machine.fail("cuIpcOpenMemHandle", 1, nth=1)
    status, answer = infer(served, "second", region("in"))
    served.machine.heal()
    assert status == 500
    assert "cuIpcOpenMemHandle failed" in answer["error"]
    assert served.infer("second", [1.0]) == (200, [2.0])
    status, answer = infer(served, "second", region("in"))
    assert (status, answer["outputs"][0]["data"]) == (200, (2 * given).tolist())


def test_a_reader_of_client_memory_opens_new_regions_before_a_request(tmp_path):
    write_device_model(tmp_path, "double", DOUBLE)
    write_device_model(tmp_path, "idle", DOUBLE)
    with (
        running_device_server(tmp_path) as served,
        running_worker(served.machine) as worker,
    ):

        def opened(model):
            (pid,) = pids_of(served, model)
            return len(served.machine.calls("cuIpcOpenMemHandle", pid))

        client = Client(worker, served.server)
        given = np.random.default_rng().random(COUNT, np.float32)
        prepared(client, "in")
        client.write("in", given)
        assert opened("double") == 0
        assert infer(served, "double", region("in"))[0] == 200
        assert opened("double") == 1
        prepared(client, "next")
        wait_until(lambda: opened("double") == 2, "the region to be open", served.server)
        client.write("next", 3 * given)
        status, answer = infer(served, "double", region("next"))
        assert (status, answer["outputs"][0]["data"]) == (200, (2 * (3 * given)).tolist())
        assert (opened("double"), opened("idle")) == (2, 0)
        assert client.post("unregister") == (200, "")
        closed = "cuIpcCloseMemHandle"
        wait_until(lambda: len(served.machine.calls(closed)) == 4, "their end", served.server)
