"""What a call says besides its tensors' bytes, encoded: most calls of a model repeat it."""

from __future__ import annotations

import json
from typing import Any

from gpubridge.pb_utils import InferenceRequest
from gpubridge.pb_utils.preferred_memory import MemoryType
from gpubridge.transport.signatures import encode_dims, encode_signature

__all__ = ["CallForms"]

_KEPT = 512


class CallForms:
    """Encodes calls; remembers what it encoded, bounded. Any thread may use it."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}

    def encode(self, request: InferenceRequest, decoupled: bool) -> tuple[bytes, bytes, bytes]:
        """Return the signature, the dims and the extras of a call."""
        tensors = [(t._name, t._datatype, len(t._shape)) for t in request._inputs]
        dims = encode_dims([t._shape for t in request._inputs])
        requested = tuple(request._requested_output_names)
        # Of what is copied for the call nobody else has a view.
        handed_on = False
        for tensor in request._inputs:
            if tensor._place is not None or tensor._device_bytes is not None:
                handed_on = True
        plain = not (
            request._correlation_id
            or request._flags
            or request._timeout
            or request._trace._identifier
            or request._parameters != "{}"
            or request._preferred_memory is not None
        )
        if not plain:
            extras = _extras(request, decoupled, handed_on)
            return encode_signature(tensors, requested), dims, extras
        key = request._model_name, request._model_version, decoupled, handed_on, requested, *tensors
        known = self._known.get(key)
        if known is None:
            known = encode_signature(tensors, requested), _extras(request, decoupled, handed_on)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known
        return known[0], dims, known[1]


def _extras(request: InferenceRequest, decoupled: bool, handed_on: bool) -> bytes:
    extras: dict[str, Any] = {
        "model": request._model_name,
        "version": request._model_version,
        "decoupled": decoupled,
    }
    if handed_on:
        extras["handed_on"] = True
    preferred = request._preferred_memory
    if preferred is not None and preferred._memory_type is MemoryType.TRITONSERVER_MEMORY_CPU:
        extras["host_outputs"] = True
    if request._correlation_id:
        extras["correlation_id"] = request._correlation_id
    if request._flags:
        extras["flags"] = request._flags
    if request._timeout:
        extras["timeout"] = request._timeout
    if request._trace._identifier:
        extras["trace"] = request._trace._identifier
    if request._parameters != "{}":
        # As the called model reads it; Triton writes no blanks there.
        compact = json.dumps(json.loads(request._parameters), separators=(",", ":"))
        extras["parameters"] = compact
    return json.dumps(extras).encode()
