"""Tensors between two GPUs: from one to the other where the driver does that, else by way of the host."""

from contextlib import contextmanager

import numpy as np
import pytest

from tests.process.device_models import (
    ARENA,
    DOUBLE,
    HANDLES,
    running_device_server,
    write_device_model,
)
from tests.process.test_device_clients import Client, infer, prepared, region
from tests.process.test_device_edges import CALLER, EARLY, IN_ARENA, ensemble
from tests.simcuda.processes import running_worker

COUNT = 20_000
NBYTES = 4 * COUNT
PEER_ACCESS_UNSUPPORTED = 217
NOT_SUPPORTED = 801
INVALID_DEVICE = 101


@contextmanager
def running(repository, *models, **options):
    """Serve these models, and the ensembles of which all members are among them."""
    # What fails in a test is the server's memory, and not the caller's own.
    caller = CALLER.replace("self.library = Library(args)", EARLY)
    sources = {"first": DOUBLE, "arena": IN_ARENA, "other": DOUBLE, "call_other": caller}
    for name in models:
        write_device_model(repository, name, sources[name], gpus="1" if name == "other" else "")
    for name, members in (("to_other", ["first", "other"]), ("from_arena", ["arena", "other"])):
        if {*members} <= {*models}:
            ensemble(repository, name, members)
    with running_device_server(repository, **options) as it:
        yield it


@pytest.fixture(scope="module", params=HANDLES)
def served(tmp_path_factory, request):
    folder, models = tmp_path_factory.mktemp("models"), ("first", "arena", "other", "call_other")
    with running(folder, *models, handles=request.param) as served:
        yield served


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def fallbacks(served, model, reason):
    name = f'gpubridge_fallbacks_total{{model="{model}",reason="{reason}",version="1"}}'
    return served.server.metrics().get(name, 0)


def test_an_ensembles_edge_is_one_copy_between_the_gpus(served):
    for _ in range(3):
        given = values()
        with (
            # Its library's memory into the arena, since nobody else can reach that.
            served.doing("first", d2d=(NBYTES, 1)),
            served.doing("other", p2p=(NBYTES, 1), d2h=(NBYTES, 1), waits=2),
        ):
            assert served.infer("to_other", given) == (200, (4 * given).tolist())


def test_an_edge_from_the_arena_is_that_copy_alone(served):
    given = values()
    with (
        served.doing("arena"),
        served.doing("other", p2p=(NBYTES, 1), d2h=(NBYTES, 1), waits=2),
    ):
        assert served.infer("from_arena", given) == (200, (4 * given).tolist())
    assert "by way of the host" not in served.server.log()


def test_a_call_of_a_model_on_another_gpu(served):
    given = values()
    with served.doing("other", p2p=(NBYTES, 1), d2h=(NBYTES, 1), waits=2):
        assert served.infer("call_other", given) == (200, (2 * given).tolist())


def test_memory_of_a_client_on_another_gpu(served):
    given = values()
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        prepared(client, "in")
        client.write("in", given)
        with served.doing("other", p2p=(NBYTES, 1), d2h=(NBYTES, 1), waits=2):
            status, answer = infer(served, "other", region("in"))
        assert (status, answer["outputs"][0]["data"]) == (200, (2 * given).tolist())
        assert client.post("unregister") == (200, "")


def test_the_copy_is_made_before_anybody_looks_and_after_all_is_there(served):
    served.machine.delay(40_000)
    try:
        for model, factor in [("to_other", 4), ("from_arena", 4), ("call_other", 2)] * 3:
            given = values()
            assert served.infer(model, given) == (200, (factor * given).tolist())
    finally:
        served.machine.delay(200)


def test_no_memory_is_opened_or_made_for_a_request(served):
    assert served.infer("to_other", values())[0] == 200
    names = (
        "cuIpcOpenMemHandle",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemCreate",
        "cuMemImportFromShareableHandle",
        "cuMemSetAccess",
        "cuCtxEnablePeerAccess",
    )
    before = [len(served.machine.calls(name)) for name in names]
    for _ in range(5):
        assert served.infer("to_other", values())[0] == 200
    assert [len(served.machine.calls(name)) for name in names] == before


def test_its_memory_comes_back(served):
    # Many times what there is of it.
    count = ARENA // 16
    given = np.ones(count, np.float32)
    for _ in range(8):
        assert served.infer("to_other", given) == (200, [4.0] * count)
    assert fallbacks(served, "other", "peer_memory_full") == 0


def test_a_tensor_that_is_too_large_for_that_memory(served):
    count = ARENA // 4 + 1000
    nbytes = 4 * count
    before = fallbacks(served, "other", "peer_memory_full")
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        for name, device in (("in", 0), ("out", 1)):
            client.allocate(name, nbytes, device)
            assert client.register(name, nbytes, device) == (200, "")
        client.write("in", np.arange(count, dtype=np.float32))
        with served.doing("other", d2h=(nbytes, 1), d2d=(nbytes, 1), waits=2):
            status, _ = infer(served, "other", region("in", nbytes), region("out", nbytes), count)
            assert status == 200
        assert (client.read("out", count) == 2 * np.arange(count, dtype=np.float32)).all()
        assert client.post("unregister") == (200, "")
    assert fallbacks(served, "other", "peer_memory_full") == before + 1


def test_tensors_cross_by_the_host_between_gpus_without_peer_access(tmp_path):
    with running(tmp_path, "first", "other", "call_other", peers=False) as served:
        given = values()
        with (
            served.doing("first", d2h=(NBYTES, 1), waits=1),
            served.doing("other", d2h=(NBYTES, 1), waits=1),
        ):
            assert served.infer("to_other", given) == (200, (4 * given).tolist())
        with served.doing("other", d2h=(2 * NBYTES, 2), waits=2):
            assert served.infer("call_other", given) == (200, (2 * given).tolist())
        assert fallbacks(served, "other", "no_peer_access") == 1
        with running_worker(served.machine) as worker:
            client = Client(worker, served.server)
            client.allocate("in", NBYTES, device=1)
            assert "failed to open CUDA IPC handle" in client.register("in", NBYTES)[1]
        assert "GPU 0 cannot reach the memory of GPU 1" in served.server.log()
        assert not served.machine.calls("cuMemcpyPeerAsync")


@pytest.mark.parametrize(
    ("call", "code", "reason", "handles"),
    [
        ("cuCtxEnablePeerAccess", PEER_ACCESS_UNSUPPORTED, "no_peer_access", "auto"),
        ("cuIpcGetMemHandle", NOT_SUPPORTED, "peer_memory_absent", "legacy"),
        ("cuMemSetAccess", INVALID_DEVICE, "peer_memory_absent", "fd"),
    ],
)
def test_a_driver_that_refuses_when_it_comes_to_it(tmp_path, call, code, reason, handles):
    with running(tmp_path, "other", "call_other", handles=handles, own=True) as served:
        given = values()
        served.machine.fail(call, code)
        for _ in range(2):
            assert served.infer("call_other", given) == (200, (2 * given).tolist())
        assert fallbacks(served, "other", reason) == 2
        assert served.server.log().count("are copied between GPUs through host memory") == 1
