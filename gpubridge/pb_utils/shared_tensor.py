"""Tensors that arrived in memory which another model looks at, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from gpubridge.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SharedTensor"]


class SharedTensor(Tensor):
    """An input that a caller, or another member of an ensemble, holds as well.

    What a model is shown of it is a copy: it may write there, as models do (``x *= 2``), and nobody
    else sees it. Handed on as a tensor it is what arrived, and nothing is copied.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_copy", "_own")

    _copy: Callable[[memoryview], memoryview]
    _own: memoryview | None

    def _belongs_to(self, copy: Callable[[memoryview], memoryview]) -> None:
        """Say who copies the data when the model looks at it."""
        self._own = None
        self._copy = copy

    def as_numpy(self) -> NDArray[Any]:  # noqa: D102
        array = self._array
        if array is None:
            # Strings are decoded: that is a copy already.
            source = self._source if self._datatype == "BYTES" else self._shown()
            array = self._array = self._view(source)
        return array

    def _shown(self) -> Any:
        source = self._source
        if not source:
            return self._payload()
        if self._own is None:
            self._own = self._copy(source)
        return self._own
