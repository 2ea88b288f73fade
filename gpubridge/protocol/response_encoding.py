"""Encoding of responses: the part that HTTP and gRPC share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.model_io import as_configured
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse
from gpubridge.transport.signatures import Shapes, Signature

# Encodings of an output, numbered as in csrc/request/response_templates.h.
ELSEWHERE, BINARY, JSON = 0, 1, 2


@dataclass(slots=True, eq=False)
class ResponseEncoding:
    """State shared by all responses with one signature to requests of one form.

    - ``template``: the compiled template.
    - ``outputs``: the encoding of each output.
    - ``plain``: whether no output is formatted or reshaped.
    """

    signature: Signature
    template: Any
    outputs: bytes
    plain: bool


def output_encodings(form: RequestForm, signature: Signature) -> bytes:
    """Return the encoding of each output."""
    return bytes([output_encoding(form, spec.name) for spec in signature.tensors])


def output_encoding(form: RequestForm, name: str) -> int:
    """Return the encoding of an output; over gRPC none is JSON."""
    if form.output_region(name) is not None:
        return ELSEWHERE
    output = None if form.outputs is None else form.outputs.get(name)
    binary = form.binary_default if output is None else output.binary
    return BINARY if binary else JSON


def reshapes(config: ModelConfig) -> bool:
    """Return whether clients may see other shapes of outputs than the model returns."""
    return any(output.reshape is not None for output in config.outputs)


def classified_bytes(response: InferResponse, classes: Mapping[str, int]) -> int:
    """Return the bytes of the outputs that are to be classified."""
    named = zip(response.signature.tensors, response.buffers, strict=True)
    return sum(len(buffer) for spec, buffer in named if spec.name in classes)


def prepare_response(
    form: RequestForm,
    response: InferResponse,
    config: ModelConfig,
    encode: Callable[[Signature], ResponseEncoding],
) -> tuple[ResponseEncoding, InferResponse, Shapes]:
    """Return the encoding, the response after classification, and the shapes that clients see.

    - ``form``: of the request; caches the encoding.
    - ``encode``: makes the encoding of a signature.
    """
    encoding: ResponseEncoding | None = form.encoding
    classes: dict[str, int] = {}
    if encoding is None or encoding.signature is not response.signature:
        classes = classes_of(form.outputs)
        if classes:
            # It needs NumPy, which the server does without until then.
            from gpubridge.protocol.classification import classified  # noqa: PLC0415

            response = classified(response, classes, config)
        encoding = encode(response.signature)
        if not classes:
            form.encoding = encoding
    if encoding.plain:
        return encoding, response, response.shapes
    shapes = tuple(
        shape if spec.name in classes else as_configured(spec.name, shape, config)
        for spec, shape in zip(response.signature.tensors, response.shapes, strict=True)
    )
    return encoding, response, shapes
