"""Choice whether stubs of a GPU wait for each other's events, and the end of waits for dead stubs.

What a driver does with the events of a killed process is in no manual. So stubs are told to use theirs
only when three processes have tried it on their GPU (`gpubridge.cuda_ipc.check_device`); before that, and
where it fails, the stub that hands a tensor on waits for it. And where streams are not released in spite
of that, a deadline ends the stubs that have them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from gpubridge.config.python_backend import DeviceEvents
from gpubridge.cuda_ipc import DeviceCheck, check_command, end_check, no_check, read_check
from gpubridge.engine.workers import TaskSet
from gpubridge.telemetry.exposition import Family
from gpubridge.transport.device_events import event_name

if TYPE_CHECKING:
    from gpubridge.engine.devices.region import DeviceRegion

_logger = logging.getLogger(__name__)
_CHECK_SECONDS = 60.0
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0


class EventUser(Protocol):
    """A stub on a GPU (`StubEvents`)."""

    @property
    def uuid(self) -> str:
        """The GPU."""

    def share(self, on: bool) -> None:
        """Have the stub use its events from now on, or wait itself."""

    def waits_for(self, lost: frozenset[int], since: int) -> bool | None:
        """Return whether streams of the stub wait for events that are lost; None if it cannot say."""

    def unfinished(self) -> frozenset[int]:
        """Return the events, by their names, of what the stub has handed on and has not seen done."""

    @property
    def kill(self) -> Callable[[str], None]:
        """Ends the stub, and says why."""


class EventSharing:
    """Decides for each GPU whether its stubs wait for each other's events.

    - ``way``: ``share`` and ``wait`` say it for all; ``auto`` has it tried when a stub is first handed
      memory of another one.
    - ``seconds``: how long streams may wait for a dead stub after they were released.
    """

    def __init__(self, way: DeviceEvents = "auto", seconds: float = 5.0) -> None:
        self._way = way
        self._seconds = seconds
        self._users: WeakSet[EventUser] = WeakSet()
        # Those that have been decided for, or are being tried.
        self._shared: dict[str, bool] = {}
        self._checks = TaskSet()

    def join(self, user: EventUser) -> None:
        """A stub is about to hand on memory."""
        self._users.add(user)
        user.share(self._is_shared(user.uuid))

    def _is_shared(self, uuid: str) -> bool:
        return self._shared.get(uuid, self._way == "share")

    def need(self, uuid: str) -> None:
        """A stub is handed memory of another one on its GPU."""
        if self._way == "auto" and uuid not in self._shared:
            self._shared[uuid] = False
            self._checks.start(self._try(uuid))

    async def _try(self, uuid: str) -> None:
        pause = _FIRST_PAUSE
        while not (check := await _check(uuid)).tried:
            if pause == _FIRST_PAUSE:
                self._refuse(uuid, f"{check.events.reason}; it is tried again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        for ability in (check.events, check.lost_events):
            if not ability.works:
                self._refuse(uuid, ability.reason)
                return
        self._decide(uuid, True)

    def _refuse(self, uuid: str, reason: str) -> None:
        _logger.warning(
            "models on GPU %s wait for what they hand to each other there, instead of the GPU: %s",
            uuid,
            reason,
        )
        self._decide(uuid, False)

    def _decide(self, uuid: str, shared: bool) -> None:
        self._shared[uuid] = shared
        for user in tuple(self._users):
            if user.uuid == uuid:
                user.share(shared)

    def await_release(self, arena: DeviceRegion, numbers: Collection[int], loss: str) -> None:
        """End, after a time, the stubs whose streams still wait for events of a dead one.

        These were recorded again just now. ``loss``: says whose they are.
        """
        # Not the arena: its memory shall not have to wait.
        lost = frozenset(event_name(arena.region, number) for number in numbers)
        since = time.monotonic_ns()
        asyncio.get_running_loop().call_later(
            self._seconds, self._end_waiting, arena.uuid, lost, since, loss
        )

    def _end_waiting(self, uuid: str, lost: frozenset[int], since: int, loss: str) -> None:
        """End those that wait, and those that wait for them: no driver releases these either."""
        users = {user for user in self._users if user.uuid == uuid}
        while waiting := {user for user in users if user.waits_for(lost, since) is not False}:
            users -= waiting
            if self._is_shared(uuid) and any(user.waits_for(lost, since) for user in waiting):
                self._refuse(uuid, "the driver did not let streams go that waited for a killed one")
            lost = lost.union(*(user.unfinished() for user in waiting))
            for user in waiting:
                user.kill(
                    f"was killed: {self._seconds:g} s later, its GPU work still waited for another "
                    f"process (device-lost-event-seconds). {loss}"
                )

    def families(self) -> list[Family]:
        """Return for each GPU whether its stubs wait for each other's events."""
        family = Family(
            "gpubridge_device_events_used",
            "Whether GPU work of a model waits for that of another one (1), or the other one does (0)",
            "gauge",
        )
        for uuid in {user.uuid for user in self._users}:
            family.add({"gpu_uuid": uuid}, int(self._is_shared(uuid)))
        return [family]

    async def close(self) -> None:
        """End what is being tried."""
        await self._checks.cancel()


async def _check(uuid: str) -> DeviceCheck:
    """Have other processes try what a GPU can do; they end with the task."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *check_command("export", uuid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
    except OSError as error:
        return no_check(f"it could not be tried: {error}")
    try:
        out, err = await asyncio.wait_for(process.communicate(), _CHECK_SECONDS)
    except asyncio.TimeoutError:
        return no_check(f"what was tried did not end within {_CHECK_SECONDS:g} s")
    finally:
        if process.returncode is None:
            end_check(process.pid)
            await process.wait()
    return read_check(out.decode(), err.decode(errors="replace"), process.returncode)
