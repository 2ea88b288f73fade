"""The signatures of answers to models' calls, encoded: they mostly repeat."""

from __future__ import annotations

from gpubridge.transport.signatures import Signature, encode_signature

_KEPT = 1024
_encodings: dict[Signature, bytes] = {}


def encoded_signature(signature: Signature) -> bytes:
    """Return the bytes of a response's signature."""
    raw = _encodings.get(signature)
    if raw is None:
        if len(_encodings) >= _KEPT:
            _encodings.clear()
        raw = _encodings[signature] = encode_signature(
            [(spec.name, spec.datatype, spec.rank) for spec in signature.tensors]
        )
    return raw
