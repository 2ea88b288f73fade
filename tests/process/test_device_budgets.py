"""The copy budgets (docs/reference/copy-budgets.md) on a GPU: by the counters, and by the driver's own log."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest

from tests.process.device_models import DOUBLE, running_device_server, write_device_model
from tests.process.gated_models import CONSUMER, MAKER, Gate
from tests.process.test_device_clients import IN_PLACE, Client, infer, region
from tests.process.test_device_edges import CALLER, IN_ARENA, ensemble
from tests.process.test_device_network import placement
from tests.simcuda.processes import running_worker

COUNT = 20_000
NBYTES = 4 * COUNT
TIMES = 4


class Row(NamedTuple):
    """A path: how it is asked for, and what each model's stub may do for one request.

    ``factor`` is what becomes of each value. ``hands_on``: the models that wait once more where none waits for another's events.
    """

    model: str
    client: bool
    factor: int
    costs: dict[str, dict]
    hands_on: tuple[str, ...] = ()


ONE = (NBYTES, 1)
# A caller copies the client's memory before it hands it on, and the answer to where it is wanted.
TWO = (2 * NBYTES, 2)
ROWS = {
    "network to model on GPU, and back": Row(
        "uploaded", False, 2, {"uploaded": {"h2d": ONE, "d2h": ONE, "waits": 1}}
    ),
    "model on GPU to network": Row("double", False, 2, {"double": {"d2h": ONE, "waits": 1}}),
    "CUDA shm to model to CUDA shm": Row("double", True, 2, {"double": {"d2d": ONE, "waits": 1}}),
    "CUDA shm to model to CUDA shm, with request.output": Row(
        "in_place", True, 2, {"in_place": {"waits": 1}}
    ),
    "ensemble edge from user memory": Row(
        "by_user", False, 4, {"double": {"d2d": ONE}, "last": {"d2h": ONE, "waits": 1}}, ("double",)
    ),
    "ensemble edge from the arena": Row(
        "by_arena", False, 4, {"arena": {}, "last": {"d2h": ONE, "waits": 1}}, ("arena",)
    ),
    "ensemble between regions of a client": Row(
        "by_arena", True, 4, {"arena": {}, "last": {"d2d": ONE, "waits": 1}}, ("arena",)
    ),
    "BLS edge from user memory": Row(
        "call_double",
        True,
        2,
        {"call_double": {"d2d": TWO, "waits": 1}, "double": {"d2d": ONE}},
        ("call_double", "double"),
    ),
    "BLS edge from the arena": Row(
        "call_arena",
        True,
        2,
        {"call_arena": {"d2d": TWO, "waits": 1}, "arena": {}},
        ("call_arena", "arena"),
    ),
}

# What a request may ask of the driver, the models' own kernels included.
ALLOWED = {
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuLaunchHostFunc",
    "cuMemcpyHtoD",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuEventSynchronize",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
}


BLOCK = 2 << 20
# What drivers do differently, and no budget depends on.
SWITCHES = {
    "refusing": {
        "destroyed": "refused",
        "same_block": "refused",
        "dead_exporter": "stale",
        "killed_recorder": "released",
        "exited_recorder": "never",
        "pageable": "waits",
        "context_mib": 30,
    },
    "careless": {
        "destroyed": "crash",
        "same_block": "closed-once",
        "dead_exporter": "held",
        "killed_recorder": "never",
        "exited_recorder": "lost",
        "context_us": 50_000,
    },
}
DRIVERS = [
    pytest.param(("legacy", None, "share"), marks=pytest.mark.nightly),
    pytest.param(("fd", None, "share"), marks=pytest.mark.nightly),
    ("auto", "refusing", "share"),
    ("fd", "careless", "share"),
    # As it is by default until the driver was tried.
    ("auto", None, "wait"),
]


@pytest.fixture(scope="module", params=DRIVERS, ids=lambda each: "-".join(filter(None, each)))
def served(tmp_path_factory, request):
    repository = tmp_path_factory.mktemp("models")
    write_device_model(repository, "uploaded", DOUBLE, config=placement("device"))
    write_device_model(repository, "double", DOUBLE)
    write_device_model(repository, "last", DOUBLE)
    write_device_model(repository, "in_place", IN_PLACE)
    write_device_model(repository, "arena", IN_ARENA)
    write_device_model(repository, "call_double", CALLER)
    write_device_model(repository, "call_arena", CALLER)
    ensemble(repository, "by_user", ["double", "last"])
    ensemble(repository, "by_arena", ["arena", "last"])
    handles, switches, events = request.param
    with running_device_server(
        repository,
        handles=handles,
        switches=SWITCHES.get(switches),
        events=events,
    ) as served:
        served.waits = events == "wait"
        # Of one allocation for each region; small ones share a block, which some open only once.
        served.allocated = BLOCK if switches == "refusing" else NBYTES
        yield served


@pytest.mark.parametrize("name", ROWS)
def test_budget(served, name):
    row = ROWS[name]
    costs = {model: {"waits": 0, **cost} for model, cost in row.costs.items()}
    for model in row.hands_on if served.waits else ():
        costs[model]["waits"] += 1
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        if row.client:
            for region_name in ("in", "out"):
                client.allocate(region_name, served.allocated)
                assert client.register(region_name, NBYTES) == (200, "")
        number = itertools.count(1)

        def ask():
            given = np.arange(COUNT, dtype=np.float32) + next(number)
            if row.client:
                client.write("in", given)
                assert infer(served, row.model, region("in"), region("out"))[0] == 200
                answer = client.read("out", COUNT)
            else:
                status, answer = served.infer(row.model, given)
                assert status == 200, answer
            assert (np.asarray(answer) == row.factor * given).all()

        for _ in range(3):
            ask()
        server_calls = len(served.machine.calls(pid=served.server.pid))
        before = len(served.machine.calls())
        with ExitStack() as stack:
            for model, cost in costs.items():
                total = {
                    kind: (TIMES * each[0], TIMES * each[1]) if kind != "waits" else TIMES * each
                    for kind, each in cost.items()
                }
                stack.enter_context(served.doing(model, **total))
            for _ in range(TIMES):
                ask()
        calls = [call for call in served.machine.calls()[before:] if call.pid != worker.pid]
        counted = Counter(call.name for call in calls)
        assert counted.keys() <= ALLOWED
        waits = sum(cost["waits"] for cost in costs.values())
        # Short ones are over before anybody sleeps.
        assert counted["cuEventSynchronize"] <= TIMES * waits
        # Copies of host memory that is not pinned make their caller wait.
        copies = [call for call in calls if call.name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync")]
        assert all(call.arguments[1] == 1 for call in copies)
        # The server has no part in it.
        assert len(served.machine.calls(pid=served.server.pid)) == server_calls
        client.post("unregister")


def test_a_producer_never_waits_for_its_own_kernel(tmp_path):
    """Not even by asking again and again, which no counter need know of."""
    write_device_model(tmp_path, "maker", MAKER)
    write_device_model(tmp_path, "consumer", CONSUMER)
    ensemble(tmp_path, "two", ["maker", "consumer"])
    with running_device_server(tmp_path, delay_us=0) as served:
        given = np.ones(COUNT, np.float32)
        assert served.infer("two", given)[0] == 200
        makers, consumers = (Gate(tmp_path, name, served.server) for name in ("maker", "consumer"))
        makers.hold()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.infer, "two", given)
            try:
                # While the maker's kernel lasts.
                consumers.wait_for("made")
            finally:
                makers.open()
            assert answer.result() == (200, (4 * given).tolist())
