"""Inputs that somebody else looks at, too: what a model is shown of them, copies or read-only views.

Models may write to their inputs, so each gets bytes of its own at first, when it looks. One that has
looked at some and written to none is shown the memory as it is from then on, read-only.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

from gpubridge.pb_utils import InferenceResponse, Tensor
from gpubridge.pb_utils.tensor import SharedTensor
from gpubridge.stub.answers import ModelIdentity
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

_LOOKS = 16
"""So many copies that a model has looked at and left as they were say that it does not write."""


class SharedInputs:
    """Makes the inputs of requests whose memory is not theirs alone.

    - ``sharing``: what the model has said of its inputs: "share" that it does not write to them.
    - ``identity``: the model; a decoupled one may write when its ``execute`` has ended, too.
    - ``watched``: whether there is something to learn from a batch when it has been executed.
    - ``read_only``: whether the model is shown the memory as it is, read-only.
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
        self._learns = not (sharing or identity.decoupled)
        self.watched = False
        self._instance = identity.instance
        self._given: list[SharedTensor] = []
        self._left_alone = 0
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
                self._given += tensors
                self.watched = True
        return tensors

    def learn(self) -> None:
        """See what the model has done to the inputs of the batch that has just been executed."""
        self.watched = False
        given, self._given = self._given, []
        for tensor in given:
            if tensor._own is None:
                continue
            if tensor._own != tensor._source:
                self._learns = False
                return
            self._left_alone += 1
        self.read_only = self._left_alone >= _LOOKS

    def note_response(self, response: Any) -> None:
        """See what a model answers to a request of such inputs: an error may say that it writes."""
        if isinstance(response, InferenceResponse) and response._error is not None:
            self._note(response._error.message())

    def note_error(self, error: BaseException) -> None:
        """A batch failed: perhaps since the model writes to its inputs after all."""
        self._given = []
        # Not its text, which the model may have made: to ask for that may fail, too.
        if isinstance(error, ValueError) and error.args and isinstance(error.args[0], str):
            self._note(error.args[0])

    def _note(self, text: str) -> None:
        if self._learns and self.read_only and "read-only" in text:
            self._learns = self.read_only = False
            self._fall_back(
                "shared_inputs_written",
                f"model '{self._instance}' writes to inputs that others look at, too, which it had not "
                "done before: it gets copies of those from now on; the parameter INPUT_SHARING "
                '"copy" says so from the start',
            )

    def take_copied(self) -> int:
        """Return how many bytes were copied since this was asked last."""
        if not self._copied:
            return 0
        with self._counting:
            copied, self._copied = self._copied, 0
        return copied

    def _copy(self, source: memoryview) -> memoryview:
        with self._counting:
            self._copied += source.nbytes
        return memoryview(bytearray(source))
