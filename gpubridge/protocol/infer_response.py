"""Encoding of v2 inference responses over HTTP: a JSON header, and the binary outputs, not copied."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import orjson

from gpubridge.config import ModelConfig
from gpubridge.dataplane import JsonResponseTemplate
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.protocol.response_encoding import (
    BINARY,
    JSON,
    ResponseEncoding,
    output_encoding,
    output_encodings,
    prepare_response,
    reshapes,
)
from gpubridge.request import InferResponse, LongParameters
from gpubridge.tensor.datatypes import element_count
from gpubridge.transport.signatures import Signature

_LONG_TEXT = 1 << 16
"""Bytes of JSON values above which they are not copied."""
_PLACE = b"\0"
"""Placeholder of such values, a byte that JSON does not contain."""


@dataclass(slots=True)
class EncodedResponse:
    """A response ready to be sent.

    - ``header``: the JSON, or its beginning.
    - ``texts``: the rest of a long JSON.
    - ``outputs``: the binary outputs, not copied.
    - ``header_bytes``: size of the whole JSON.
    - ``nbytes``: size of all binary outputs; -1 if there are none.
    """

    header: bytes
    texts: Sequence[bytes | memoryview]
    outputs: Sequence[bytes | memoryview]
    header_bytes: int
    nbytes: int

    @property
    def buffers(self) -> Sequence[bytes | memoryview]:
        """Return all that follows the header."""
        return [*self.texts, *self.outputs]

    @property
    def binary(self) -> bool:
        """Return whether binary data follow the JSON, which decides the content type."""
        return self.nbytes >= 0


def encode_response(
    form: RequestForm, identifier: str, response: InferResponse, config: ModelConfig, version: int
) -> EncodedResponse:
    """Encode a response as its request asked; raises BridgeError.

    ``form``: of the request; caches the template of its responses.
    """
    encoding, response, shapes = prepare_response(
        form, response, config, lambda signature: _encoding(form, signature, config, version)
    )
    buffers = response.buffers
    values: Sequence[memoryview | bytes] = buffers
    texts: list[bytes | memoryview] = []
    if not encoding.plain:
        outputs = zip(encoding.outputs, response.signature.tensors, shapes, buffers, strict=True)
        values = [
            data_to_json(spec.name, spec.datatype, element_count(shape), buffer)
            if kind == JSON
            else buffer
            for kind, spec, shape, buffer in outputs
        ]
        kinds = zip(encoding.outputs, values, strict=True)
        long = [kind == JSON and len(value) > _LONG_TEXT for kind, value in kinds]
        texts = list(compress(values, long))
        values = [_PLACE if is_long else value for is_long, value in zip(long, values, strict=True)]
        buffers = list(compress(buffers, [kind == BINARY for kind in encoding.outputs]))
    parameters = response.parameters
    rest: list[bytes | memoryview] = []
    short = b""
    if isinstance(parameters, LongParameters):
        rest = [*json_members(parameters), b"}}"]
    elif parameters:
        short = _json(parameters)
    text, nbytes = encoding.template.encode(identifier, short, shapes, values)
    # Long values and parameters are inserted as pieces, not copied.
    jsons = text.split(_PLACE)
    if rest:
        jsons[-1] = jsons[-1][:-1] + b',"parameters":{'
    header, *following = jsons
    pieces = [*chain.from_iterable(zip(texts, following, strict=True)), *rest]
    # As in Triton, a response without binary data is JSON only.
    header_bytes = len(header) + sum(map(len, pieces))
    return EncodedResponse(header, pieces, buffers, header_bytes, nbytes or -1)


def _encoding(
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> ResponseEncoding:
    names = b'"model_name":%b,"model_version":"%d"' % (orjson.dumps(config.name), version)
    openings = [
        b'{"name":%b,"datatype":"%b","shape":' % (orjson.dumps(spec.name), spec.datatype.encode())
        for spec in signature.tensors
    ]
    outputs = output_encodings(form, signature)
    plain = outputs.count(BINARY) == len(outputs) and not reshapes(config)
    datatypes = [spec.datatype for spec in signature.tensors]
    template = JsonResponseTemplate(names, openings, outputs, datatypes)
    return ResponseEncoding(signature, template, outputs, plain)


def plain_template(
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> JsonResponseTemplate | None:
    """Return the template of responses; None if outputs are classified, or may be reshaped."""
    if classes_of(form.outputs) or reshapes(config):
        return None
    template: JsonResponseTemplate = _encoding(form, signature, config, version).template
    return template


def formats_more_than(nbytes: int, form: RequestForm, response: InferResponse) -> bool:
    """Return whether encoding a response formats more than so many bytes of outputs."""
    encoding = form.encoding
    if encoding is not None and encoding.signature is response.signature and encoding.plain:
        return False
    buffers = response.buffers
    if sum(map(len, buffers)) <= nbytes:
        return False
    classes = classes_of(form.outputs)
    return nbytes < sum(
        len(buffer)
        for tensor, buffer in zip(response.signature.tensors, buffers, strict=True)
        if tensor.name in classes or output_encoding(form, tensor.name) == JSON
    )


def json_members(parameters: LongParameters) -> list[bytes | memoryview]:
    """Return the JSON members of long parameters, in pieces."""
    pieces: list[bytes | memoryview] = []
    for part in parameters.parts:
        if pieces:
            pieces.append(b",")
        pieces.append(_json(part)[1:-1] if isinstance(part, dict) else part.members)
    return pieces


def _json(parameters: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(parameters)
    except orjson.JSONEncodeError:
        # Models may set integers beyond 64 bits, and strings with lone surrogates.
        text = json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace")
