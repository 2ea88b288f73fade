"""A short soak: everything at once while stubs are killed (``python -m benchmarks.soak`` for a long one)."""

import re
import shutil

import pytest

pytest.importorskip("grpc")
from benchmarks.soak.holdings import Holdings
from benchmarks.soak.request_log import Outcome, RequestLog
from benchmarks.soak.run import _MODELS, Aim, SoakReport, soak

KILLED = "Stub process 'm_0' is not healthy. It was killed by signal 9 (SIGKILL), sent from outside"


@pytest.mark.parametrize(
    ("aim", "kill_every", "warm_up"),
    [
        (Aim(30, answered=50, kills=1), 0.1, 0.4),
        pytest.param(Aim(90, answered=500, kills=4), 0.8, 3.0, marks=pytest.mark.nightly),
    ],
    ids=["short", "long"],
)
def test_every_request_has_one_outcome_and_nothing_is_left(
    tmp_path, monkeypatch, aim, kill_every, warm_up
):
    monkeypatch.setattr("benchmarks.soak.run._SHORTEST_WARM_UP", warm_up)
    if aim.kills == 1:
        # Its processes, which are not forked, are most of what a short one costs.
        models = shutil.copytree(_MODELS, tmp_path / "models")
        for config in models.glob("*/config.pbtxt"):
            # With one process, both sequences would be lost with it.
            count = 2 if config.parent.name == "running" else 1
            config.write_text(re.sub(r"count: \d", f"count: {count}", config.read_text()))
        monkeypatch.setattr("benchmarks.soak.run._MODELS", models)
    report = soak(aim, kill_every, tmp_path / "log")
    assert report.faults == [], report.text()
    table = report.log.table()
    for kind in ("decoupled", "decoupled ensemble", "cancelled call", "hang-up"):
        assert f"\n{kind} " in table
    for kind in ("default", "BLS", "ensemble", "strings", "sequence"):
        assert f"\n{kind} " in table
        assert f"\n{kind}, gRPC " in table
    assert report.log.count(Outcome.ANSWERED) >= aim.answered
    assert report.kills == aim.kills


def test_a_soak_ends_when_it_has_its_numbers_and_fails_without_them():
    report = SoakReport(RequestLog())
    aim = Aim(60, answered=2, kills=1)
    for _ in range(2):
        assert not aim.reached(report.log, 1)
        report.log.send("good").close(Outcome.ANSWERED)
    assert not aim.reached(report.log, 0)
    assert aim.missed(report) == ["stubs killed: 0, expected 1"]
    assert aim.reached(report.log, 1)
    assert not Aim(60).reached(report.log, 1)
    assert Aim(60).missed(report) == []
    assert Aim(60).missed(SoakReport(RequestLog())) == ["answered: 0, expected 1"]


def test_the_log_finds_what_has_no_outcome_or_two_or_an_error_of_its_own():
    log = RequestLog()
    log.send("good").close(Outcome.ANSWERED)
    log.send("killed").fail(KILLED)
    log.send("refused").fail(f"Request for model 'm' cannot be served: {KILLED}")
    assert (log.count(Outcome.FAILED), log.count(Outcome.REFUSED)) == (1, 1)
    assert log.faults() == []
    log.send("lost")
    twice = log.send("twice")
    twice.close(Outcome.ANSWERED)
    twice.fail(KILLED)
    log.send("broken").fail("something else")
    assert log.faults() == [
        "lost: 1 of 1 without an outcome",
        "twice: failed after answered",
        "broken: something else",
    ]


def test_more_than_before_is_found():
    before = Holdings(3, 10, 50, 4, 2.0, 100.0)
    assert Holdings(3, 13, 50, 4, 9.0, 109.0).excess(before, 10) == []
    assert Holdings(4, 15, 51, 5, 2.0, 111.0).excess(before, 10) == [
        "processes: 3 before, 4 after",
        "threads: 10 before, 15 after",
        "descriptors: 50 before, 51 after",
        "segments: 4 before, 5 after",
        "PSS: 100.0 MiB before, 111.0 MiB after",
    ]
