"""Sharing of events between stubs, and the end of stubs that a driver never releases."""

import asyncio
import logging
import weakref
from types import SimpleNamespace

import pytest

from gpubridge.cuda_ipc import Ability
from gpubridge.cuda_ipc.device_check import DeviceCheck, no_check
from gpubridge.engine.devices import event_sharing
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.transport.device_events import arena_region, event_name
from tests.waits import timers, until

GPU = "GPU-0"
WORKS = DeviceCheck(*(Ability() for _ in range(5)))
STAYS = DeviceCheck(Ability(), Ability(), Ability(), Ability("they stay"), Ability())


class User:
    """A stub that waits for some events, and has made some that are not done."""

    def __init__(self, sharing, *, waits=(), made=(), blind=False, uuid=GPU):
        self.uuid = uuid
        self.shares = None
        self.killed = []
        self.kill = self.killed.append
        self._waits, self._made, self._blind = set(waits), frozenset(made), blind
        sharing.join(self)

    def share(self, on):
        self.shares = on

    def waits_for(self, lost, since):
        return (None if self._blind else True) if self._waits & lost else False

    def unfinished(self):
        return self._made


async def lose(sharing, *numbers):
    """Have an arena's events recorded again, and let the time pass."""
    arena = SimpleNamespace(region=arena_region(1), uuid=GPU)
    sharing.await_release(arena, numbers, "Stub 'maker' died.")
    await until(lambda: not timers())


def names(owner, *numbers):
    return [event_name(arena_region(owner), number) for number in numbers]


@pytest.fixture
def tried(monkeypatch):
    """Answers of checks, which are given one after the other; the GPUs that were tried."""
    answers, asked = [], []

    async def check(uuid):
        asked.append(uuid)
        await asyncio.sleep(0)
        return answers.pop(0)

    monkeypatch.setattr(event_sharing, "_check", check)
    return SimpleNamespace(answers=answers, asked=asked)


@pytest.mark.parametrize(("way", "shared"), [("share", True), ("wait", False), ("auto", False)])
def test_the_setting_says_it_until_something_is_known(way, shared):
    assert User(EventSharing(way, 1.0)).shares is shared


@pytest.mark.parametrize("works", [True, False])
async def test_a_gpu_is_tried_once_when_memory_is_handed_on_there(tried, caplog, works):
    tried.answers += [WORKS if works else STAYS]
    caplog.set_level(logging.WARNING)
    sharing = EventSharing("auto", 1.0)
    first, other = User(sharing), User(sharing, uuid="GPU-1")
    for _ in range(3):
        sharing.need(GPU)
        await until(lambda: first.shares or caplog.records)
    assert (first.shares, other.shares, User(sharing).shares) == (works, False, works)
    await sharing.close()
    assert tried.asked == [GPU]
    assert [record.getMessage().endswith("they stay") for record in caplog.records] == (
        [] if works else [True]
    )


@pytest.mark.parametrize("works", [True, False])
async def test_a_check_that_could_not_run_is_repeated(tried, caplog, monkeypatch, works):
    monkeypatch.setattr(event_sharing, "_FIRST_PAUSE", 0.001)
    tried.answers += [no_check("no memory"), no_check("no memory"), WORKS if works else STAYS]
    caplog.set_level(logging.WARNING)
    sharing = EventSharing("auto", 1.0)
    user = User(sharing)
    sharing.need(GPU)
    # Both outcomes show: that it works by the user, that it does not by a second warning.
    await until(lambda: user.shares or len(caplog.records) == 2)
    assert user.shares is works
    await sharing.close()
    assert tried.asked == [GPU] * 3
    said = [record.getMessage().rsplit(": ")[-1] for record in caplog.records]
    assert said == ["no memory; the test will be repeated", *([] if works else ["they stay"])]


@pytest.mark.parametrize("way", ["share", "wait"])
async def test_nothing_is_tried_where_the_setting_says_it(tried, way):
    EventSharing(way, 1.0).need(GPU)
    assert tried.asked == []


async def test_blocked_stubs_and_their_waiters_are_ended(caplog):
    sharing = EventSharing("share", 0.001)
    waiting = User(sharing, waits=names(1, 5), made=names(2, 0))
    behind = User(sharing, waits=names(2, 0))
    spared = [
        User(sharing, waits=names(1, 4)),
        User(sharing, waits=names(3, 5)),
        User(sharing, waits=names(1, 5), uuid="GPU-1"),
    ]
    users = [waiting, behind, *spared]
    await lose(sharing, 5, 6)
    ended = [user for user in users if user.killed]
    assert set(ended) == {waiting, behind}
    assert all(len(user.killed) == 1 for user in ended)
    assert "device-lost-event-seconds). Stub 'maker' died." in behind.killed[0]
    # This driver is not relied on any more.
    assert {user.shares for user in users if user.uuid == GPU} == {False}
    assert len(caplog.records) == 1


async def test_a_silent_stub_is_ended_and_proves_nothing_about_the_driver(caplog):
    sharing = EventSharing("share", 0.001)
    blind = User(sharing, waits=names(1, 5), blind=True)
    await lose(sharing, 5)
    assert blind.killed
    assert blind.shares is True
    assert not caplog.records


async def test_a_stub_that_is_gone_is_not_waited_for():
    sharing = EventSharing("share", 0.001)
    gone = weakref.ref(User(sharing, waits=names(1, 5)))
    await lose(sharing, 5)
    assert gone() is None
