"""What a response consists of, in Python: the compiled module has the same as a C type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils.arguments import json_parameters, sequence, wrong_type
from gpubridge.pb_utils.exceptions import TritonError, TritonModelException
from gpubridge.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ResponseFields"]

_NO_TENSORS: Any = ()


class ResponseFields:
    """The fields of a response; :class:`~gpubridge.pb_utils.InferenceResponse` says what they are."""

    __slots__ = ("_by_name", "_error", "_parameters", "_tensors")

    _by_name: tuple[list[Tensor], dict[str, Tensor]]
    _error: TritonError | None
    _parameters: str
    _tensors: list[Tensor]

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = _NO_TENSORS,
        error: TritonError | None = None,
        parameters: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        tensors = sequence(output_tensors, "output_tensors")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                _refuse_element(tensor)
        if error is not None and not isinstance(error, TritonError):
            raise wrong_type("error", "TritonError", error)
        self._tensors = tensors
        self._error = error
        self._parameters = "{}" if parameters is None else json_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Give the output tensors as a new list."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Tell whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | Any:
        """Give the error, or None; typed as "or Any", since models ask ``has_error()`` before."""
        return self._error

    def parameters(self) -> str:
        """Give the parameters as JSON text."""
        return self._parameters


def _refuse_element(element: object) -> None:
    if element is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    raise wrong_type("an element of output_tensors", "Tensor", element)
