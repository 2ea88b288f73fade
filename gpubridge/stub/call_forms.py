"""What a call says besides its tensors' bytes, encoded: most calls of a model repeat it."""

from __future__ import annotations

import json
from typing import Any

from gpubridge.pb_utils import InferenceRequest
from gpubridge.pb_utils.preferred_memory import MemoryType
from gpubridge.transport.context import CallContext, correlated
from gpubridge.transport.signatures import encode_dims, encode_signature

__all__ = ["CallForms"]

_KEPT = 512


class CallForms:
    """Encodes calls; remembers what it encoded, bounded. Any thread may use it."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[bytes, CallContext]] = {}

    def encode(
        self, request: InferenceRequest, decoupled: bool
    ) -> tuple[bytes, bytes, CallContext]:
        """Return the signature and the dims of a call, encoded, and its context."""
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
            context = _context(request, decoupled, handed_on)
            return encode_signature(tensors, requested), dims, context
        key = request._model_name, request._model_version, decoupled, handed_on, requested, *tensors
        known = self._known.get(key)
        if known is None:
            known = encode_signature(tensors, requested), _context(request, decoupled, handed_on)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known
        return known[0], dims, known[1]


def _context(request: InferenceRequest, decoupled: bool, handed_on: bool) -> CallContext:
    preferred = request._preferred_memory
    parameters = ""
    if request._parameters != "{}":
        # As the called model reads it; Triton writes no blanks there.
        parameters = json.dumps(json.loads(request._parameters), separators=(",", ":"))
    return CallContext(
        model=request._model_name,
        version=request._model_version,
        decoupled=decoupled,
        handed_on=handed_on,
        host_outputs=preferred is not None
        and preferred._memory_type is MemoryType.TRITONSERVER_MEMORY_CPU,
        **correlated(request._correlation_id or 0),
        flags=request._flags,
        timeout=request._timeout,
        parameters=parameters,
        trace=request._trace._identifier,
    )
