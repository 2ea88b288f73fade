"""Instances that start together: what the log says when some of them cannot."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from gpubridge.engine.supervisor import startup as starting
from gpubridge.errors import BridgeError
from tests.waits import until

SLOW = "takes its time"


def instance(index, how, ended):
    """An instance that starts as it is told: an error, None, or SLOW until it is cancelled."""

    async def start(completion):
        try:
            if how is SLOW:
                await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(index)
        if how is not None:
            raise how

    return SimpleNamespace(name=f"m_0_{index}", start=start)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(starting, "_GRACE_SECONDS", 0.01)


def test_all_failures_are_returned_and_none_is_logged(caplog):
    errors = [BridgeError("first"), BridgeError("second")]
    hows = [errors[0], None, errors[1]]
    instances = [instance(index, how, []) for index, how in enumerate(hows)]
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(starting.start_all(instances, None)) == errors
    assert not caplog.records


def test_a_failure_is_logged_while_others_start_and_a_cancelled_start_leaves_none(caplog):
    ended = []

    async def cancelled_once_it_is_told():
        hows = [SLOW, BridgeError("no port"), None, SLOW]
        instances = [instance(index, how, ended) for index, how in enumerate(hows)]
        load = asyncio.ensure_future(starting.start_all(instances, None))
        await until(lambda: caplog.records)
        assert sorted(ended) == [1, 2]
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert sorted(ended) == [0, 1, 2, 3]

    with caplog.at_level(logging.ERROR):
        asyncio.run(cancelled_once_it_is_told())
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("instance 'm_0_1' failed to start")
    assert "m_0_0, m_0_3" in text
    assert text.endswith("no port")


async def test_a_cancelled_load_waits_for_what_it_has_started():
    ended = []
    load = asyncio.ensure_future(
        starting.start_all([instance(index, SLOW, ended) for index in range(2)], None)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert ended == [0, 1]
