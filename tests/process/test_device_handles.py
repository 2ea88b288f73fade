"""By what memory of a GPU crosses processes: found out, told, forced, and nothing else depends on it."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.process.device_models import ARENA, DOUBLE, running_device_server, write_device_model
from tests.process.server import open_files, wait_until
from tests.process.test_device_clients import Client
from tests.process.test_device_edges import CALLER, EARLY, IN_ARENA, ensemble
from tests.process.test_device_network import pids_of, placement
from tests.simcuda.processes import running_worker

COUNT = 20_000
NBYTES = 4 * COUNT
NOT_SUPPORTED = 801
NO_HANDLES = [("cuIpcOpenMemHandle", NOT_SUPPORTED)]


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def arenas(served):
    page = served.server.metrics()
    return {name: count for name, count in page.items() if "gpubridge_device_arenas" in name}


def fallbacks(served):
    return {name: n for name, n in served.server.metrics().items() if "fallbacks" in name and n}


def write_pair(repository):
    write_device_model(repository, "first", DOUBLE)
    write_device_model(repository, "second", DOUBLE)
    ensemble(repository, "both", ["first", "second"])


def test_descriptors_replace_handles_that_are_refused(tmp_path):
    write_pair(tmp_path)
    write_device_model(tmp_path, "call_second", CALLER)
    with running_device_server(tmp_path, faults=NO_HANDLES, own=True) as served:
        for _ in range(3):
            given = values()
            with (
                served.doing("first", d2d=(NBYTES, 1)),
                served.doing("second", d2h=(NBYTES, 1), waits=1),
            ):
                assert served.infer("both", given) == (200, (4 * given).tolist())
            assert served.infer("call_second", given) == (200, (2 * given).tolist())
        assert fallbacks(served) == {}
        check_that_descriptors_are_used(served, "cuIpcOpenMemHandle")
        # What was offered first is gone.
        wait_until(lambda: served.machine.used(0) < 4 * ARENA, "one arena each", served.server)
        # A later stub starts with the kind that works.
        refused = len(served.machine.calls("cuIpcOpenMemHandle"))
        (pid,) = pids_of(served, "second")
        os.kill(pid, 9)
        wait_until(lambda: pids_of(served, "second") not in ([], [pid]), "a stub", served.server)
        wait_until(served.server.is_ready, "the stub to be ready", served.server)
        assert served.infer("call_second", given) == (200, (2 * given).tolist())
        assert len(served.machine.calls("cuIpcOpenMemHandle")) == refused
        check_that_a_client_is_told(served)
        # Models have their GPU all the same.
        assert served.infer("both", given) == (200, (4 * given).tolist())


def check_that_descriptors_are_used(served, call):
    """Three arenas cross by descriptors, since a call is refused."""
    found = arenas(served)
    assert all('handles="fd"' in name for name in found)
    assert sum(found.values()) == 3
    log = served.server.log()
    assert "crosses processes by VMM file descriptors, since legacy IPC handles are" in log
    assert f"{call} failed: CUDA_ERROR_NOT_SUPPORTED" in log


@pytest.mark.parametrize("call", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle"])
def test_several_instances_find_it_out_while_their_model_is_completed(tmp_path, call):
    source = IN_ARENA.replace("self.library = Library(args)", EARLY) + (
        "    @staticmethod\n    def auto_complete_config(config):\n        return config\n"
    )
    write_device_model(tmp_path, "double", source, gpus="0, 0, 1")
    with running_device_server(tmp_path, faults=[(call, NOT_SUPPORTED)], own=True) as served:
        given = values()
        for _ in range(6):
            assert served.infer("double", given) == (200, (2 * given).tolist())
        assert fallbacks(served) == {}
        check_that_descriptors_are_used(served, call)


@pytest.mark.parametrize(
    ("handles", "calls"),
    [
        ("legacy", ["cuIpcOpenMemHandle"]),
        ("fd", ["cuMemImportFromShareableHandle"]),
        ("auto", ["cuIpcGetMemHandle", "cuMemCreate"]),
    ],
)
def test_tensors_cross_by_the_host_if_memory_cannot_be_shared(tmp_path, handles, calls):
    write_device_model(tmp_path, "first", DOUBLE)
    write_device_model(tmp_path, "second", DOUBLE, config=placement("device"))
    write_device_model(tmp_path, "call_second", CALLER)
    ensemble(tmp_path, "both", ["first", "second"])
    faults = [(call, NOT_SUPPORTED) for call in calls]
    with running_device_server(tmp_path, faults=faults, handles=handles, own=True) as served:
        given = values()
        with served.doing("first", d2h=(NBYTES, 1), waits=1):
            assert served.infer("both", given) == (200, (4 * given).tolist())
        # The second has a GPU of its own all the same.
        with served.doing("second", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1):
            assert served.infer("second", given) == (200, (2 * given).tolist())
        assert served.infer("call_second", given) == (200, (2 * given).tolist())
        assert arenas(served) == {}
        name = 'gpubridge_fallbacks_total{model="first",reason="device_not_shared",version="1"}'
        assert fallbacks(served)[name] == 1
        assert "tensors leave the GPU between models" in served.server.log()
        assert all(f"{call} failed: " in served.server.log() for call in calls)
        # Nothing else is tried when one is asked for.
        other = {"legacy": "cuMemCreate", "fd": "cuIpcGetMemHandle", "auto": "cuMemMap"}[handles]
        assert served.machine.calls(other) == []
        # Three stubs with arenas of their own, and nothing of what was offered to them.
        assert served.machine.used(0) < 4 * ARENA


def check_that_a_client_is_told(served):
    """Its memory needs handles."""
    with running_worker(served.machine) as worker:
        client = Client(worker, served.server)
        client.allocate("in", NBYTES)
        status, error = client.register("in", NBYTES)
        assert status == 400
        assert "failed to register CUDA shared memory region 'in': " in error
        assert "clients' CUDA shared memory needs legacy handles: use system shared" in error


def test_stubs_keep_no_descriptor_and_reloads_leave_no_memory(tmp_path):
    write_pair(tmp_path)

    def left():
        used = served.machine.used(0)
        return used, len(list(Path(f"/proc/{served.server.pid}/fd").iterdir()))

    with running_device_server(tmp_path, handles="fd") as served:
        given = values()
        assert served.infer("both", given)[0] == 200
        # The simulated driver has one open for each mapping: of its own arena, or that which it reads.
        for model, mapped in (("first", 1), ("second", 1)):
            (pid,) = pids_of(served, model)
            opened = [path for path in open_files(pid) if Path(path).name.startswith("physical-")]
            assert len(opened) == mapped
        before = left()
        for model in ("first", "second") * 2:
            # With a member its ensemble goes.
            for step in (f"{model}/unload", f"{model}/load", "both/load"):
                path = f"/v2/repository/models/{step}"
                assert served.server.request("POST", path, "")[0] == 200
            assert served.infer("both", given) == (200, (4 * given).tolist())
        wait_until(lambda: left() <= before, "what unloaded models had to be free", served.server)
