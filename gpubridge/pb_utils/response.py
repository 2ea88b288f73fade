"""Responses as models make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpubridge.pb_utils.response_fields import ResponseFields
from gpubridge.pb_utils.runtime import fields_type
from gpubridge.pb_utils.tensor import Tensor

__all__ = ["InferenceResponse"]

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
