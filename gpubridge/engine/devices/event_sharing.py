"""Sharing of device events between stubs, and the end of waits for events of stubs that have ended.

No documentation says what the driver does with the events of a process that has ended, by itself or
killed. Therefore stubs share events only after processes have tested this on their GPU
(`gpubridge.cuda_ipc.device_check`). Before that, and where the test fails, a stub waits for its own GPU
work before it sends a tensor. If streams still wait for such a stub after its events were recorded, their
stubs are killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakSet

from gpubridge.config.python_backend import DeviceEvents
from gpubridge.cuda_ipc.device_check import (
    DeviceCheck,
    check_command,
    end_check,
    no_check,
    read_check,
)
from gpubridge.engine.workers import TaskSet
from gpubridge.telemetry.exposition import Family
from gpubridge.transport.device_events import event_name

if TYPE_CHECKING:
    from gpubridge.engine.devices.edge_events import StubEvents
    from gpubridge.engine.memory.device_region import DeviceRegion

_logger = logging.getLogger(__name__)
_CHECK_SECONDS = 60.0
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0


class EventSharing:
    """Decides for each GPU whether its stubs wait for each other's events.

    - ``mode``: ``share`` or ``wait`` for all GPUs; ``auto``: test a GPU when a stub first gets memory
      of another stub there.
    - ``seconds``: how long streams may wait after the events of a dead stub were recorded.
    """

    def __init__(self, mode: DeviceEvents = "auto", seconds: float = 5.0) -> None:
        self._mode = mode
        self._seconds = seconds
        self._users: WeakSet[StubEvents] = WeakSet()
        # GPUs that are decided or being tested.
        self._shared: dict[str, bool] = {}
        self._checks = TaskSet()

    def join(self, user: StubEvents) -> None:
        """Register a stub on a GPU and configure it."""
        self._users.add(user)
        user.share(self._is_shared(user.uuid))

    def _is_shared(self, uuid: str) -> bool:
        return self._shared.get(uuid, self._mode == "share")

    def need(self, uuid: str) -> None:
        """Start the test of a GPU, unless done: a stub gets memory of another stub there."""
        if self._mode == "auto" and uuid not in self._shared:
            self._shared[uuid] = False
            self._checks.start(self._try(uuid))

    async def _try(self, uuid: str) -> None:
        pause = _FIRST_PAUSE
        while not (check := await _check(uuid)).tried:
            if pause == _FIRST_PAUSE:
                self._refuse(uuid, f"{check.events.reason}; the test will be repeated")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        for ability in (check.events, check.lost_events):
            if not ability.works:
                self._refuse(uuid, ability.reason)
                return
        self._decide(uuid, True)

    def _refuse(self, uuid: str, reason: str) -> None:
        _logger.warning(
            "models on GPU %s wait for their GPU work before they send tensors to each other: %s",
            uuid,
            reason,
        )
        self._decide(uuid, False)

    def _decide(self, uuid: str, shared: bool) -> None:
        self._shared[uuid] = shared
        for user in tuple(self._users):
            if user.uuid == uuid:
                user.share(shared)

    def await_release(self, arena: DeviceRegion, numbers: Collection[int], reason: str) -> None:
        """Kill, after a delay, the stubs whose streams still wait for events of a stub that has ended.

        The events were recorded just now. ``reason``: the error text that names the ended stub.
        """
        # No reference to the arena: its memory is not kept for the delay.
        ended = frozenset(event_name(arena.region, number) for number in numbers)
        since = time.monotonic_ns()
        asyncio.get_running_loop().call_later(
            self._seconds, self._end_waiting, arena.uuid, ended, since, reason
        )

    def _end_waiting(self, uuid: str, ended: frozenset[int], since: int, reason: str) -> None:
        """Kill waiting stubs, then stubs that wait for those."""
        users = {user for user in self._users if user.uuid == uuid}
        while waiting := {user for user in users if user.waits_for(ended, since) is not False}:
            users -= waiting
            if self._is_shared(uuid) and any(user.waits_for(ended, since) for user in waiting):
                self._refuse(
                    uuid,
                    "the driver did not release streams that waited for a process that has ended",
                )
            ended = ended.union(*(user.unfinished() for user in waiting))
            for user in waiting:
                user.kill(
                    f"was killed: {self._seconds:g} s later, its GPU work still waited for another "
                    f"process (device-lost-event-seconds). {reason}"
                )

    def families(self) -> list[Family]:
        """Return the metric of event sharing by GPU."""
        family = Family(
            "gpubridge_device_events_used",
            "Whether GPU work waits for events of other models (1), or models wait before they send (0)",
            "gauge",
        )
        for uuid in {user.uuid for user in self._users}:
            family.add({"gpu_uuid": uuid}, int(self._is_shared(uuid)))
        return [family]

    async def close(self) -> None:
        """Cancel running tests."""
        await self._checks.cancel()


async def _check(uuid: str) -> DeviceCheck:
    """Test a GPU in other processes, which end with the task."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *check_command(uuid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
    except OSError as error:
        return no_check(f"the test could not start: {error}")
    try:
        out, err = await asyncio.wait_for(process.communicate(), _CHECK_SECONDS)
    except asyncio.TimeoutError:
        return no_check(f"the test did not end within {_CHECK_SECONDS:g} s")
    finally:
        if process.returncode is None:
            end_check(process.pid)
            await process.wait()
    return read_check(out.decode(), err.decode(errors="replace"), process.returncode)
