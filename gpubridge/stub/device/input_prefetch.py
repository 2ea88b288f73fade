"""Prefetch of inputs to the GPU for the next batch, while the current one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from gpubridge.cuda_ipc import CudaError
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.device.inputs import DeviceInputs
from gpubridge.stub.device.memory import StubDevice
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

_PAUSE_BATCHES = 16
"""Batches for which prefetching pauses after the arena could not hold two batches."""


class _Placed:
    """Placed inputs of a batch, and failures to place them, by the tickets of its requests."""

    __slots__ = ("failed", "tensors", "viewed")

    def __init__(self) -> None:
        self.tensors: dict[int, list[Tensor]] = {}
        self.failed: dict[int, BridgeError] = {}
        # Requests whose memory is released with the last view of it, not by a message.
        self.viewed: set[int] = set()


class InputPrefetcher(DeviceInputs):
    """Places the inputs of the current batch and of the next one.

    Applies to requests whose inputs all go from the server's host memory to the GPU; others are placed
    when they are built (`placed`).
    """

    def __init__(
        self, device: StubDevice, fall_back: Callable[..., None], borrowed: BorrowedMemory
    ) -> None:
        super().__init__(device, "device", fall_back)
        self._borrowed = borrowed
        self._now = _Placed()
        self._next = _Placed()
        self._paused = 0
        self._reported = False
        device.evict_prefetched = self._evict

    def begin_batch(self, records: Sequence[Record]) -> None:
        """Make the next batch the current one, and place what was not prefetched; see `failure`."""
        self._now, self._next = self._next, _Placed()
        for record in records:
            self._place(record, self._now, wait=True)

    def prefetch(self, records: Sequence[Record]) -> None:
        """Place the inputs of the next requests, as far as the arena has space now."""
        if self._paused:
            self._paused -= 1
            return
        for record in records:
            if not self._paused:
                self._place(record, self._next, wait=False)

    def end_batch(self) -> None:
        """Release inputs that no request of the current batch has taken."""
        self._now = _Placed()

    def take(self, ticket: int, /) -> list[Tensor] | None:  # noqa: D102
        return self._now.tensors.pop(ticket, None)

    def failure(self, ticket: int) -> BridgeError | None:
        """Return the error that kept the inputs of a current request from being placed."""
        return self._now.failed.get(ticket)

    def has_views(self, ticket: int) -> bool:
        """Return whether a request's memory is released with its last view."""
        return ticket in self._now.viewed

    def _place(self, record: Record, placed: _Placed, *, wait: bool) -> None:
        ticket = record.ticket
        if ticket in placed.tensors or ticket in placed.failed or not self._is_plain(record):
            return
        try:
            views = self._borrowed.views(record.refs)
        except MalformedMessage:
            # Reported when the request is built.
            return
        placed.viewed.add(ticket)
        tensors = [
            Tensor._received(spec.name, spec.datatype, shape, view, None)
            for spec, shape, view in zip(record.signature.tensors, record.shapes, views)
        ]
        try:
            placed.tensors[ticket] = self._uploaded(tensors, wait=wait)
        except BridgeError as error:
            # Its frames would keep the memory.
            error.__traceback__ = None
            if wait:
                placed.failed[ticket] = error
            elif error.code is ErrorCode.UNAVAILABLE:
                self._pause()
            elif not (isinstance(error, CudaError) and error.sticky):
                placed.failed[ticket] = error
            # Else the device is lost: the running batch fails, and this one is not started here.

    def _is_plain(self, record: Record) -> bool:
        if record.context.client is not None:
            return False
        size = self.device.capacity
        return any(ref[2] for ref in record.refs) and all(
            ref[2] <= size and spec[1] != "BYTES" and not self.has(ref[0])
            for spec, ref in zip(record.signature.tensors, record.refs)
        )

    def _evict(self) -> None:
        """Release prefetched inputs, whose space the model needs; they are placed in their turn."""
        if self._next.tensors:
            self._next.tensors.clear()
            self._pause()

    def _pause(self) -> None:
        self._paused = _PAUSE_BATCHES
        self._fall_back(
            "device_inputs_in_turn",
            f"inputs are not copied to the GPU ahead of their turn: the device arena of "
            f"{self.device.capacity} bytes has no space for two batches at once; raise "
            "--backend-config=python,device-arena-bytes=N",
            int(Logger.VERBOSE if self._reported else Logger.INFO),
        )
        self._reported = True
