"""Tests wait for conditions, not for a time: nothing sleeps but a helper that polls, and where time is the subject."""

import re
import signal
from pathlib import Path

import pytest

from tests import hangs

TESTS = Path(__file__).parents[1]
HELPER = "waits.py"
TIMED = {
    "conformance/api_cases.py": 1,  # A model that looks for its cancellation, run by Triton, too.
    "conformance/http_exchange.py": 1,  # Parts of a request that come one after the other.
    "conformance/load_probe.py": 1,  # Looks at a server that it knows nothing of, Triton's too.
    "gpu/models.py": 1,  # A kernel of seconds.
    "process/device_models.py": 1,  # Requests meet: each takes long.
    "process/test_bench_zero_copy.py": 2,  # The interval of a sampler, and a load that is not all there can be.
    "process/test_bls.py": 1,  # A call that lasts beyond the server's look at idle memory.
    "process/test_connection_limits.py": 2,  # Calls that last beyond the limits of a connection.
    "process/test_debug_model.py": 1,  # Longer than any other model may take.
    "process/test_device_capture.py": 2,  # Captures that last while other threads settle.
    "process/test_device_lost.py": 1,  # A kernel that lasts beyond the deadline of lost events.
    "process/test_device_order.py": 3,  # What must not pass has time to pass.
    "process/test_ensemble_decoupled.py": 1,  # Some take longer, so that instances overtake each other.
    "process/test_lifecycle.py": 1,  # Nothing tells what a server has heard of.
    "process/test_orphans.py": 1,  # A call that lasts beyond the server's look at orphans.
    "process/test_poison_requests.py": 1,  # Processes that take long to start.
    "process/test_response_cache.py": 1,  # Equal requests that come while one is answered.
    "process/test_status.py": 1,  # The duration that is measured.
    "process/tried_server.py": 1,  # A server that is quiet twice in a row.
    "ray/test_fleet_faults.py": 1,  # A load that one server takes too long for.
    "unit/test_cuda_waits.py": 3,  # The processor time that waits cost.
    "unit/test_no_threads.py": 1,  # A batch that takes long: results are gathered by duration.
    "unit/test_stub_device_captures.py": 1,  # A capture that lasts beyond the bridge's question.
    "unit/test_stub_loop.py": 1,  # A batch that takes long: results are gathered by duration.
    "unit/test_stub_results.py": 1,  # What must not pass has time to pass.
    "unit/test_stub_uploads.py": 1,  # What must not pass has time to pass.
}
"""Files with sleeps where time itself is the subject, and how many."""
# A sleep of no time gives way to others; `def sleep` passes virtual time; `_sleep` is a kernel.
_SLEEP = re.compile(r"(?<!\w)(?<!def )sleep\((?!0\))")


def sleeps(folder):
    """Return how many sleeps each file has, those in the sources of models, too."""
    found = {
        path.relative_to(folder).as_posix(): len(_SLEEP.findall(path.read_text()))
        for path in folder.rglob("*.py")
        if path != Path(__file__)
    }
    assert found
    return {path: number for path, number in found.items() if number and path != HELPER}


def test_nothing_sleeps_where_it_could_wait_for_a_condition():
    assert sleeps(TESTS) == TIMED


def test_a_sleep_is_found(tmp_path):
    (tmp_path / HELPER).write_text("time.sleep(0.1)\n")
    (tmp_path / "test_one.py").write_text(
        "MODEL = '''\ntime.sleep(0.1)\n'''\nawait asyncio.sleep(2)\n"
    )
    (tmp_path / "test_two.py").write_text("def sleep(x): pass\nasyncio.sleep(0)\nuntil_asleep()\n")
    assert sleeps(tmp_path) == {"test_one.py": 2}


def test_each_wait_of_a_teardown_has_a_limit():
    # pytest-timeout gives up both once a test has failed.
    timer, handler = signal.setitimer(signal.ITIMER_REAL, 0), signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    teardown = hangs.pytest_runtest_teardown()
    next(teardown)
    assert all(signal.getitimer(signal.ITIMER_REAL))
    with pytest.raises(pytest.fail.Exception, match="the teardown of a test waits"):
        signal.raise_signal(signal.SIGALRM)
    teardown.close()
    assert not any(signal.getitimer(signal.ITIMER_REAL))
    assert signal.signal(signal.SIGALRM, handler) is signal.SIG_DFL
    signal.setitimer(signal.ITIMER_REAL, *timer)
