"""Stubs killed at random moments while GPUs are busy: in the middle of copies and kernels, and as they start.

``GPUBRIDGE_TEST_KILLS`` says how many are killed in each mode; 1,000 take some five minutes on two cores, and a
``--timeout`` to match.
"""

import os
import signal
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.process.device_models import DOUBLE, running_device_server, write_device_model
from tests.process.server import wait_until
from tests.process.test_device_edges import CALLER, IN_ARENA, ensemble
from tests.process.test_device_network import pids_of, placement

KILLS = int(os.environ.get("GPUBRIDGE_TEST_KILLS", "5"))
# More of them, so that the others work while some are dead.
INSTANCES = 2 if KILLS < 100 else 3
VICTIMS = ("first", "second", "call_second")
# Of whole units of the arena.
COUNT = 50_048
# Its copy of a host input must not overtake what its stream still reads of the last one: the memory
# is the same, and answers are handed on before they are complete.
IN_ORDER = DOUBLE.replace(
    "cuMemcpyHtoD(pointer, values, values.nbytes)",
    "cuMemcpyHtoDAsync(pointer, values.tobytes(), values.nbytes, library.stream)",
)
ARENA = 4 << 20
BLOCK = 2 << 20
LONGEST_PAUSE_SECONDS = 0.2
# Little more than the last request needs: a slot lost now and then would leave it no room.
REQUEST_ARENA = 6 << 20


def write_models(repository):
    """Three models that are killed, one that never is and lends its memory to them, and their edges."""
    many = f"gpus: [0] count: {INSTANCES}"
    for name, source, config in (
        ("first", IN_ORDER, placement("device")),
        ("second", IN_ORDER, ""),
        ("call_second", CALLER, ""),
    ):
        directory = write_device_model(repository, name, source, config=config)
        text = (directory / "config.pbtxt").read_text()
        (directory / "config.pbtxt").write_text(text.replace("gpus: [0]", many))
    write_device_model(repository, "steady", IN_ARENA, config=placement("device"))
    ensemble(repository, "both", ["first", "second"])
    ensemble(repository, "from_steady", ["steady", "second"])
    return {"both": 4, "call_second": 2, "from_steady": 4}


class Load:
    """Clients that ask without end, and check each answer."""

    def __init__(self, served, factors):
        self.statuses = Counter()
        # What was asked lately, and who was killed when: to tell whose data a wrong answer has.
        self.asked = deque(maxlen=64)
        self.killed = deque(maxlen=8)
        self._served = served
        self._factors = factors
        self._over = threading.Event()

    def ask(self, model):
        while not self._over.is_set():
            given = np.random.default_rng().random(COUNT, np.float32)
            self.asked.append((model, given))
            begun = time.monotonic()
            status, answer = self._served.infer(model, given)
            self.statuses[status] += 1
            # Whoever gets an answer gets the right one.
            if status == 200:
                right = answer == (self._factors[model] * given).tolist()
                assert right, self._handle(model, given, np.array(answer, np.float32), begun)
            else:
                # A caller tells of the death of whom it has called as an error of its own.
                assert status == 503 or "is not healthy" in answer, answer
                # Refusals cost nothing: who repeats them keeps stubs from starting.
                self._over.wait(0.01)

    def stop(self):
        self._over.set()

    def _handle(self, model, given, answer, begun):
        """Say whose data a wrong answer has."""
        now = time.monotonic()
        said = [f"wrong answer of {model}, asked {now - begun:.3f} s ago; killed:"]
        said += [f"  {name} ({pid}) {now - when:.3f} s ago" for when, name, pid in self.killed]
        for other, data in [(f"{model}, this request", given), *self.asked]:
            for factor in (1, 2, 4):
                same = np.flatnonzero(answer == factor * data)
                if len(same) > 1:
                    said.append(
                        f"  {len(same)} of {COUNT} are {factor} x {other}: {same[0]}..{same[-1]}"
                    )
        said.append(f"  {np.count_nonzero(answer == 0)} are 0; {answer[:4]} for {given[:4]}")
        return "\n".join(said)


def kill_at_random(served, load, random, asking, pause):
    """Kill stubs until so many are dead, and as many requests were answered; returns their ids."""
    killed = set()
    while min(len(killed), load.statuses[200]) < KILLS and not any(f.done() for f in asking):
        pause.wait(random.uniform(0, LONGEST_PAUSE_SECONDS))
        victims = {pid: model for model in VICTIMS for pid in pids_of(served, model)}
        pids = [pid for pid in victims if pid not in killed]
        if pids:
            pid = int(random.choice(pids))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it was given up by the server in this moment
                continue
            killed.add(pid)
            load.killed.append((time.monotonic(), victims[pid], pid))
    return killed


@pytest.mark.parametrize(
    ("handles", "recorder", "events"),
    [
        ("legacy", "rerecord", "share"),
        pytest.param("fd", "rerecord", "share", marks=pytest.mark.nightly),
        # Events are tried, and then not used; or they are, and who is not let go of is ended.
        pytest.param("auto", "released", "auto", marks=pytest.mark.nightly),
        pytest.param("auto", "never", "auto", marks=pytest.mark.nightly),
        pytest.param("auto", "never", "share", marks=pytest.mark.nightly),
    ],
)
def test_kills_at_random_moments(tmp_path, handles, recorder, events):
    factors = write_models(tmp_path)
    flags = (
        "--backend-config=python,restart-backoff-limit-seconds=0.1",
        "--backend-config=python,device-lost-event-seconds=1",
        f"--request-arena-limit={REQUEST_ARENA}",
    )
    driver = {"handles": handles, "recorder": recorder, "events": events}
    unkind = {"exited_recorder": "never"}
    options = {"delay_us": 2000, "arena": ARENA, "switches": unkind, **driver}
    with running_device_server(tmp_path, *flags, **options) as served:
        load = Load(served, factors)
        steady = pids_of(served, "steady")
        with ThreadPoolExecutor(2 * len(factors)) as pool:
            asking = [pool.submit(load.ask, model) for model in [*factors] * 2]
            try:
                killed = kill_at_random(
                    served, load, np.random.default_rng(7), asking, threading.Event()
                )
            finally:
                load.stop()
            for future in asking:
                future.result()
        assert len(killed) >= KILLS
        starting = served.server.log().count("failed to start: Stub process")
        print(f"{len(killed)} kills, {starting} of them of starting stubs; {dict(load.statuses)}")
        check_nothing_is_lost(served, factors)
        assert pids_of(served, "steady") == steady


def check_nothing_is_lost(served, factors):
    """All instances are up, all memory is free, and what is answered is right."""
    stubs = INSTANCES * len(VICTIMS) + 1
    wait_until(
        lambda: (
            all(len(pids_of(served, model)) == INSTANCES for model in VICTIMS)
            and served.server.is_ready()
        ),
        "the stubs to be back",
        served.server,
    )
    given = np.random.default_rng().random(COUNT, np.float32)
    for model, factor in factors.items():
        for _ in range(2 * INSTANCES):
            assert served.infer(model, given) == (200, (factor * given).tolist())
    # Their arenas, and a block that their libraries cut memory from: nothing of the dead is left.
    wait_until(
        lambda: served.machine.used(0) < stubs * (ARENA + BLOCK) + ARENA,
        "dead arenas to be freed",
        served.server,
    )
    # Of the stub that has lived all the time nobody holds more than what the last requests had. What is lost
    # never comes back; an answer that is given back late may lie before the input, and leave two pieces of
    # which neither is large enough for the output.
    assert served.infer("steady", [1.0]) == (200, [2.0])
    large = np.ones((ARENA - 4 * 4 * COUNT) // 8, np.float32)

    def is_answered():
        status, answer = served.infer("steady", large)
        assert answer == (2 * large).tolist() if status == 200 else "arena is full" in answer
        return status == 200

    wait_until(is_answered, "the arena to be free", served.server)
