"""Inputs of requests: views of borrowed memory, or copies where the model may write or keeps them.

Inputs that several models use are copies, or read-only views.

Models may write to their inputs, so a model at first gets a copy of each shared input that it reads.
Once it has read some without writing to any, it gets read-only views of the shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.tensor import SharedTensor
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.memory.client_memory import ClientMemory
from gpubridge.stub.memory.read_only import tells_of_write
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.stub.response_encoder import ModelIdentity
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.context import RequestContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.stub.device.inputs import DeviceInputs

_UNCHANGED_COPIES = 16
"""A model that has left this many copies unchanged is assumed not to write to its inputs."""


class SharedInputs:
    """Makes the inputs of requests whose memory is shared.

    - ``sharing``: the model's parameter INPUT_SHARING; "share": it does not write to inputs.
    - ``identity``: the model; one that is decoupled or has coroutines may write after its ``execute``, too.
    - ``watched``: whether copies of the current batch are to be compared after ``execute``.
    - ``read_only``: whether the model gets read-only views.
    """

    def __init__(
        self,
        borrowed: BorrowedMemory,
        sharing: str,
        identity: ModelIdentity,
        fall_back: Callable[[str, str], None],
    ) -> None:
        self._borrowed = borrowed
        self._fall_back = fall_back
        self.read_only = sharing == "share"
        self._learns = not (sharing or identity.decoupled or identity.overlaps)
        self.watched = False
        self._instance = identity.instance
        self._copies: list[SharedTensor] = []
        self._unchanged = 0
        self._counting = threading.Lock()
        self._copied = 0

    def tensors(self, record: Record) -> list[Any]:
        """Return the inputs of a request, as `BorrowedMemory.tensors` does."""
        kind = Tensor if self.read_only else SharedTensor
        tensors = self._borrowed.tensors(
            record.refs, record.signature.tensors, record.shapes, kind, True, True
        )
        if not self.read_only:
            for tensor in tensors:
                tensor._belongs_to(self._copy)
            if self._learns:
                self._copies += tensors
                self.watched = True
        return tensors

    def learn(self) -> None:
        """Compare the copies of the batch that was just executed with the originals."""
        self.watched = False
        given, self._copies = self._copies, []
        for tensor in given:
            if tensor._own is None:
                continue
            if tensor._own != tensor._source:
                self._learns = False
                return
            self._unchanged += 1
        self.read_only = self._unchanged >= _UNCHANGED_COPIES

    def forget(self) -> None:
        """Forget the copies of a batch that failed."""
        self.watched = False
        self._copies = []

    def refused(self, outcome: BaseException | Sequence[Any]) -> bool:
        """Return whether a batch failed because its model wrote to read-only inputs.

        The model gets copies from now on. ``outcome``: an exception, or the responses.
        """
        if not (self._learns and self.read_only and tells_of_write(outcome)):
            return False
        self._learns = self.read_only = False
        self._fall_back(
            "shared_inputs_written",
            f"model '{self._instance}' writes to shared inputs, which it had not done before: it gets "
            'copies of them from now on; the parameter INPUT_SHARING "copy" has it get copies '
            "from the start",
        )
        return True

    def take_copied(self) -> int:
        """Return the bytes copied since the last call."""
        if not self._copied:
            return 0
        with self._counting:
            copied, self._copied = self._copied, 0
        return copied

    def _copy(self, source: memoryview) -> memoryview:
        with self._counting:
            self._copied += source.nbytes
        return memoryview(bytearray(source))


class RequestInputs:
    """Makes the input tensors of requests; ``shared`` makes those that others use as well."""

    def __init__(
        self,
        identity: ModelIdentity,
        clients: ClientMemory,
        states: SequenceStates | None,
        device: DeviceInputs | None,
        fall_back: Callable[[str, str], None],
    ) -> None:
        self._identity = identity
        self._clients = clients
        self._borrowed = clients.borrowed
        self._states = states
        self._device = device
        self._fall_back = fall_back
        self.shared = SharedInputs(self._borrowed, clients.sharing, identity, fall_back)
        self._held: list[Sequence[memoryview]] = []
        self._keeps_many = False
        self._warned = False
        self._copied = 0

    def begin_batch(self) -> None:
        """Check whether the model keeps so many inputs that it gets copies in this batch."""
        book = self._borrowed.book
        self._keeps_many = book.held > LIMITS.kept_leases or book.held_bytes > LIMITS.kept_bytes

    def of(self, record: Record) -> list[Any]:
        """Return the inputs of a request, with its control and state inputs."""
        context: RequestContext = record.context
        device = self._device
        inputs = None if device is None else device.take(record.ticket)
        if inputs is None:
            # A rescheduled request gets its original inputs again: the model may write only to copies.
            if self._keeps_many or self._identity.iterative:
                inputs = self._copies(record)
            elif context.shared:
                inputs = self.shared.tensors(record)
            else:
                inputs = self._borrowed.tensors(
                    record.refs, record.signature.tensors, record.shapes, Tensor
                )
            if device is not None:
                inputs = device.placed(inputs, record, private=self._identity.iterative)
        if context.client is not None:
            self._clients.protect(inputs, context.client)
        if context.controls is not None:
            inputs += [control_input(*control) for control in context.controls]
        if self._states is not None:
            inputs += self._states.inputs(context.state)
        return inputs

    def hold(self, record: Record) -> None:
        """Keep the memory of a request's inputs lent, until `let_go`."""
        self._held.append(self._borrowed.views(record.refs))

    def let_go(self) -> None:
        """Keep no memory any more that `hold` keeps."""
        self._held = []

    def take_copied(self) -> int:
        """Return the bytes copied since the last call."""
        copied, self._copied = self._copied, 0
        return copied + self.shared.take_copied()

    def _copies(self, record: Record) -> list[Tensor]:
        """Return copies of the inputs; inputs on a device are not copied."""
        if self._keeps_many and not self._warned:
            self._warned = True
            self._fall_back(
                "inputs_kept",
                f"model '{self._identity.instance}' keeps more than {LIMITS.kept_leases} inputs or "
                f"{LIMITS.kept_bytes} bytes of them, so that the server would run out of memory to "
                "lend: it gets copies from now on while it does",
            )
        tensors = self._borrowed.tensors(
            record.refs, record.signature.tensors, record.shapes, Tensor, False
        )
        for tensor, ref in zip(tensors, record.refs):
            if self._device is None or not self._device.has(ref[0]):
                self._copied += ref[2]
                tensor._source = memoryview(bytearray(tensor._source))
        return tensors


def control_input(name: str, datatype: str, shape: Sequence[int], value: Any) -> Tensor:
    """Make a control input: the request's position in its sequence, for example."""
    value = value.encode() if isinstance(value, str) else value
    return Tensor(name, np.full(shape, value, numpy_dtype(datatype)))
