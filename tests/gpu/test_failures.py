"""Isolation of failures on a GPU: killed stubs, faults of a kernel, no memory."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.clients import registered, wanted
from tests.gpu.lane import LIBRARIES, SIMULATED, needs_library, running_lane_server
from tests.gpu.models import write_lab
from tests.process.ensembles import write_ensemble
from tests.process.server import wait_until

COUNT = 50_000
NBYTES = 4 * COUNT
# The driver's words for an access to what is nobody's.
ILLEGAL = 700


@pytest.fixture(scope="module")
def served(machine, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    for library in LIBRARIES:
        with contextlib.suppress(pytest.skip.Exception):
            needs_library(library)
            write_lab(repository, library, f"lab_{library}")
            write_ensemble(
                repository,
                f"chain_{library}",
                f"lab_{library} IN=A > OUT=t",
                "bystander IN=t > OUT=B",
            )
    write_lab(repository, "driver", "bystander")
    with running_lane_server(machine, repository) as served:
        yield served


def stub_of(served, model):
    """Return the process id of the model's instance; None while there is none."""
    for pid in served.server.stubs():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if any(word.startswith(f"{model}_") for word in words):
                return pid
    return None


def works(served, model, rng):
    values = rng.random(COUNT, np.float32)
    return served.infer(model, values) == (200, (2 * values).tolist())


def wait_for_another(served, model, former):
    def is_another():
        return stub_of(served, model) not in (None, former) and served.server.is_ready(model)

    wait_until(is_another, f"another instance of {model}", served.server)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_stub_that_is_killed_with_memory_of_the_gpu_comes_back(served, rng, library):
    needs_library(library)
    model = f"lab_{library}"
    for _ in range(2):
        assert works(served, "bystander", rng)
        former, other = stub_of(served, model), stub_of(served, "bystander")
        status, text = served.infer(model, np.ones(COUNT), parameters={"do": "die"})
        assert status >= 400
        assert "signal 9" in text or "SIGKILL" in text, text
        assert works(served, "bystander", rng)
        wait_for_another(served, model, former)
        assert works(served, model, rng)
        assert stub_of(served, "bystander") == other


@pytest.mark.last
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_consumer_of_a_stub_that_dies_fails_its_request_and_lives(served, rng, library):
    """Its response was sent, and the next model's streams wait for it on the GPU."""
    needs_library(library)
    model = f"lab_{library}"
    assert works(served, model, rng)
    former, other = stub_of(served, model), stub_of(served, "bystander")
    parameters = {"do": "doomed", "doomed": model}
    entry = {"name": "A", "datatype": "FP32", "shape": [COUNT], "data": rng.random(COUNT).tolist()}
    body = json.dumps({"inputs": [entry], "parameters": parameters})
    status, _, text = served.server.request("POST", f"/v2/models/chain_{library}/infer", body)
    assert status == 503, text
    assert b"not healthy" in text
    wait_for_another(served, model, former)
    assert stub_of(served, "bystander") == other
    assert works(served, "bystander", rng)
    assert works(served, model, rng)


@pytest.mark.last
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fault_of_a_kernel_costs_its_own_stub_only(served, rng, library):
    """The context is lost with it: that process has to end, and no other."""
    needs_library(library)
    model = f"lab_{library}"
    assert works(served, model, rng)
    former, other = stub_of(served, model), stub_of(served, "bystander")
    if SIMULATED:
        # Simulated kernels have no address to miss: the wait tells of it, as it would.
        served.machine.delay(5000)
        served.machine.fail("cuEventSynchronize", ILLEGAL, nth=1)
        status, text = served.infer(model, np.ones(COUNT))
        served.machine.heal()
        served.machine.delay(200)
    else:
        status, text = served.infer(model, np.ones(COUNT), parameters={"do": "stray"})
    assert status >= 400
    assert "CUDA" in text or "ILLEGAL" in text, text
    assert works(served, "bystander", rng)
    wait_for_another(served, model, former)
    assert works(served, model, rng)
    assert stub_of(served, "bystander") == other


def test_a_client_s_memory_outlives_a_stub_that_wrote_to_it(served, client, rng):
    import tritonclient.http as library

    with (
        library.InferenceServerClient(served.server.http_url) as protocol,
        registered(client, protocol, NBYTES, NBYTES) as (source, target),
    ):
        values = rng.random(COUNT, np.float32)
        client.write(source, values)
        former = stub_of(served, "lab_driver")
        inputs, outputs = wanted(library, source, target)
        with pytest.raises(library.InferenceServerException):
            protocol.infer("lab_driver", inputs, outputs=outputs, parameters={"do": "die"})
        wait_for_another(served, "lab_driver", former)
        assert np.array_equal(client.read(source), values)
        client.poison(target)
        protocol.infer("lab_driver", inputs, outputs=outputs)
        assert np.array_equal(client.read(target), 2 * values)


def test_no_room_in_the_arena_refuses_a_request_and_no_more(machine, tmp_path, rng):
    arena = 2 << 20
    most = (arena - (256 << 10)) // 4
    write_lab(tmp_path, "driver")
    with running_lane_server(machine, tmp_path, arena=arena) as served:
        values = rng.random(most, np.float32)
        # The input has most of the arena: the model's own wish for as much again is refused to it.
        status, text = served.infer("lab", values, parameters={"do": "kept"})
        assert (status, "arena is full" in text) == (500, True), text
        assert works(served, "lab", rng)
        # The model has most of it: inputs find no room, until it lets go.
        parameters = {"do": "hold", "count": most}
        assert served.infer("lab", [1.0], parameters=parameters) == (200, [2.0])
        status, text = served.infer("lab", values)
        assert (status, "arena is full" in text) == (503, True), text
        parameters = {"do": "hold", "count": 0}
        assert served.infer("lab", [1.0], parameters=parameters) == (200, [2.0])
        assert served.infer("lab", values) == (200, (2 * values).tolist())
