"""Events of a killed process, as drivers treat them, and the server's reaction."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.process.device_models import DOUBLE, running_device_server, write_device_model
from tests.process.gated_models import CONSUMER, MAKER, Gate
from tests.process.server import wait_until
from tests.process.test_device_edges import ensemble
from tests.process.test_device_network import pids_of

COUNT = 1000
SECONDS = 1.0
SHORT = f"--backend-config=python,device-lost-event-seconds={SECONDS:g}"
REFUSED = "wait for their GPU work before they send tensors"
AFTER = "its GPU work still waited for another process"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_device_model(folder, "maker", MAKER)
    for name in ("consumer", "other"):
        write_device_model(folder, name, CONSUMER)
    write_device_model(folder, "last", DOUBLE)
    ensemble(folder, "two", ["maker", "consumer"])
    ensemble(folder, "four", ["maker", "consumer", "other", "last"])
    return folder


@pytest.fixture(scope="module")
def served(repository):
    """A server that uses events until it has seen one that stays: by the last test that uses it."""
    with running_device_server(repository, SHORT, delay_us=0, own=True) as served:
        yield served


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def pids(served):
    return {name: pids_of(served, name) for name in ("maker", "consumer", "other", "last")}


def is_up(served, before, names):
    """Return whether the stubs of some models are others now, and ready, and those of the rest the same."""
    now = pids(served)
    changed = {name for name in now if now[name] != before[name]}
    return all(now.values()) and changed == set(names) and served.server.is_ready()


def test_a_slow_stub_is_not_ended(served, repository):
    """Its stream has been let go of; its own kernel takes longer than the deadline."""
    given = values()
    assert served.infer("two", given) == (200, (4 * given).tolist())
    before = pids(served)
    makers, consumers = (Gate(repository, name, served.server) for name in ("maker", "consumer"))
    makers.hold()
    consumers.hold()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.infer, "two", given)
        consumers.wait_for("made")
        os.kill(before["maker"][0], signal.SIGKILL)
        wait_until(
            lambda: pids(served)["maker"] not in ([], before["maker"]),
            "a new stub",
            served.server,
        )
        makers.open()
        time.sleep(3 * SECONDS)
        consumers.open()
        status, error = answer.result()
    assert status == 503
    assert AFTER not in error
    assert pids(served)["consumer"] == before["consumer"]
    assert served.infer("two", given) == (200, (4 * given).tolist())
    assert REFUSED not in served.server.log()


def test_a_stub_that_stays_blocked_is_ended(served, repository):
    served.machine.set(killed_recorder="never")
    given = values()
    assert served.infer("four", given) == (200, (16 * given).tolist())
    before = pids(served)
    # The last that takes what another process still writes.
    held, seen = (Gate(repository, name, served.server) for name in ("maker", "other"))
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.infer, "four", given)
        seen.wait_for("made")
        os.kill(before["maker"][0], signal.SIGKILL)
        status, error = answer.result()
    held.open()
    assert status == 503
    assert AFTER in error
    assert "'maker_0_0' is not healthy" in error
    # Each one waits for the one before it.
    wait_until(
        lambda: is_up(served, before, ["maker", "consumer", "other", "last"]),
        "the ended stubs to be back",
        served.server,
    )
    assert served.server.log().count(REFUSED) == 1
    # Now the maker waits, and nobody else.
    with served.doing("maker", waits=1):
        assert served.infer("two", given) == (200, (4 * given).tolist())
    assert served.infer("four", given) == (200, (16 * given).tolist())


@pytest.mark.parametrize("recorder", ["rerecord", "never"])
def test_events_are_used_where_the_driver_was_seen_to_release(repository, recorder):
    with running_device_server(
        repository, delay_us=0, recorder=recorder, events="auto", own=True
    ) as served:
        given = values()
        # What is handed on before the driver was tried is waited for.
        assert served.infer("four", given) == (200, (16 * given).tolist())
        if recorder == "rerecord":
            used = served.server.metrics
            wait_until(
                lambda: any(
                    "device_events_used" in name and value for name, value in used().items()
                ),
                "events to be used",
                served.server,
            )
        else:
            wait_until(
                lambda: REFUSED in served.server.log(), "the driver to be tried", served.server
            )
        with served.doing("maker", waits=int(recorder != "rerecord")):
            assert served.infer("four", given) == (200, (16 * given).tolist())
        assert served.server.log().count(REFUSED) == int(recorder != "rerecord")
        # Those of the server and its stubs: nothing is left of who has tried it.
        wait_until(
            lambda: len(served.machine.contexts()) == 5, "other contexts to be gone", served.server
        )
