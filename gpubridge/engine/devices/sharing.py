"""By what device memory crosses to stubs: legacy handles where they are opened, else file descriptors.

Whether a handle is opened only another process can find out. So the first stub on a GPU is offered an
arena by handle; if it cannot open that, it says so and is offered another. All others of that GPU are
then offered that at once, and may say otherwise: what is wrong may be wrong with the one stub alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

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
        # GPUs, and whether by descriptors: what a stub could not open, so that it is tried last.
        self._doubted: set[tuple[str, bool]] = set()
        self._said: set[tuple[str, bool]] = set()

    def allocate(
        self,
        context: DeviceContext,
        region: int,
        size: int,
        refusals: Mapping[bool, str] = MappingProxyType({}),
    ) -> DeviceSegment:
        """Allocate at least ``size`` bytes by the first way that works.

        Parameters
        ----------
        refusals : mapping of bool to str
            The ways that whoever is to open it could not open already, and why: False for handles,
            True for descriptors.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left, INTERNAL when its context is lost.
        BridgeError
            UNSUPPORTED when it cannot be shared; says why.
        """
        uuid = context.device.uuid
        reasons = dict(refusals)
        for by_fd in sorted(self._ways, key=lambda way: (uuid, way) in self._doubted):
            if by_fd in refusals:
                continue
            try:
                segment = DeviceSegment.allocate(context, region, size, by_fd=by_fd)
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                reasons[by_fd] = error.message
            else:
                self._say(uuid, by_fd, reasons.get(not by_fd))
                return segment
        told = "; ".join(f"no {_NAMES[by_fd]}: {reasons[by_fd]}" for by_fd in self._ways)
        raise BridgeError(
            f"memory of GPU {uuid} does not cross processes: {told}", ErrorCode.UNSUPPORTED
        )

    def doubt(self, uuid: str, by_fd: bool) -> None:
        """A stub could not open memory of a GPU that was shared in this way."""
        self._doubted.add((uuid, by_fd))

    def _say(self, uuid: str, by_fd: bool, refusal: str | None) -> None:
        if (uuid, by_fd) in self._said:
            return
        self._said.add((uuid, by_fd))
        why = "" if refusal is None else f", since {_NAMES[not by_fd]} are refused: {refusal}"
        _logger.info("memory of GPU %s crosses processes by %s%s", uuid, _NAMES[by_fd], why)
