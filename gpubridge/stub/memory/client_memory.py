"""Shared memory of clients, from which inputs are read and into which outputs are written.

Views of inputs are read-only for NumPy, so that a model cannot change the client's data. A model that
fails because of that, or that keeps such a view, gets copies from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import ClientMapping, map_client_region
from gpubridge.pb_utils import Tensor
from gpubridge.stub.memory.read_only import tells_of_write
from gpubridge.tensor import strings
from gpubridge.tensor.datatypes import element_count
from gpubridge.tensor.strings import string_fault
from gpubridge.transport.control import ControlPage
from gpubridge.transport.device_events import waits_of
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice


class Target(NamedTuple):
    """Target of an output in a client's memory: a region, an offset in it, and the available bytes."""

    region: int
    offset: int
    nbytes: int


def targets_of(record: Record, kind: str = "out") -> dict[str, Target]:
    """Return the targets of outputs in client memory; "also": targets of additional copies."""
    client = record.context.client
    places = client.get(kind) if client else None
    return {name: Target(*place) for name, place in places.items()} if places else {}


def target_of(record: Record, name: str) -> Target | None:
    """Return the target of one output in client memory, or None."""
    client = record.context.client
    place = client.get("out", {}).get(name) if client else None
    return Target(*place) if place else None


class ClientMemory:
    """The clients' regions that this process has mapped.

    - ``sharing``: "share" or "copy": how the model always gets inputs; empty: views until it needs
      copies.
    - ``used``: whether a client's region was ever announced, or the stub has a GPU.
    - ``copies``: whether the model gets copies of such inputs.
    """

    def __init__(  # noqa: PLR0913  (it connects the parts that use client memory)
        self,
        borrowed: BorrowedMemory,
        control: ControlPage,
        sharing: str,
        model: str,
        instance: str,
        fall_back: Callable[[str, str], None],
        device: StubDevice | None,
    ) -> None:
        self.borrowed = borrowed
        self._control = control
        self._model = model
        self._instance = instance
        self._fall_back = fall_back
        self._mapped: dict[int, ClientMapping] = {}
        # By ticket: the `ClientMapping.starved` count of the request's regions at its start.
        self._starved: dict[int, int] = {}
        self._decided = bool(sharing)
        self._copied = 0
        self.copies = sharing == "copy"
        self.sharing = sharing
        self.device = device
        self.used = device is not None

    def announce(self, region: int, fd: int, size: int) -> None:
        """Map a region from now on; takes over ``fd``."""
        self.used = True
        mapping = map_client_region(fd, size)
        # A region that its client has shrunk stays unknown: requests that use it are refused.
        if mapping is not None:
            self._mapped[region] = mapping
            self.borrowed.add(region, mapping.memory)

    def drop(self, region: int) -> None:
        """Unmap a region; existing views keep it mapped."""
        self._mapped.pop(region, None)

    def memory(self, target: Target) -> memoryview:
        """Return the bytes of a target, writable; BridgeError where its region is not mapped."""
        mapping = self._mapped.get(target.region)
        end = target.offset + target.nbytes
        # The client may have shrunk it since.
        if mapping is None or end > mapping.size():
            raise shrunk()
        return mapping.memory[target.offset : end]

    def loss(self, record: Record) -> BridgeError | None:
        """Return the error if client memory was lost while the model used it, else None."""
        regions = _regions(record)
        if any(map(self._was_lost, regions)):
            return shrunk()
        if self._starved_most(regions) > self._starved.get(record.ticket, 0):
            return unavailable(
                "no memory is left in /dev/shm for a part of the client's shared memory region that "
                "was touched: enlarge it (docker run --shm-size)"
            )
        return None

    def _was_lost(self, region: int) -> bool:
        mapping = self._mapped.get(region)
        if mapping is not None:
            return mapping.lost
        # A region in use is dropped only if it was shrunk.
        return self.device is None or self.device.regions.get(region) is None

    def _starved_most(self, regions: Sequence[int]) -> int:
        mapped = [self._mapped[region].starved for region in regions if region in self._mapped]
        return max(mapped, default=0)

    def _renew(self, record: Record) -> None:
        """Begin a request: map pages anew that hold zeros because of earlier shortage."""
        regions = _regions(record)
        # Counted before renewing: later shortage affects this request.
        self._starved[record.ticket] = self._starved_most(regions)
        for region in regions:
            mapping = self._mapped.get(region)
            if mapping is not None:
                mapping.renew()

    def refusal(self, record: Record) -> BridgeError | None:
        """Return the error of a request whose memory is not available or not valid, else None."""
        try:
            if self.device is not None and len(self.device.regions):
                self._wait_for_device(self.device, record)
            if record.context.client is not None:
                self._renew(record)
                self._check(record, record.context.client)
        except BridgeError as error:
            return error
        return None

    @staticmethod
    def _wait_for_device(device: StubDevice, record: Record) -> None:
        """Wait until the device regions that a request uses are open."""
        targets = (*targets_of(record).values(), *targets_of(record, "also").values())
        waits = [wait[0] for wait in waits_of(record.context) or () if wait is not None]
        try:
            device.regions.wait_for([ref[0] for ref in record.refs])
            device.regions.wait_for([target.region for target in targets])
            device.regions.wait_for(waits)
        except BridgeError as error:
            device.note_error(error)
            raise

    def _check(self, record: Record, client: Mapping[str, Any]) -> None:
        """Check that a request's client memory still has the declared size; raises BridgeError."""
        for target in (*targets_of(record).values(), *targets_of(record, "also").values()):
            if not self._on_device(target):
                self.memory(target)
        for index in client["in"]:
            region, offset, nbytes, _ = record.refs[index]
            if self._on_device(Target(region, offset, nbytes)):
                continue
            memory = self.memory(Target(region, offset, nbytes))
            if record.signature.tensors[index].datatype == "BYTES":
                self._check_strings(record, index, memory)

    def _on_device(self, target: Target) -> bool:
        opened = None if self.device is None else self.device.regions.get(target.region)
        return opened is not None and target.offset + target.nbytes <= opened.size

    def _check_strings(self, record: Record, index: int, memory: memoryview) -> None:
        count = element_count(record.shapes[index])
        try:
            strings.validate(memory, count)
        except BridgeError as error:
            name = record.signature.tensors[index].name
            text = string_fault(record.identifier, name, self._model, memory, count)
            raise invalid(text) from error

    def protect(self, inputs: Sequence[Tensor], client: Mapping[str, Any]) -> None:
        """Replace inputs in client memory by read-only views or copies."""
        for index in client["in"]:
            tensor = inputs[index]
            # Never passed by reference to other models: their calls may outlive the client's request.
            tensor._place = None
            data = tensor._device_bytes
            if data is not None and self.copies and self.device is not None:
                tensor._device_bytes = self.device.copy_on_device(data)
            view = tensor._source
            if view is None or view.readonly:
                continue
            if self.copies:
                tensor._source = memoryview(bytearray(view))
                self._copied += len(view)
            else:
                tensor._source = view.toreadonly()

    def settle(self) -> None:
        """Free device memory that all streams have finished with."""
        if self.device is not None:
            self.device.reclaim()

    def take_copied(self) -> int:
        """Return the bytes of inputs copied since the last call."""
        copied, self._copied = self._copied, 0
        return copied

    def note_error(self, error: BaseException) -> None:
        """Check a batch's exception for a lost GPU."""
        if self.device is not None:
            self.device.note_error(error)
            self.device.check()

    def refused(self, outcome: BaseException | Sequence[Any]) -> bool:
        """Return whether a batch failed because its model wrote to read-only inputs.

        The model gets copies from now on. ``outcome``: an exception, or the responses.
        """
        if self._decided or not self.used or not tells_of_write(outcome):
            return False
        self._switch("client_inputs_written", "writes into its inputs")
        return True

    def note_kept(self, record: Record) -> None:
        """Check an answered request: if its inputs are still lent, the model keeps them."""
        client = record.context.client
        if self._decided or client is None or not self._control.lent[record.ticket]:
            return
        if self.device is not None:
            self.device.reclaim()
            if self.device.busy:
                # Streams may still use memory that the model has released.
                return
        if self._control.lent[record.ticket] and client["in"]:
            self._switch("client_inputs_kept", "keeps inputs beyond their request")

    def _switch(self, reason: str, what: str) -> None:
        self.copies = self._decided = True
        self._fall_back(
            reason,
            f"model '{self._instance}' {what}: it gets copies of inputs in clients' shared memory "
            'from now on; the parameter INPUT_SHARING "copy" says so from the start',
        )


def _regions(record: Record) -> list[int]:
    """Return the clients' regions that a request uses."""
    client = record.context.client
    if client is None:
        return []
    regions = [record.refs[index][0] for index in client["in"]]
    for kind in ("out", "also"):
        regions += [place[0] for place in client.get(kind, {}).values()]
    return regions


def shrunk() -> BridgeError:
    """Return the error of a request whose client has shrunk its memory."""
    return invalid(
        "the client's shared memory region cannot be mapped: it has been shrunk; register it again"
    )
