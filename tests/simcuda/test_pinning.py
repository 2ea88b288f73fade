"""Pinning of the simulated driver takes its time, and all processes' calls wait for it."""

import pytest

pytest.importorskip("cuda.bindings")

# Four ranges of 4 MiB: one whose pages are there, and others.
MEMORY = """
import mmap
MIB = 1 << 20
start()
m = mmap.mmap(-1, 16 * MIB)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
for page in range(0, 4 * MIB, 4096):
    m[page] = 1

def pin(index):
    ok(d.cuMemHostRegister(at + index * 4 * MIB, 4 * MIB, 0))
"""


def test_pages_that_nobody_has_touched_take_longer(machine, worker):
    machine.set(pin_us_per_mib=100, pin_us_per_mib_untouched=1000)
    held = []
    worker.do(MEMORY)
    for step in ("pin(0)", "pin(1)", "ok(d.cuMemHostAlloc(4 * MIB, 0))"):
        worker.do(step)
        held.append(round(machine.activity(worker.pid).held, 4))
    assert held == [0.0004, 0.0044, 0.0084]


def test_pinning_takes_time_that_nobody_has_set(machine, worker):
    worker.do(MEMORY + "pin(1)")
    assert machine.activity(worker.pid).held > 0


def test_calls_of_all_processes_wait_for_the_one_that_pins(machine, one, two):
    machine.set(pin_us_per_mib_untouched=400_000)
    one.do(MEMORY)
    two.do("start(); a = ok(d.cuMemAlloc(64))")
    assert machine.activity(two.pid).stalled == 0
    one.do("thread = threading.Thread(target=lambda: (start(), pin(1))); thread.start()")
    while not machine.activity(two.pid).stalled:
        two.do("ok(d.cuMemAlloc(64))")
    one.do("thread.join()")
    # Which context is current, and what devices there are, is no matter of the driver's lock.
    one.do("thread = threading.Thread(target=lambda: (start(), pin(2))); thread.start()")
    before = machine.activity(two.pid).stalled
    two.do("for _ in range(50): ok(d.cuCtxGetCurrent()); ok(d.cuDeviceGetCount())")
    assert machine.activity(two.pid).stalled == before
    one.do("thread.join()")


def test_a_process_killed_while_pinning_leaves_no_lock(machine, one, two):
    machine.set(pin_us_per_mib_untouched=400_000)
    one.do(MEMORY + "threading.Thread(target=lambda: (start(), pin(1)), daemon=True).start()")
    two.do("start()")
    while not machine.activity(two.pid).stalled:
        two.do("ok(d.cuMemAlloc(64))")
    one.kill()
    two.do("for _ in range(3): ok(d.cuMemAlloc(64))")


def test_unpinning_waits_for_the_device(worker):
    worker.do(MEMORY + "pin(0); stream = ok(d.cuStreamCreate(1)); hold(stream)")
    worker.do(
        "thread = threading.Thread(target=lambda: (start(), ok(d.cuMemHostUnregister(at))))\n"
        "thread.start(); thread.join(0.1); answer = thread.is_alive()"
    )
    assert worker.do("thread.join(0.1); answer = thread.is_alive()")
    worker.do("released.set(); thread.join()")


@pytest.mark.parametrize(
    "copy", ["HtoDAsync(a, at + start_at, size, 0)", "DtoHAsync(at + start_at, a, size, 0)"]
)
def test_memory_that_is_partly_pinned_is_not_copied(worker, copy):
    worker.do(MEMORY + "pin(1); pin(2); a = ok(d.cuMemAlloc(16 * MIB)); four = 4 * MIB")
    pinned_or_not = [
        ("four", "four"),
        ("four + 10", "100"),
        ("0", "four"),
        ("3 * four", "four"),
    ]
    for start, size in pinned_or_not:
        worker.do(f"start_at, size = {start}, {size}; ok(d.cuMemcpy{copy})")
    for start, size in (("four - 10", "20"), ("2 * four - 10", "20"), ("0", "16 * MIB")):
        worker.refuses("INVALID_VALUE", f"start_at, size = {start}, {size}; ok(d.cuMemcpy{copy})")


def test_memory_is_copied_while_it_is_pinned_and_unpinned(machine, worker):
    """A copy finds memory pinned or not, never something between."""
    machine.set(pin_us_per_mib=1, pin_us_per_mib_untouched=1)
    worker.do(
        MEMORY + "a = ok(d.cuMemAlloc(4096)); context = ok(d.cuCtxGetCurrent())\n"
        "import threading\n"
        "ended = threading.Event()\n"
        "def pin_again():\n"
        "    ok(d.cuCtxSetCurrent(context))\n"
        "    while not ended.is_set():\n"
        "        pin(0); ok(d.cuMemHostUnregister(at))\n"
        "thread = threading.Thread(target=pin_again); thread.start()\n"
        "refused = []\n"
        "for _ in range(40_000):\n"
        "    refused += [r for (r, *_) in [d.cuMemcpyHtoDAsync(a, at, 64, 0)] if int(r)]\n"
        "ended.set(); thread.join()\n"
        "assert not refused, refused"
    )
