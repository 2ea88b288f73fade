"""Finding things by name: tensors, configuration entries, the model's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.tensor.native import native

if TYPE_CHECKING:
    from gpubridge.pb_utils.request import InferenceRequest
    from gpubridge.pb_utils.response import InferenceResponse
    from gpubridge.pb_utils.tensor import Tensor

_FEW = 8
"""Of more tensors an index is made when one of them is looked up."""


# What may be None is typed as "or Any": models use it without a look, as Triton's examples do, and
# a checker still knows what it is otherwise.
def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | Any:
    """Give the request's input of that name, or None."""
    return _named(inference_request, inference_request._inputs, name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | Any:
    """Give the response's output of that name, or None."""
    return _named(inference_response, inference_response._tensors, name)


def _named(
    holder: InferenceRequest | InferenceResponse, tensors: list[Tensor], name: str
) -> Tensor | None:
    if len(tensors) > _FEW and isinstance(name, str):
        index: dict[str, Tensor]
        indexed, index = getattr(holder, "_by_name", (None, {}))
        if indexed is not tensors:
            # Of two of one name, the first is found.
            index = {tensor._name: tensor for tensor in reversed(tensors)}
            holder._by_name = tensors, index
        return index.get(name)
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


if not TYPE_CHECKING:
    _compiled = native()
    if _compiled is not None:
        get_input_tensor_by_name = _compiled.input_by_name
        get_output_tensor_by_name = _compiled.output_by_name


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | Any:
    """Give the entry of an input in a parsed model configuration, or None."""
    return _entry(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | Any:
    """Give the entry of an output in a parsed model configuration, or None."""
    return _entry(model_config.get("output", ()), name)


def _entry(entries: Any, name: str) -> dict[str, Any] | None:
    for entry in entries:
        if entry["name"] == name:
            found: dict[str, Any] = entry
            return found
    return None


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Tell whether a parsed model configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """Give the directory of the model's version.

    Raises
    ------
    TritonModelException
        Outside of a server.
    """
    server = host.current()
    if server is None:
        raise TritonModelException(
            "get_model_dir() expected to run inside a gpubridge server, got no server around; in "
            "a test, replace it: monkeypatch.setattr(pb_utils, 'get_model_dir', lambda: path)"
        )
    return server.model_dir
