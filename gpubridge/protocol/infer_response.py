"""A model's answer as a v2 response: a JSON header, and the binary outputs as they lie in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import orjson

from gpubridge.config import ModelConfig
from gpubridge.dataplane import JsonResponseTemplate
from gpubridge.model_io import as_configured
from gpubridge.protocol.classification import classified
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse, LongParameters
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.signatures import Shapes, Signature, TensorSpec

# How an output is told; the numbers are those of csrc/request/response_templates.h.
_ELSEWHERE, _BINARY, _JSON = 0, 1, 2

_LONG_TEXT = 1 << 16
"""Longer JSON values are not copied."""
_PLACE = b"\0"
"""Stands for such values: JSON has no such byte."""


@dataclass(slots=True)
class EncodedResponse:
    """A response ready to be sent.

    - ``header``: the JSON, or the beginning of it.
    - ``buffers``: the rest of the JSON, if it is long, and the binary outputs; not copied.
    - ``header_bytes``: bytes of all of the JSON.
    - ``nbytes``: bytes of all outputs; -1 where nothing follows the JSON.
    """

    header: bytes
    buffers: Sequence[bytes | memoryview]
    header_bytes: int
    nbytes: int

    @property
    def binary(self) -> bool:
        """Return whether any output's bytes follow the JSON, which decides the content type."""
        return self.nbytes >= 0


@dataclass(slots=True, eq=False)
class _Answer:
    """State shared by all responses of a signature to requests of a form.

    - ``forms``: the encoding of each output.
    - ``simple``: whether all outputs are binary, with the shapes that the model gives them.
    """

    template: JsonResponseTemplate
    forms: bytes
    simple: bool


def encode_response(
    form: RequestForm, identifier: str, response: InferResponse, config: ModelConfig, version: int
) -> EncodedResponse:
    """Encode an answer in the form that its request asked for; raises BridgeError.

    ``form``: that of the request; it remembers what the answer has in common with the next.
    """
    classes: dict[str, int] = {}
    if form.answer_for is response.signature:
        answer: _Answer = form.answer
    elif classes := classes_of(form.outputs):
        response = classified(response, classes, config)
        answer = _answer(form, response.signature, config, version)
    else:
        answer = _answer(form, response.signature, config, version)
        form.answer_for, form.answer = response.signature, answer
    shapes = response.shapes
    buffers = response.buffers
    values: Sequence[memoryview | bytes] = buffers
    if not answer.simple:
        shapes = _configured_shapes(response, config, classes)
        values = [
            _json_values(*output) if told == _JSON else output[2]
            for told, output in zip(
                answer.forms,
                zip(response.signature.tensors, shapes, buffers, strict=True),
                strict=True,
            )
        ]
        buffers = [
            buffer for told, buffer in zip(answer.forms, buffers, strict=True) if told == _BINARY
        ]
    parameters = response.parameters
    rest: list[bytes | memoryview] = []
    short = b""
    if isinstance(parameters, LongParameters):
        rest = [*json_members(parameters), b"}}"]
    elif parameters:
        short = _json(parameters)
    texts: list[bytes | memoryview] = []
    if not answer.simple:
        told = zip(answer.forms, values, strict=True)
        long = [form == _JSON and len(value) > _LONG_TEXT for form, value in told]
        texts = list(compress(values, long))
        values = [_PLACE if is_long else value for is_long, value in zip(long, values, strict=True)]
    text, nbytes = answer.template.encode(identifier, short, shapes, values)
    # Between what is made here, and behind it: what is that long is not copied.
    jsons = text.split(_PLACE)
    if rest:
        jsons[-1] = jsons[-1][:-1] + b',"parameters":{'
    header, *following = jsons
    pieces = [*chain.from_iterable(zip(texts, following, strict=True)), *rest]
    # Without a byte after it, the JSON is the whole answer: so it is at Triton.
    header_bytes = len(header) + sum(map(len, pieces))
    return EncodedResponse(header, [*pieces, *buffers], header_bytes, nbytes or -1)


def _answer(form: RequestForm, signature: Signature, config: ModelConfig, version: int) -> _Answer:
    names = b'"model_name":%b,"model_version":"%d"' % (orjson.dumps(config.name), version)
    openings = [
        b'{"name":%b,"datatype":"%b","shape":' % (orjson.dumps(spec.name), spec.datatype.encode())
        for spec in signature.tensors
    ]
    forms = bytes([_told(form, spec.name) for spec in signature.tensors])
    simple = forms.count(_BINARY) == len(forms) and not any(
        output.reshape is not None for output in config.outputs
    )
    return _Answer(JsonResponseTemplate(names, openings, forms), forms, simple)


def plain_template(
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> JsonResponseTemplate | None:
    """Return what makes the header of answers of which nothing has to be formatted; else None."""
    if classes_of(form.outputs):
        return None
    answer = _answer(form, signature, config, version)
    return answer.template if answer.simple else None


def formats_more_than(nbytes: int, form: RequestForm, response: InferResponse) -> bool:
    """Tell whether more than so many bytes of outputs have to be looked at to encode an answer."""
    if form.answer_for is response.signature and form.answer.simple:
        return False
    buffers = response.buffers
    if sum(map(len, buffers)) <= nbytes:
        return False
    classes = classes_of(form.outputs)
    return nbytes < sum(
        len(buffer)
        for tensor, buffer in zip(response.signature.tensors, buffers, strict=True)
        if tensor.name in classes or _told(form, tensor.name) == _JSON
    )


def _told(form: RequestForm, name: str) -> int:
    if form.output_region(name) is not None:
        return _ELSEWHERE
    if form.outputs is not None:
        output = form.outputs.get(name)
        if output is not None:
            return _BINARY if output.binary else _JSON
    return _BINARY if form.binary_default else _JSON


def _configured_shapes(
    response: InferResponse, config: ModelConfig, classified: dict[str, int]
) -> Shapes:
    """Return the shapes that clients see; ``classified`` outputs keep theirs."""
    return tuple(
        shape if spec.name in classified else as_configured(spec.name, shape, config)
        for spec, shape in zip(response.signature.tensors, response.shapes, strict=True)
    )


def _json_values(spec: TensorSpec, shape: tuple[int, ...], buffer: memoryview) -> bytes:
    return data_to_json(spec.name, spec.datatype, element_count(shape), buffer)


def json_members(parameters: LongParameters) -> list[bytes | memoryview]:
    """Return the members of the JSON object of long parameters, in pieces."""
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
        # A model may set integers beyond 64 bits, and strings with lone surrogates: no Unicode text.
        text = json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace")
