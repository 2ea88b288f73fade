"""Tasks that last as long as the server, with a planted bug in each: it is logged, and they go on."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from gpubridge.engine.devices.staging import _Delivery
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.repository import repository
from gpubridge.engine.repository.model_sources import RepositoryPoller
from gpubridge.engine.supervisor import orphans
from gpubridge.frontend.status import history
from gpubridge.frontend.status.history import StatusHistory
from gpubridge.request import InferResponse
from tests.waits import until


class Planted:
    """A callable that fails, with the same error, twice."""

    def __init__(self, result=()):
        self.calls, self.result, self.ends = 0, result, ExitStack()

    def __call__(self, *_):
        self.calls += 1
        if self.calls <= 2:
            raise ZeroDivisionError("planted")
        return self.result

    async def wait(self, *_):
        return self()


async def maintained(fault):
    other = Planted()
    other.calls = 2
    models = [SimpleNamespace(maintain=act, check_time_limit=act) for act in (fault, other)]
    regions = SimpleNamespace(trim=lambda _: None)
    task = asyncio.create_task(repository.run_maintenance(lambda: models, 0.001, regions))
    await until(lambda: fault.calls > 2)
    assert other.calls >= fault.calls
    return task


async def steps(fault):
    kept = StatusHistory(fault)
    kept.begin()
    return kept._task


async def told(fault):
    progress = LoadProgress(0.001)
    fault.ends.enter_context(progress.track("m", 1, lambda: ("", None)))
    acts = {"__iter__": lambda _: iter(fault()), "remove": lambda *_: None}
    progress.loads = type("Loads", (), acts)()
    return progress._timer


async def polled(fault):
    poller = RepositoryPoller(SimpleNamespace(read=Planted({}).wait, unread=()), None)
    poller._sources.read = fault.wait
    return asyncio.create_task(poller.run(0.001))


@pytest.mark.parametrize("begin", [maintained, steps, told, polled])
async def test_they_go_on(begin, caplog, monkeypatch):
    monkeypatch.setattr(repository, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(history, "_STEP_SECONDS", 0.001)
    fault = Planted({})
    task = await begin(fault)
    await until(lambda: fault.calls > 3)
    task.cancel()
    await asyncio.wait([task])
    fault.ends.close()
    assert task.cancelled()
    lines = [
        record for record in caplog.records if "failed by a bug of gpubridge" in record.message
    ]
    assert lines
    assert all(record.exc_info[1].args == ("planted",) for record in lines)
    # The same error is told once.
    assert len(lines) == len({record.message for record in lines})


async def test_a_response_that_is_not_copied_is_an_error():
    delivered = []
    delivery = _Delivery(None, None, {}, {}, None)
    delivery._write = Planted().wait
    for outcome in (InferResponse.__new__(InferResponse), "the end"):
        delivery.pass_on(delivered.append, outcome)
    await until(lambda: len(delivered) == 2)
    assert "ZeroDivisionError: planted; this is a bug of gpubridge" in delivered[0].message
    assert delivered[1] == "the end"


def test_orphans_are_looked_for_again(monkeypatch, caplog):
    async def look():
        fault = Planted([])
        monkeypatch.setattr(orphans, "_children", fault)
        monkeypatch.setattr(orphans, "_SELDOM_SECONDS", 0.001)
        looking = orphans.Orphans()
        looking.possible = True
        looking._check()
        await until(lambda: fault.calls > 3)
        looking._timer.cancel()

    asyncio.run(look())
    assert "a look for orphans failed by a bug of gpubridge" in caplog.text
