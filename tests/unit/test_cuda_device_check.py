"""Check of memory and events that cross processes; a failure is a value with its reason."""

from pathlib import Path

import pytest

from gpubridge.cuda_ipc.device_check import check_device, read_check
from tests.process.forked_commands import run_forked
from tests.simcuda.machine import lawful_machine
from tests.simcuda.processes import running_worker
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

CHECK = """
from gpubridge.cuda_ipc import list_devices, probe_peers
from gpubridge.cuda_ipc.device_check import check_device
"""
IMPORTS = """
import contextlib
from gpubridge.cuda_ipc.device_check import main
with contextlib.suppress(ImportError):
    import cuda.bindings.driver
"""


@pytest.fixture(scope="module")
def first_uuid():
    with lawful_machine() as machine, running_worker(machine) as worker:
        return worker.do(f"{CHECK}answer = list_devices()[0].uuid")


@pytest.fixture
def check(machine, first_uuid):
    """Check the first device, as `check_device` does, by a process that is forked."""

    def check():
        variables = machine.environment()
        done = run_forked(
            first_uuid, environment=variables, imports=IMPORTS, program="main(sys.argv[1:])"
        )
        return read_check(done.stdout, done.stderr, done.returncode)

    return check


def facts(check):
    """Return what works, each with the reason where it does not."""
    found = (check.memory, check.memory_fds, check.events, check.lost_events)
    return [fact for each in found for fact in (each.works, each.reason)]


@pytest.fixture
def checks(machine, check):
    """Check while each of some calls fails in turn; gives how the reason begins, and what was found."""

    def checks(*calls):
        for call in calls:
            machine.fail(call, 801)
            yield f"{call} failed: CUDA_ERROR_NOT_SUPPORTED (801): ", facts(check())
            machine.heal()

    return checks


@pytest.mark.parametrize("ordinal", [0, 1])
def test_memory_and_events_cross_and_are_waited_for(machine, ordinal):
    machine.delay(2000)
    with running_worker(machine) as worker:
        found = worker.do(
            f"{CHECK}check = check_device(list_devices()[told].uuid)\n"
            "found = (check.memory, check.memory_fds, check.events, check.lost_events)\n"
            "answer = [[each.works, each.reason] for each in found]",
            ordinal,
        )
    assert found == [[True, ""]] * 4
    # The process that asks gets no context, and each other one only that of the device.
    retained = machine.calls("cuDevicePrimaryCtxRetain")
    assert [call.arguments for call in retained] == [(ordinal,)] * 4
    assert len({call.pid for call in retained}) == 4
    assert len({call.pid for call in machine.calls("cuStreamWaitEvent")}) == 3


def test_handles_that_do_not_cross_say_why(checks):
    for said, found in checks("cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"):
        memory, why, fds, no_reason, events, *_ = found
        assert (memory, fds, no_reason, events) == (False, True, "", True)
        assert why.startswith(said)


def test_descriptors_that_do_not_cross_say_why(checks):
    ways = ("Create", "ExportToShareableHandle", "ImportFromShareableHandle", "Map", "SetAccess")
    for said, found in checks(*(f"cuMem{way}" for way in ways)):
        memory, _, fds, why, events, *_ = found
        assert (memory, fds, events) == (True, False, True)
        assert why.startswith(said)


def test_memory_that_does_not_cross_at_all_says_why(machine, check):
    machine.refuse_legacy_handles()
    machine.refuse_memory_fds()
    memory, why, fds, why_no_fds, events, why_not, lost, why_no_loss = facts(check())
    assert (memory, fds, events, lost) == (False, False, False, False)
    assert why.startswith("cuIpcOpenMemHandle failed: ")
    assert "file descriptors" in why_no_fds
    assert why_not == "not tried, since device memory is not shared"
    assert why_no_loss == "not tried, since events do not cross processes"


def test_events_that_do_not_cross_say_why(checks):
    for said, found in checks("cuIpcGetEventHandle", "cuIpcOpenEventHandle"):
        memory, why, _, _, events, why_not, lost, _ = found
        assert (memory, why, events, lost) == (True, "", False, False)
        assert why_not.startswith(said)


@pytest.mark.parametrize(
    ("opens", "works"),
    [
        ("no-handles", [False, True, True, True]),
        ("no-events", [True, True, False, False]),
        ("nothing", [False, False, False, False]),
    ],
)
def test_what_a_sandbox_refuses_says_nothing_of_the_device(machine, check, opens, works):
    """An unknown error, as sandboxes give, is that of a device that is lost, too."""
    machine.set(opens=opens, open_error=999)
    found = check()
    assert facts(found)[::2] == works
    assert (found.tried, found.pinning.works) == (True, True)
    assert "(999): look at nvidia-smi" in str(facts(found))


def test_memory_that_cannot_be_pinned_says_why(machine, check):
    machine.fail("cuMemHostRegister", 801)
    found = check()
    assert (found.memory.works, found.events.works, found.pinning.works) == (True, True, False)
    assert found.pinning.reason.startswith("cuMemHostRegister failed: ")


def test_no_memory_for_a_context_is_a_reason(machine, check):
    # Which of the three gets none is chance; who is killed, or waits, has to be there for all.
    for nth in (1, 2, 3):
        machine.heal()
        machine.fail("cuDevicePrimaryCtxRetain", 2, nth=nth)
        found = facts(check())
        assert found[-2] is False
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(found)


def test_a_device_that_is_not_there_is_a_reason():
    found = check_device("GPU-00000000-0000-0000-0000-000000000000")
    assert not found.memory.works
    assert found.memory.reason


def test_want_of_memory_says_nothing_of_the_driver(machine, check):
    for call, code in (
        ("cuDevicePrimaryCtxRetain", 2),
        ("cuMemAlloc", 2),
        ("cuIpcOpenMemHandle", 2),
        ("cuIpcOpenMemHandle", 801),
    ):
        machine.heal()
        machine.fail(call, code)
        found = check()
        assert (found.tried, found.memory.works) == (code == 801, False)


def test_a_check_that_hangs_is_ended(machine):
    with running_worker(machine) as worker:
        assert worker.do(
            f"{CHECK}check = check_device(list_devices()[0].uuid, 0.01)\n"
            "answer = [check.memory.works, check.events.works, check.memory.reason]"
        ) == [False, False, "the check did not end within 0.01 s"]


def test_a_check_leaves_no_process(machine, check):
    # Whatever goes wrong in it.
    for call in ("cuMemcpyHtoDAsync", "cuEventQuery"):
        machine.heal()
        machine.fail(call, 719)
        machine.begin()
        check()
        pids = {call.pid for call in machine.calls()}
        assert len(pids) == 3
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("peers", [True, False])
def test_whether_devices_reach_each_other(machine, peers):
    if peers:
        machine.allow_peers()
    with running_worker(machine) as worker:
        works, reason = worker.do(
            f"{CHECK}found = probe_peers(*list_devices()); answer = [found.works, found.reason]"
        )
    assert works is peers
    assert bool(reason) is not peers
    assert machine.calls("cuDevicePrimaryCtxRetain") == []


def test_a_tensor_of_a_reachable_device_is_copied_by_the_consumer_alone(machine):
    machine.allow_peers()
    with device_worker(machine) as producer, device_worker(machine, 1) as consumer:
        handle = producer.do(
            "segment = mine(4096); put(segment.pointer, bytes([3]) * 4096)\n"
            "answer = list(segment.handle)"
        )
        consumer.do(
            "theirs = DeviceSegment.open(context, 7, bytes(told), 4096); own = mine(4096, 8)\n"
            "copies = CopyStream(context); copies.d2d(own.pointer, theirs.pointer, 4096)\n"
            "copies.wait()",
            handle,
        )
        assert consumer.do("answer = seen(own.pointer + 4095)") == [3]
        assert consumer.do("answer = copies.counts.copied['d2d']") == 4096
        states = "answer = [ok(d.cuDevicePrimaryCtxGetState(i))[1] for i in (0, 1)]"
        assert consumer.do(states) == [0, 1]


def test_no_process_is_killed_under_mps(machine, check, tmp_path, monkeypatch):
    # An older driver, which does not say that it is there.
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    machine.fail("cuDeviceGetAttribute", 1)
    *_, events, _, lost, why = facts(check())
    assert (events, lost) == (True, False)
    assert why.startswith("not tried: under MPS")


@pytest.mark.parametrize(
    ("recorder", "exited", "reason"),
    [
        ("rerecord", "passes", ""),
        ("rerecord", "never", ""),
        ("rerecord", "lost", "has ended do not continue when another one records its event again"),
        ("released", "passes", "continue at once, with undefined data"),
        (
            "never",
            "passes",
            "killed process do not continue when another one records its event again",
        ),
    ],
)
def test_waiters_for_a_process_that_is_gone(machine, check, recorder, exited, reason):
    machine.set(killed_recorder=recorder, exited_recorder=exited)
    *_, events, _, lost, why = facts(check())
    assert (events, lost) == (True, not reason)
    assert why.endswith(reason)
