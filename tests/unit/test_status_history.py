"""The past of models that the status document tells: bounded, and exact at each step."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from gpubridge.frontend.status.history import KEPT_SECONDS, StatusHistory
from gpubridge.telemetry.statistics import DeviceWork, ModelStatistics

STEP = 10


def model(name="m"):
    return SimpleNamespace(
        name=name, version=1, statistics=ModelStatistics(name, 1), device_work=DeviceWork()
    )


def execute(one, size=2):
    one.statistics.executed(1, size, (1, 5_000_000, 1_000_000), (1000, 2000, 1000))
    one.statistics.passed_on("", 1, 5_000_000, 0, 0)
    one.statistics.copied(100)


@pytest.fixture
def history():
    """A history of the models in ``history.models``, which a test steps by ``history.at``."""
    made = StatusHistory(lambda: made.models)
    made.models = [model()]
    made.at = lambda time: asyncio.run(made.step(made.began + time))
    made.told = lambda: json.loads(made.encoded())["models"]
    return made


def test_steps_tell_what_was_added(history):
    (used,) = history.models
    history.at(STEP)
    assert history.told() == []
    execute(used)
    used.statistics.failed("BACKEND", 1)
    history.at(2 * STEP)
    history.at(3 * STEP)
    execute(used, 4)
    history.at(4 * STEP)
    (told,) = history.told()
    assert (told["name"], told["version"], told["since"]) == ("m", 1, used.statistics.since)
    assert told["sums"]["batch_sizes"] == [[2, 1], [4, 1]]
    assert told["sums"]["success"] == 2
    first, second = told["steps"]
    assert [second["begin"], second["end"]] == pytest.approx(
        [history.began + 3 * STEP, history.began + 4 * STEP]
    )
    assert (first["failures"], first["batch_sizes"]) == ({"BACKEND": 1}, [[2, 1]])
    assert "failures" not in second
    assert (second["success"], second["batch_sizes"]) == (1, [[4, 1]])
    assert second["durations"] == [[told["sums"]["durations"][0][0], 1]]
    assert second["copies"] == {"host": {"count": 1, "bytes": 100}}


def test_only_so_much_is_kept(history):
    (used,) = history.models
    for number in range(1, 200):
        execute(used)
        history.at(number * STEP)
    (told,) = history.told()
    assert len(told["steps"]) == KEPT_SECONDS / STEP
    assert told["sums"]["success"] == 199
    # It costs as much as the documents say.
    assert len(history.encoded()) < 50_000


def test_a_load_begins_anew_and_what_is_gone_is_forgotten(history):
    execute(history.models[0])
    history.at(STEP)
    # The former version completes its requests behind the served one.
    history.models = [model(), *history.models]
    history.at(2 * STEP)
    assert history.told() == []
    execute(history.models[0])
    history.at(3 * STEP)
    assert history.told()[0]["sums"]["success"] == 1
    history.models = []
    history.at(4 * STEP)
    assert history.told() == []
