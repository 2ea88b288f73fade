"""By what device memory crosses to stubs: legacy handles where they are opened, else file descriptors.

Whether a handle is opened only another process can find out. So the first stub on a GPU is offered an
arena by handle; if it cannot open that, it says so and is offered another, and what it has said holds
for all memory of that GPU from then on.
"""

from __future__ import annotations

import logging

from gpubridge.config.python_backend import DeviceMemoryHandles
from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["MemorySharing"]

_logger = logging.getLogger(__name__)

_NAMES = {False: "legacy IPC handles", True: "VMM file descriptors"}


class MemorySharing:
    """Allocates device memory that stubs can open.

    Parameters
    ----------
    handles : {"auto", "legacy", "fd"}
        What may be tried.
    """

    def __init__(self, handles: DeviceMemoryHandles) -> None:
        self._ways = {"auto": (False, True), "legacy": (False,), "fd": (True,)}[handles]
        # By the GPU, and whether by descriptors: why it does not work.
        self._refusals: dict[tuple[str, bool], str] = {}
        self._said: set[tuple[str, bool]] = set()

    def allocate(self, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes by the first way that nobody has refused.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left, INTERNAL when its context is lost.
        BridgeError
            UNSUPPORTED when memory of this GPU cannot be shared; says why.
        """
        uuid = context.device.uuid
        for by_fd in self._ways:
            if (uuid, by_fd) in self._refusals:
                continue
            try:
                segment = DeviceSegment.allocate(context, region, size, by_fd=by_fd)
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                self.refused(uuid, by_fd, error.message)
            else:
                self._say(uuid, by_fd)
                return segment
        reasons = (f"no {_NAMES[by_fd]}: {self._refusals[uuid, by_fd]}" for by_fd in self._ways)
        raise BridgeError(
            f"memory of GPU {uuid} does not cross processes: {'; '.join(reasons)}",
            ErrorCode.UNSUPPORTED,
        )

    def refused(self, uuid: str, by_fd: bool, reason: str) -> None:
        """Memory of a GPU that is shared in this way cannot be opened, or not be made."""
        self._refusals.setdefault((uuid, by_fd), reason)

    def _say(self, uuid: str, by_fd: bool) -> None:
        if (uuid, by_fd) in self._said:
            return
        self._said.add((uuid, by_fd))
        refusal = self._refusals.get((uuid, not by_fd))
        why = f", since {_NAMES[not by_fd]} are refused: {refusal}" if refusal else ""
        _logger.info("memory of GPU %s crosses processes by %s%s", uuid, _NAMES[by_fd], why)
