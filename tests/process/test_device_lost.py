"""Producers on a GPU that die before what they have handed on is complete: who waits fails, and lives.

Then events of killed processes, as drivers treat them, and the server's reaction.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.process.controlled import only
from tests.process.device_models import DOUBLE, running_device_server, write_device_model
from tests.process.gated_models import CONSUMER, MAKER, Gate, calling
from tests.process.server import wait_until, write_model
from tests.process.test_device_edges import HOST, ensemble
from tests.process.test_device_network import pids_of

COUNT = 1000
LOST = "died before the GPU work on the tensors that it had sent was complete"


SECONDS = 1.0
SHORT = f"--backend-config=python,device-lost-event-seconds={SECONDS:g}"
REFUSED = "wait for their GPU work before they send tensors"
AFTER = "its GPU work still waited for another process"
FEW = only("two", "four")


@pytest.fixture(scope="module")
def models(repository):
    write_device_model(repository, "maker", MAKER)
    for name in ("consumer", "other"):
        write_device_model(repository, name, CONSUMER)
    write_device_model(repository, "last", DOUBLE)
    write_device_model(repository, "call_with", calling(MAKER, "consumer"))
    write_device_model(repository, "call_host", calling(MAKER, "host"))
    write_device_model(repository, "call_maker", calling(CONSUMER, "maker"))
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    ensemble(repository, "two", ["maker", "consumer"])
    ensemble(repository, "four", ["maker", "consumer", "other", "last"])
    return repository


@pytest.fixture(scope="module")
def served(models):
    unkind = {"exited_recorder": "never"}
    with running_device_server(models, delay_us=0, switches=unkind) as served:
        yield served


@pytest.fixture(scope="module")
def short(models):
    """A server that uses events until it has seen one that stays: by the last test that uses it."""
    with running_device_server(models, SHORT, *FEW, delay_us=0, own=True) as served:
        yield served


# Its kernel stores to an address that is nobody's, when it comes to it.
FAULTY = MAKER.replace(
    "d.cuMemcpyHtoDAsync(slot.pointer,", "d.cuMemcpyHtoDAsync(64 if held else slot.pointer,"
)


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def pid_of(served, model):
    (pid,) = pids_of(served, model)
    return pid


def bystanders(served, dead):
    names = ("maker", "consumer", "other", "last", "call_with", "call_host", "call_maker", "host")
    return {name: pid_of(served, name) for name in names if name != dead}


# Who dies; who has taken what it made, as far as that; whether whoever waits is told of the loss,
# or the request was the dead one's own.
CHAINS = {
    "two": ("maker", "consumer", "made", True),
    "four": ("maker", "other", "made", True),
    "call_maker": ("maker", "call_maker", "answered", True),
    "call_with": ("call_with", "consumer", "made", False),
    "call_host": ("call_host", "call_host", "made", False),
}


@pytest.mark.parametrize("model", CHAINS)
def test_a_consumer_of_a_dead_producer_fails_its_request_and_lives(served, repository, model):
    dead, goes_on, how_far, is_told = CHAINS[model]
    held = Gate(repository, dead, served.server)
    seen = Gate(repository, goes_on, served.server)
    others = bystanders(served, dead)
    pid = pid_of(served, dead)
    held.hold()
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.infer, model, values())
            seen.wait_for(how_far)
            os.kill(pid, signal.SIGKILL)
            status, error = answer.result()
        assert status == 503
        assert f"'{dead}_0_0' is not healthy" in error
        assert (LOST in error) == is_told
        wait_until(served.server.is_ready, "a new stub", served.server)
        assert bystanders(served, dead) == others
    finally:
        held.open()
    for name, factor in (("four", 16), ("call_maker", 2), ("call_with", 4), ("call_host", 4)):
        given = values()
        assert served.infer(name, given) == (200, (factor * given).tolist())


def test_work_completed_before_the_producers_death_is_used(served, repository):
    """The consumer's stream has not come to the waits for it when the producer dies."""
    held = Gate(repository, "consumer", served.server)
    last = Gate(repository, "other", served.server)
    given = values()
    held.hold()
    try:
        with ThreadPoolExecutor(2) as pool:
            # The second one's wait is behind the first one's kernel.
            answers = []
            for times in (1, 2):
                answers.append(pool.submit(served.infer, "four", given))
                last.wait_for("made", times)
            pid = pid_of(served, "maker")
            served.wait_until_complete(pid)
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: pids_of(served, "maker") not in ([], [pid]), "a new stub", served.server
            )
            held.open()
            assert [each.result() for each in answers] == [(200, (16 * given).tolist())] * 2
    finally:
        held.open()


def test_a_stub_completes_what_it_has_handed_on_before_it_ends(tmp_path):
    for name, source in (("maker", MAKER), ("last", DOUBLE)):
        write_device_model(tmp_path, name, source)
    ensemble(tmp_path, "two", ["maker", "last"])
    with (
        running_device_server(tmp_path) as served,
        ThreadPoolExecutor(2) as pool,
    ):
        held, given = Gate(tmp_path, "maker", served.server), values()
        held.hold()
        answer = pool.submit(served.infer, "two", given)
        held.wait_for("made")
        unloaded = pool.submit(
            served.server.request, "POST", "/v2/repository/models/maker/unload", "{}"
        )
        wait_until(lambda: not served.server.is_ready("maker"), "the unload", served.server)
        held.open()
        assert unloaded.result()[0] == 200
        assert answer.result() == (200, (4 * given).tolist())


def test_a_kernel_that_fails_after_its_response_has_left_is_found_out(tmp_path):
    write_device_model(tmp_path, "maker", FAULTY)
    write_device_model(tmp_path, "consumer", CONSUMER)
    ensemble(tmp_path, "two", ["maker", "consumer"])
    with running_device_server(
        tmp_path, delay_us=0, tolerated="at an address that is not allocated"
    ) as served:
        maker, consumer = (Gate(tmp_path, name, served.server) for name in ("maker", "consumer"))
        pids = pid_of(served, "maker"), pid_of(served, "consumer")
        maker.hold()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.infer, "two", values())
            consumer.wait_for("made")
            maker.open()
            status, error = answer.result()
        assert status == 503
        assert LOST in error
        wait_until(
            lambda: pids_of(served, "maker") not in ([], [pids[0]]), "a new stub", served.server
        )
        wait_until(served.server.is_ready, "it to be ready", served.server)
        assert pid_of(served, "consumer") == pids[1]
        given = values()
        assert served.infer("two", given) == (200, (4 * given).tolist())


def pids(served):
    return {name: pids_of(served, name) for name in ("maker", "consumer", "other", "last")}


def is_up(served, before, names):
    """Return whether the stubs of some models are others now, and ready, and those of the rest the same."""
    now = pids(served)
    changed = {name for name in now if now[name] != before[name]}
    return all(now.values()) and changed == set(names) and served.server.is_ready()


def test_a_slow_stub_is_not_ended(short, repository):
    """Its stream has been let go of; its own kernel takes longer than the deadline."""
    served = short
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


def test_a_stub_that_stays_blocked_is_ended(short, repository):
    served = short
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
        # It takes the tensors of a living process, whose death is found out while it waits.
        server = served.server
        wait_until(lambda: server.open_requests("last") == 1, "the last to be asked", server)
        server.metrics()
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
def test_events_are_used_where_the_driver_was_seen_to_release(models, recorder):
    with running_device_server(
        models, *FEW, delay_us=0, recorder=recorder, events="auto", own=True
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
