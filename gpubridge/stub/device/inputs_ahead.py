"""Inputs that are copied to the GPU before their batch's turn, while the one before it runs."""

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
"""Batches for which nothing is placed ahead, after the arena had no room for two batches."""


class _Placed:
    """Inputs placed for a batch, and failures to place them, by the tickets of its requests."""

    __slots__ = ("failed", "looked_at", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[int, list[Tensor]] = {}
        self.failed: dict[int, BridgeError] = {}
        # Their memory goes back with the last view of it, and not by a word of ours.
        self.looked_at: set[int] = set()


class InputsAhead(DeviceInputs):
    """Places the inputs of two batches: of the one whose turn it is, and of the one after it.

    Only requests whose inputs all come from the server's memory on the host and go to the GPU; the
    others are placed when they are built (`placed`).
    """

    def __init__(
        self, device: StubDevice, fall_back: Callable[..., None], borrowed: BorrowedMemory
    ) -> None:
        super().__init__(device, "device", fall_back)
        self._borrowed = borrowed
        self._now = _Placed()
        self._next = _Placed()
        self._paused = 0
        self._crowded = False
        device.make_room = self._withdraw

    def begin(self, records: Sequence[Record]) -> None:
        """It is the turn of these requests: place what is not placed yet; what fails is told by `failure`."""
        self._now, self._next = self._next, _Placed()
        for record in records:
            self._place(record, self._now, patient=True)

    def look_ahead(self, records: Sequence[Record]) -> None:
        """Place the inputs of the requests that are next, as far as there is room for them now."""
        if self._paused:
            self._paused -= 1
            return
        for record in records:
            if not self._paused:
                self._place(record, self._next, patient=False)

    def end(self) -> None:
        """Let go of what no request of this turn has taken."""
        self._now = _Placed()

    def taken(self, ticket: int, /) -> list[Tensor] | None:  # noqa: D102
        return self._now.tensors.pop(ticket, None)

    def failure(self, ticket: int) -> BridgeError | None:
        """Say why the inputs of a request of this turn could not be placed."""
        return self._now.failed.get(ticket)

    def has_looked_at(self, ticket: int) -> bool:
        """Return whether a request's memory goes back with its last view."""
        return ticket in self._now.looked_at

    def _place(self, record: Record, placed: _Placed, *, patient: bool) -> None:
        ticket = record.ticket
        if ticket in placed.tensors or ticket in placed.failed or not self._is_plain(record):
            return
        try:
            views = self._borrowed.views(record.refs)
        except MalformedMessage:
            # It is told of when the request is built.
            return
        placed.looked_at.add(ticket)
        tensors = [
            Tensor._received(spec.name, spec.datatype, shape, view, None)
            for spec, shape, view in zip(record.signature.tensors, record.shapes, views)
        ]
        try:
            placed.tensors[ticket] = self._uploaded(tensors, patient=patient)
        except BridgeError as error:
            # Its frames hold the memory.
            error.__traceback__ = None
            if patient:
                placed.failed[ticket] = error
            elif error.code is ErrorCode.UNAVAILABLE:
                self._pause()
            elif not (isinstance(error, CudaError) and error.sticky):
                placed.failed[ticket] = error
            # Else the device is lost: that fails what runs, and this is not started here any more.

    def _is_plain(self, record: Record) -> bool:
        if record.context.client is not None:
            return False
        size = self.device.capacity
        return any(ref[2] for ref in record.refs) and all(
            ref[2] <= size and spec[1] != "BYTES" and not self.has(ref[0])
            for spec, ref in zip(record.signature.tensors, record.refs)
        )

    def _withdraw(self) -> None:
        """Give up what was placed ahead: the model needs the room now. It is placed at its turn."""
        if self._next.tensors:
            self._next.tensors.clear()
            self._pause()

    def _pause(self) -> None:
        self._paused = _PAUSE_BATCHES
        self._fall_back(
            "device_inputs_in_turn",
            f"inputs are not copied to the GPU ahead of their turn: the device arena of "
            f"{self.device.capacity} bytes has no room for two batches at once; raise "
            "--backend-config=python,device-arena-bytes=N",
            int(Logger.VERBOSE if self._crowded else Logger.INFO),
        )
        self._crowded = True
