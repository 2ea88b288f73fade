"""The server's own copies between host memory and GPUs: neither on the event loop nor on the driver's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from gpubridge.cuda_ipc import Part, StagedCopies
from gpubridge.errors import BridgeError

if TYPE_CHECKING:
    from gpubridge.engine.devices.memory import DeviceMemory

_AT_ONCE = 4


class HostCopies:
    """Copies by way of pinned pieces, several requests' at once.

    ``devices``: the GPUs.

    Its methods raise BridgeError where the driver fails; nothing of the copy is under way then.
    """

    def __init__(self, devices: DeviceMemory) -> None:
        self._devices = devices
        self._staged: dict[str, StagedCopies] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def to_host(self, uuid: str, parts: Sequence[Part], keep: object) -> None:
        """Copy what is complete on a GPU; ``keep`` is held until then, whoever is cancelled."""
        await self._copy(uuid, parts, keep, to_host=True)

    async def to_device(self, uuid: str, parts: Sequence[Part], keep: object) -> None:
        """Copy to a GPU; as `to_host`."""
        await self._copy(uuid, parts, keep, to_host=False)

    async def _copy(self, uuid: str, parts: Sequence[Part], keep: object, *, to_host: bool) -> None:
        staged = self._staged.get(uuid)
        if staged is None:
            staged = await self._devices.run(partial(self._on_device, uuid))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="device-copies")
        work = partial(_work, staged, parts, keep, to_host)
        loop = asyncio.get_running_loop()
        with self._devices.noting_loss():
            # No frame that an error passes may hold the future: a cycle would keep memory.
            await loop.run_in_executor(self._threads, work)

    def _on_device(self, uuid: str) -> StagedCopies:
        staged = self._staged.get(uuid)
        if staged is None:
            (device,) = [each for each in self._devices.probe().devices if each.uuid == uuid]
            staged = self._staged[uuid] = StagedCopies(self._devices.context(device))
        return staged

    def close(self) -> None:
        """Give everything back, when no copy is under way; before the contexts go."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        staged, self._staged = self._staged, {}
        for each in staged.values():
            try:
                each.close()
            except BridgeError:
                # The context is lost, and goes with the process.
                pass


def _work(staged: StagedCopies, parts: Sequence[Part], keep: object, to_host: bool) -> None:
    del keep  # The `partial` that is being called holds it.
    (staged.to_host if to_host else staged.to_device)(parts)
