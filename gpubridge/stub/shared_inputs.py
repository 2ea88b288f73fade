"""Inputs that somebody else looks at, too: the model gets bytes of its own as soon as it looks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.shared_tensor import SharedTensor
from gpubridge.transport.leases import BorrowedMemory

__all__ = ["SharedInputs"]


class SharedInputs:
    """Makes the inputs of requests whose memory is not theirs alone.

    Parameters
    ----------
    borrowed : BorrowedMemory
        Where that memory is.
    read_only : bool
        Whether the model has said that it does not write to inputs: it gets read-only views then.
    """

    def __init__(self, borrowed: BorrowedMemory, read_only: bool) -> None:
        self._borrowed = borrowed
        self._kind: type[Tensor] = Tensor if read_only else SharedTensor
        self._counting = threading.Lock()
        self._copied = 0

    def tensors(
        self, refs: Sequence[tuple[int, int, int, int]], specs: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Return the tensors at places, as `BorrowedMemory.tensors` does."""
        tensors = self._borrowed.tensors(refs, specs, self._kind, True, True)
        if self._kind is SharedTensor:
            for tensor in tensors:
                tensor._belongs_to(self._note_copied)
        return tensors

    def take_copied(self) -> int:
        """Return how many bytes were copied since this was asked last."""
        if not self._copied:
            return 0
        with self._counting:
            copied, self._copied = self._copied, 0
        return copied

    def _note_copied(self, nbytes: int) -> None:
        with self._counting:
            self._copied += nbytes
