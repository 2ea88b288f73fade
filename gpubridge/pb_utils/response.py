"""Responses as models make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils.arguments import json_parameters, sequence, wrong_type
from gpubridge.pb_utils.exceptions import TritonError, TritonModelException
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.tensor.native import fields_type

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


if TYPE_CHECKING:
    _Fields = ResponseFields
else:
    _Fields = fields_type(ResponseFields)


class InferenceResponse(_Fields):
    """The answer to one request: output tensors, or an error in their place.

    Parameters
    ----------
    output_tensors : list of Tensor, optional
    error : TritonError, optional
        If given, the tensors are not sent.
    parameters : dict of str to bool, int or str, optional

    Raises
    ------
    TypeError
        If an argument or an element is of another type.
    TritonModelException
        If an element is None, or a parameter of a type that has no counterpart.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    @classmethod
    def _received(cls, tensors: list[Tensor], parameters: str) -> InferenceResponse:
        """Wrap an answer that arrived; its list of tensors becomes the response's own."""
        response = object.__new__(cls)
        response._tensors = tensors
        response._error = None
        response._parameters = parameters
        return response
