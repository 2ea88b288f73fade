"""The events of a stub's arena: made by the server, so that they outlive the stub that records them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from gpubridge.cuda_ipc import CopyStream, CudaError, DeviceContext, SharedEvents
from gpubridge.errors import BridgeError
from gpubridge.transport.control import EVENTS

_logger = logging.getLogger(__name__)


class DriverThread(Protocol):
    """What calls the driver for the server."""

    async def run(self, work: Callable[[], Any]) -> Any:
        """Do something on the thread that calls the driver."""

    def stream(self, uuid: str) -> CopyStream:
        """Return the server's stream on a GPU, on which nothing ever waits for another process."""


class ArenaEvents:
    """The events by which a stub says when what it has handed on is complete.

    - ``shared``: owned from now on.
    - ``uuid``: the device.
    - ``instance``: whose stub records them.

    Its attributes:

    - ``handles``: those of all events, one after another.
    - ``count``: how many there are.
    """

    __slots__ = ("_instance", "_shared", "_uuid", "count", "handles")

    def __init__(self, shared: SharedEvents, uuid: str, instance: str) -> None:
        self._shared = shared
        self._uuid = uuid
        self._instance = instance
        self.handles = b"".join(shared.handles)
        self.count = len(shared.handles)

    @classmethod
    def create(cls, context: DeviceContext, instance: str) -> tuple[ArenaEvents | None, str]:
        """Make events; None, and why, where they do not cross processes. On the driver's thread."""
        try:
            shared = SharedEvents.create(context, EVENTS)
        except CudaError as error:
            if error.sticky:
                raise
            return None, error.message
        return cls(shared, context.device.uuid, instance), ""

    def done(self, number: int) -> bool:
        """Whether an event has come to pass; on the driver's thread."""
        return self._shared.done(number)

    @property
    def loss(self) -> str:
        """What is said of an event that never comes to pass."""
        return (
            f"Stub process '{self._instance}' is not healthy. It died before what it had handed on "
            "was complete on the GPU; send the request again"
        )

    async def pass_for_dead(self, thread: DriverThread, numbers: Sequence[int]) -> None:
        """Let events come to pass whose stub is dead: who waits for them goes on, with undefined data."""
        try:
            await thread.run(lambda: self._record(numbers, thread.stream(self._uuid).handle))
        except BridgeError as error:
            _logger.warning("who waits for a dead stub cannot be released: %s", error.message)

    def _record(self, numbers: Sequence[int], stream: int) -> None:
        for number in numbers:
            self._shared.record(number, stream)

    def close(self) -> None:
        """Give the events back; on the driver's thread."""
        self._shared.close()


class Releases:
    """The releases under way; they are ended before the driver's thread is."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, release: Coroutine[Any, Any, None]) -> None:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(release)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Wait for all."""
        while self._tasks:
            await asyncio.wait(self._tasks)
