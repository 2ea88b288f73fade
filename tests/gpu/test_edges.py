"""Tensors that one model hands to another on the GPU: calls and ensembles."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpubridge.tensor.native import absence
from tests.gpu.clients import register, registered, wanted
from tests.gpu.lane import LIBRARIES, events_used, needs_library, running_lane_server
from tests.gpu.models import write_lab, write_member
from tests.process.ensembles import write_ensemble
from tests.process.server import write_model

COUNT = 50_000
NBYTES = 4 * COUNT

ON_HOST = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        assert all(t.is_cpu() for r in requests for t in r.inputs())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * r.inputs()[0].as_numpy())])
                for r in requests]
"""


def edge_waits():
    """Return a producer's waits at an edge: none where streams of two processes wait for events."""
    return (0, 0) if events_used() else (1, 1)


@pytest.fixture(scope="module")
def libraries():
    found = []
    for library in LIBRARIES:
        with contextlib.suppress(pytest.skip.Exception):
            needs_library(library)
            found.append(library)
    return found


@pytest.fixture(scope="module")
def several(client):
    return client.devices() > 1


@pytest.fixture(scope="module")
def served(machine, libraries, several, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    for library in libraries:
        write_lab(repository, library, f"lab_{library}")
        write_member(repository, library, f"member_{library}")
        for then in libraries:
            steps = (f"lab_{library} IN=A > OUT=t", f"member_{then} IN=t > OUT=B")
            write_ensemble(repository, f"{library}_{then}", *steps)
    write_model(repository, "host", ON_HOST, config="instance_group [{ kind: KIND_CPU }]")
    steps = ("lab_driver IN=A > OUT=t", "host IN=t > OUT=u", "member_driver IN=u > OUT=B")
    write_ensemble(repository, "by_host", *steps)
    if several:
        write_member(repository, "driver", "other", gpus="1")
        steps = ("lab_driver IN=A > OUT=t", "other IN=t > OUT=B")
        write_ensemble(repository, "to_other", *steps)
    with running_lane_server(machine, repository) as served:
        yield served


@pytest.fixture
def protocol(served):
    import tritonclient.http as library

    with library.InferenceServerClient(served.server.http_url) as protocol:
        yield library, protocol


def born_in_the_arena(library):
    """Return whether a library can allocate in the arena: PyTorch by the compiled module only."""
    return library == "cupy" or (library == "torch" and absence() is None)


def ask(protocol, model, values, name="IN", **parameters):
    library, client = protocol
    given = library.InferInput(name, [values.size], "FP32").set_data_from_numpy(values)
    result = client.infer(model, [given], parameters=parameters)
    return result.as_numpy("OUT" if name == "IN" else "B")


@pytest.mark.parametrize("caller", LIBRARIES)
@pytest.mark.parametrize("member", LIBRARIES)
def test_a_call_stays_on_the_gpu(served, protocol, rng, caller, member):
    """The caller's own memory is copied into its arena, the member's into its; nothing else is."""
    needs_library(caller)
    needs_library(member)
    for _ in range(3):
        values = rng.random(COUNT, np.float32)
        edge = {"d2d": (NBYTES, 1)}
        with (
            served.costing(
                f"lab_{caller}",
                h2d=(NBYTES, 1),
                d2h=(NBYTES, 1),
                waits=(1, 1 + edge_waits()[1]),
                **edge,
            ),
            served.costing(f"member_{member}", waits=edge_waits(), **edge),
        ):
            answer = ask(protocol, f"lab_{caller}", values, do="call", member=f"member_{member}")
        assert np.array_equal(answer, 4 * values)


@pytest.mark.parametrize("first", LIBRARIES)
@pytest.mark.parametrize("then", LIBRARIES)
def test_an_ensemble_stays_on_the_gpu(served, protocol, rng, first, then):
    needs_library(first)
    needs_library(then)
    for _ in range(3):
        values = rng.random(COUNT, np.float32)
        with (
            served.costing(f"lab_{first}", h2d=(NBYTES, 1), d2d=(NBYTES, 1), waits=edge_waits()),
            served.costing(f"member_{then}", d2h=(NBYTES, 1), waits=(1, 1)),
        ):
            answer = ask(protocol, f"{first}_{then}", values, "A")
        assert np.array_equal(answer, 4 * values)


@pytest.mark.parametrize("first", LIBRARIES)
def test_many_requests_at_once_get_their_own_data(served, rng, first):
    """Kernels, copies and the reuse of memory overlap as they like: a missing wait is wrong data."""
    import tritonclient.http as library

    needs_library(first)

    def several(seed):
        own = np.random.default_rng(seed)
        with library.InferenceServerClient(served.server.http_url) as client:
            for turn in range(20):
                values = own.random(COUNT, np.float32)
                does = "kept" if turn % 2 else "double"
                answer = ask((library, client), f"{first}_driver", values, "A", do=does)
                assert np.array_equal(answer, 4 * values)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(several, rng.integers(1 << 30, size=6)))


@pytest.mark.parametrize("does", ["kept", "final", "born"])
def test_an_edge_from_the_arena_copies_nothing(served, protocol, rng, libraries, does):
    for library in libraries:
        if does == "born" and not born_in_the_arena(library):
            continue
        values = rng.random(COUNT, np.float32)
        with (
            served.costing(f"lab_{library}", h2d=(NBYTES, 1), waits=edge_waits()),
            served.costing("member_driver", d2h=(NBYTES, 1), waits=(1, 1)),
        ):
            answer = ask(protocol, f"{library}_driver", values, "A", do=does)
        assert np.array_equal(answer, 4 * values)


def test_an_ensemble_between_regions_of_a_client(served, client, protocol, rng):
    library, endpoint = protocol
    with registered(client, endpoint, NBYTES, NBYTES) as (source, target):
        values = rng.random(COUNT, np.float32)
        client.write(source, values)
        inputs, outputs = wanted(library, source, target)
        inputs[0]._name, outputs[0]._name = "A", "B"
        with (
            served.costing("lab_driver", d2d=(NBYTES, 1), waits=edge_waits()),
            served.costing("member_driver", d2d=(NBYTES, 1), waits=(1, 1)),
        ):
            endpoint.infer("driver_driver", inputs, outputs=outputs)
        assert np.array_equal(client.read(target), 4 * values)


@pytest.mark.parametrize("does", ["passed", "double", "final"])
def test_regions_are_free_again_with_the_answer(served, client, protocol, rng, does):
    """Nothing else need come for the streams to be looked at that may have used them."""
    library, endpoint = protocol
    for _ in range(12):
        regions = source, target = client.allocate(NBYTES), client.allocate(NBYTES)
        for region in regions:
            register(endpoint, region)
        values = rng.random(COUNT, np.float32)
        client.write(source, values)
        inputs, outputs = wanted(library, source, target)
        inputs[0]._name, outputs[0]._name = "A", "B"
        for _ in range(3):
            endpoint.infer("driver_driver", inputs, outputs=outputs, parameters={"do": does})
        for region in regions:
            # At once; refused for what is in use.
            endpoint.unregister_cuda_shared_memory(region.name)
        assert endpoint.get_cuda_shared_memory_status() == []
        # Both members are told what to do.
        assert np.array_equal(client.read(target), (1 if does == "passed" else 4) * values)
        for region in regions:
            client.free(region)


def test_a_member_on_the_host_gets_its_tensors_there(served, protocol, rng):
    values = rng.random(COUNT, np.float32)
    with served.costing("lab_driver", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=(1, 1)):
        answer = ask(protocol, "by_host", values, "A")
    assert np.array_equal(answer, 8 * values)


def test_an_edge_to_another_gpu_is_right_and_counted(served, protocol, several, rng):
    if not several:
        pytest.skip("one GPU")
    values = rng.random(COUNT, np.float32)
    before = served.work("lab_driver"), served.work("other")
    assert np.array_equal(ask(protocol, "to_other", values, "A"), 4 * values)
    after = served.work("lab_driver"), served.work("other")
    spent = [
        sum(now[kind, "copies"] - then[kind, "copies"] for kind in ("d2h", "p2p"))
        for then, now in zip(before, after, strict=True)
    ]
    # From GPU to GPU where they reach each other, else by way of the host; then to the network.
    assert spent in ([0, 2], [1, 1])
