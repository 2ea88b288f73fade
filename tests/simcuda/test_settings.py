"""Costs of the simulated driver's calls, and settings that it refuses."""

import pytest

from tests.simcuda.machine import running_machine
from tests.simcuda.processes import running_worker
from tests.simcuda.test_mappings import FREE, USABLE
from tests.simcuda.test_simcuda import EXPORT, IMPORT

pytest.importorskip("cuda.bindings")


def paid(machine, worker):
    """Return the milliseconds that a process has paid for calls."""
    return round(machine.activity(worker.pid).paid * 1000)


def test_allocating_opening_and_closing_are_paid_for(machine, one, two):
    machine.set(allocate_us=1000, open_us=10_000, close_us=100_000)
    handle = one.do(EXPORT)
    assert paid(machine, one) == 1
    two.do(IMPORT, handle)
    assert paid(machine, two) == 10
    two.do("ok(d.cuIpcCloseMemHandle(pointer))")
    assert paid(machine, two) == 110
    one.do(USABLE)
    assert paid(machine, one) == 1 + 11
    one.do(FREE)
    assert paid(machine, one) == 1 + 11 + 100


def test_what_is_set_holds_for_running_processes_until_it_is_put_back(machine, worker):
    machine.set(allocate_us=0)
    before = machine.state()
    worker.do("start()")
    machine.set(allocate_us=10_000)
    machine.fail("cuMemFree", 1)
    worker.do("pointer = ok(d.cuMemAlloc(64)); assert int(d.cuMemFree(pointer)[0]) == 1")
    machine.restore(before)
    worker.do("ok(d.cuMemAlloc(64)); ok(d.cuMemFree(pointer))")
    assert paid(machine, worker) == 10


def test_a_context_costs_time_and_memory(machine, one, two):
    machine.set(context_us=20_000, context_mib=700)
    one.do("start()")
    assert paid(machine, one) == 20
    assert [machine.used(device) >> 20 for device in (0, 1)] == [700, 0]
    two.refuses("OUT_OF_MEMORY", "start()")
    one.do("ok(d.cuDevicePrimaryCtxRelease(0))")
    assert machine.used(0) == 0
    two.do("start()")
    two.kill()
    one.do("start()")
    assert machine.contexts(0) == [one.pid]


OPENERS = {
    "handles": IMPORT,
    "events": "event = ok(d.cuIpcOpenEventHandle(made(d.CUipcEventHandle, told)))",
}
MAKERS = {
    "handles": EXPORT,
    "events": "start(); event = ok(d.cuEventCreate(6)); answer = raw(ok(d.cuIpcGetEventHandle(event)))",
}


@pytest.mark.parametrize("error", [304, 999])
@pytest.mark.parametrize("kind", OPENERS)
def test_a_sandbox_opens_nothing_of_one_kind_and_others_open_what_it_has(machine, one, kind, error):
    variables = {"SIMCUDA_OPENS": f"no-{kind}", "SIMCUDA_OPEN_ERROR": str(error)}
    with running_worker(machine, variables) as inside:
        (other,) = OPENERS.keys() - {kind}
        handles = {each: one.do(MAKERS[each]) for each in OPENERS}
        inside.refuses("OPERATING_SYSTEM|UNKNOWN", "start(); " + OPENERS[kind], handles[kind])
        inside.do("start(); " + OPENERS[other], handles[other])
        with running_worker(machine) as outside:
            outside.do("start(); " + OPENERS[kind], inside.do(MAKERS[kind]))


@pytest.mark.parametrize("device", [0, 1])
def test_closing_waits_for_all_work_of_the_process(machine, one, two, device):
    two.do(IMPORT, one.do(EXPORT))
    two.do(f"context = ok(d.cuCtxGetCurrent()); start({device})")
    two.do("stream = ok(d.cuStreamCreate(1)); hold(stream); ok(d.cuCtxSetCurrent(context))")
    two.do(
        "def close(): ok(d.cuCtxSetCurrent(context)); ok(d.cuIpcCloseMemHandle(pointer))\n"
        "thread = threading.Thread(target=close); thread.start()"
    )
    while not machine.activity(two.pid).spun:
        pass
    assert machine.calls("cuIpcCloseMemHandle") == []
    two.do("released.set(); thread.join()")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"destroyed": "gone"}, "SIMCUDA_DESTROYED cannot be 'gone'"),
        ({"pin_us_per_gib": 1}, "SIMCUDA_PIN_US_PER_GIB is no setting"),
        ({"pin_us_per_mib": "much"}, "SIMCUDA_PIN_US_PER_MIB cannot be 'much'"),
    ],
)
def test_unknown_settings_are_noted(setting, text):
    with running_machine() as machine:
        machine.set(**setting)
        with running_worker(machine) as worker:
            worker.do("start()")
        (rule,) = machine.violations()
        assert text in rule
