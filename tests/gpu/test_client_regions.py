"""Clients' memory on a GPU, by the driver alone: registered, read and written where it is."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.gpu.clients import POISON, register, registered, running_client, wanted
from tests.gpu.lane import LIBRARIES, needs_library, running_lane_server
from tests.gpu.models import write_lab
from tests.process.server import wait_until, write_model
from tests.waits import polling

COUNT = 50_000
NBYTES = 4 * COUNT
STALE = np.frombuffer(bytes([POISON]) * 4, np.float32)[0]

# On no GPU; answers when it is told to, if it is named "wait".
ON_HOST = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.gate = args["model_name"] == "wait" and os.path.join(args["model_repository"], "gate")

    def execute(self, requests):
        if self.gate:
            open(self.gate.replace("gate", "begun"), "w").close()
            UNTIL_OPEN
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * r.inputs()[0].as_numpy())])
                for r in requests]
""".replace("UNTIL_OPEN", polling("os.path.exists(self.gate)"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(machine, repository):
    libraries = []
    for library in LIBRARIES:
        with contextlib.suppress(pytest.skip.Exception):
            needs_library(library)
            libraries.append(library)
            write_lab(repository, library, f"lab_{library}")
    for name in ("host", "wait"):
        write_model(repository, name, ON_HOST, config="instance_group [{ kind: KIND_CPU }]")
    with running_lane_server(machine, repository) as served:
        yield served


@pytest.fixture(params=["http", "grpc"])
def endpoint(request, served):
    """tritonclient's module and a client of it."""
    module, url = {
        "http": (over_http, served.server.http_url),
        "grpc": (over_grpc, served.server.grpc_url),
    }[request.param]
    with module.InferenceServerClient(url) as protocol:
        yield module, protocol


def infer(endpoint, model, source, target=None, **parameters):
    module, protocol = endpoint
    inputs, outputs = wanted(module, source, target)
    return protocol.infer(model, inputs, outputs=outputs, parameters=parameters)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("does", "d2d"),
    [("double", (NBYTES, 1)), ("kept", (NBYTES, 1)), ("passed", (NBYTES, 1)), ("final", (0, 0))],
)
def test_from_region_to_region(served, client, endpoint, rng, library, does, d2d):
    """Nothing crosses the host; with request.output nothing is copied at all."""
    needs_library(library)
    model, times = f"lab_{library}", 1 if does == "passed" else 2
    with registered(client, endpoint[1], NBYTES, NBYTES) as (source, target):
        for _ in range(3):
            values = rng.random(COUNT, np.float32)
            client.write(source, values)
            client.poison(target)
            with served.costing(model, d2d=d2d, waits=(1, 1)):
                infer(endpoint, model, source, target, do=does)
            assert np.array_equal(client.read(target), times * values)
            assert np.array_equal(client.read(source), values)


def test_tensors_at_offsets_leave_the_rest_alone(client, endpoint, rng):
    module, protocol = endpoint
    with registered(client, protocol, 2 * NBYTES, 2 * NBYTES) as (source, target):
        values = rng.random(COUNT, np.float32)
        client.write(source, values, offset=1024)
        given = module.InferInput("IN", [COUNT], "FP32")
        given.set_shared_memory(source.name, NBYTES, 1024)
        output = module.InferRequestedOutput("OUT")
        output.set_shared_memory(target.name, NBYTES, 2048)
        protocol.infer("lab_driver", [given], outputs=[output])
        whole = client.read(target)
    assert np.array_equal(whole[512 : 512 + COUNT], 2 * values)
    assert np.array_equal(whole[:512], np.full(512, STALE))
    assert np.array_equal(whole[512 + COUNT :], np.full(COUNT - 512, STALE))


def test_from_a_region_to_the_network_and_back(served, client, endpoint, rng):
    module, protocol = endpoint
    values = rng.random(COUNT, np.float32)
    with registered(client, protocol, NBYTES) as (region,):
        client.write(region, values)
        with served.costing("lab_driver", d2h=(NBYTES, 1), waits=(1, 1)):
            answer = infer(endpoint, "lab_driver", region)
        assert np.array_equal(answer.as_numpy("OUT"), 2 * values)
        client.poison(region)
        given = module.InferInput("IN", [COUNT], "FP32").set_data_from_numpy(values)
        output = module.InferRequestedOutput("OUT")
        output.set_shared_memory(region.name, NBYTES)
        with served.costing("lab_driver", h2d=(NBYTES, 1), d2d=(NBYTES, 1), waits=(1, 1)):
            protocol.infer("lab_driver", [given], outputs=[output])
        assert np.array_equal(client.read(region), 2 * values)


def test_a_model_without_a_gpu_sees_copies_of_the_server(served, client, endpoint, rng):
    values = rng.random(COUNT, np.float32)
    with registered(client, endpoint[1], NBYTES, NBYTES) as (source, target):
        client.write(source, values)
        with served.costing("host", d2h=(NBYTES, 1), h2d=(NBYTES, 1), waits=(0, 2)):
            infer(endpoint, "host", source, target)
        assert np.array_equal(client.read(target), 2 * values)


def test_the_status_tells_what_is_registered(client, endpoint):
    module, protocol = endpoint
    with registered(client, protocol, NBYTES) as (region,):
        status = protocol.get_cuda_shared_memory_status(region.name)
        if module is over_grpc:
            entry = status.regions[region.name]
            found = entry.name, entry.device_id, entry.byte_size
        else:
            (entry,) = status
            found = entry["name"], entry["device_id"], entry["byte_size"]
        assert found == (region.name, 0, NBYTES)
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region"):
        protocol.get_cuda_shared_memory_status(region.name)


def test_a_name_is_given_once(client, endpoint):
    with (
        registered(client, endpoint[1], NBYTES) as (region,),
        pytest.raises(InferenceServerException, match="already"),
    ):
        register(endpoint[1], region)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"nbytes": 64 << 20}, "no more bytes than were allocated"), ({"device": 63}, "device|GPU")],
)
def test_what_is_not_there_is_refused(client, endpoint, given, words):
    region = client.allocate(4 << 20)
    with pytest.raises(InferenceServerException, match=words):
        register(endpoint[1], region, **given)
    client.free(region)


def test_malformed_handles_are_refused(served, endpoint):
    with pytest.raises(InferenceServerException):
        endpoint[1].register_cuda_shared_memory("nothing", b"AAAA", 0, NBYTES)
    assert served.server.is_ready()


def test_a_tensor_beyond_its_region_is_refused(client, endpoint):
    module, protocol = endpoint
    with registered(client, protocol, NBYTES) as (region,):
        given = module.InferInput("IN", [2 * COUNT], "FP32")
        given.set_shared_memory(region.name, 2 * NBYTES)
        with pytest.raises(InferenceServerException):
            protocol.infer("lab_driver", [given])


def test_a_region_in_use_stays(served, client, endpoint, rng, repository):
    module, protocol = endpoint
    gate, begun = repository / "wait" / "gate", repository / "wait" / "begun"
    values = rng.random(COUNT, np.float32)

    def ask():
        # A client of its own: tritonclient's are for one thread.
        url = served.server.http_url if module is over_http else served.server.grpc_url
        with module.InferenceServerClient(url) as protocol:
            infer((module, protocol), "wait", source, target)

    with (
        registered(client, protocol, NBYTES, NBYTES) as (source, target),
        ThreadPoolExecutor(1) as pool,
    ):
        client.write(source, values)
        answered = pool.submit(ask)
        try:
            wait_until(begun.exists, "the model to begin", served.server)
            with pytest.raises(InferenceServerException, match="in use"):
                protocol.unregister_cuda_shared_memory(source.name)
        finally:
            gate.touch()
            answered.result(30)
            gate.unlink()
            begun.unlink()
        assert np.array_equal(client.read(target), 2 * values)


def test_a_client_that_dies_harms_nobody(machine, served, client, endpoint, rng):
    with running_client(machine) as other:
        region = other.allocate(NBYTES)
        other.write(region, rng.random(COUNT, np.float32))
        register(endpoint[1], region)
        infer(endpoint, "lab_driver", region)
        other.die()
        endpoint[1].unregister_cuda_shared_memory(region.name)
    values = rng.random(COUNT, np.float32)
    with registered(client, endpoint[1], NBYTES) as (region,):
        client.write(region, values)
        assert np.array_equal(infer(endpoint, "lab_driver", region).as_numpy("OUT"), 2 * values)
