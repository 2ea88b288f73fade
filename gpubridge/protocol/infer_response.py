"""A model's answer as a v2 response: a JSON header, and the binary outputs as they lie in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from gpubridge.config import ModelConfig
from gpubridge.model_io import as_configured
from gpubridge.protocol.classification import classified
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.signatures import Shapes, Signature, TensorSpec

__all__ = ["EncodedResponse", "encode_response", "formats_more_than"]


@dataclass(slots=True)
class EncodedResponse:
    """A response ready to be sent.

    Attributes
    ----------
    header : bytes
        The JSON.
    buffers : list of memoryview
        The binary outputs that follow it, not copied.
    nbytes : int
        Bytes of all of them; -1 where nothing follows the JSON.
    """

    header: bytes
    buffers: list[memoryview]
    nbytes: int

    @property
    def binary(self) -> bool:
        """Whether any output's bytes follow the JSON, which decides the content type."""
        return self.nbytes >= 0


@dataclass(slots=True, eq=False)
class _AnswerForm:
    """What all answers of a signature to requests of a form have in common.

    Attributes
    ----------
    outputs : list of _Output
        What is said of each, in order.
    fixed : bool
        Whether the shapes alone decide the header of an answer without parameters.
    shapes, header, nbytes
        The last such answer: mostly the next is told by the same bytes.
    """

    outputs: list[_Output]
    fixed: bool
    shapes: Shapes | None = None
    header: bytes = b""
    nbytes: int = 0


class _Output(NamedTuple):
    """One output: its JSON up to the shape, and how its data are told."""

    spec: TensorSpec
    opening: bytes
    elsewhere: bool
    binary: bool


def encode_response(
    form: RequestForm, response: InferResponse, config: ModelConfig, version: int
) -> EncodedResponse:
    """Encode an answer in the form that its request asked for.

    Raises
    ------
    BridgeError
        When an output cannot be told as JSON.
    """
    classes = classes_of(form.outputs)
    if classes:
        response = classified(response, classes, config)
        answer = _answer_form(form, response.signature)
    elif form.answer_for is response.signature:
        answer = form.answer
    else:
        answer = _answer_form(form, response.signature)
        form.answer_for, form.answer = response.signature, answer
    plain = answer.fixed and response.parameters is None
    if plain and answer.shapes == response.shapes:
        # The same request was answered in the same shapes before: only the data differ.
        return EncodedResponse(answer.header, response.buffers, answer.nbytes)
    outputs = []
    buffers = []
    parts = zip(answer.outputs, response.shapes, response.buffers, strict=True)
    for output, returned, buffer in parts:
        name = output.spec.name
        shape = returned if name in classes else as_configured(name, returned, config)
        outputs.append(output.opening + orjson.dumps(shape) + _data(output, shape, buffer))
        if output.binary:
            buffers.append(buffer)
    header = _document(form.identifier, config.name, version, response.parameters, outputs)
    # Without a byte after it, the JSON is the whole answer: so it is at Triton.
    nbytes = sum(map(len, buffers)) or -1
    if plain:
        answer.shapes, answer.header, answer.nbytes = response.shapes, header, nbytes
    return EncodedResponse(header, buffers, nbytes)


def _answer_form(form: RequestForm, signature: Signature) -> _AnswerForm:
    outputs = []
    fixed = not classes_of(form.outputs)
    for spec in signature.tensors:
        elsewhere = form.output_region(spec.name) is not None
        binary = not elsewhere and _wants_binary(form, spec.name)
        opening = b'{"name":%b,"datatype":"%b","shape":' % (
            orjson.dumps(spec.name),
            spec.datatype.encode(),
        )
        outputs.append(_Output(spec, opening, elsewhere, binary))
        fixed = fixed and (elsewhere or (binary and spec.itemsize is not None))
    return _AnswerForm(outputs, fixed)


def formats_more_than(nbytes: int, form: RequestForm, response: InferResponse) -> bool:
    """Tell whether more than so many bytes of outputs have to be looked at to encode an answer."""
    buffers = response.buffers
    if sum(map(len, buffers)) <= nbytes:
        return False
    return nbytes < sum(
        len(buffer)
        for tensor, buffer in zip(response.signature.tensors, buffers, strict=True)
        if not _wants_binary(form, tensor.name) and form.output_region(tensor.name) is None
    )


def _wants_binary(form: RequestForm, name: str) -> bool:
    if form.outputs is not None:
        output = form.outputs.get(name)
        if output is not None:
            return output.binary
    return form.binary_default


def _data(output: _Output, shape: tuple[int, ...], buffer: memoryview) -> bytes:
    """Return what follows the shape of an output, up to its end."""
    if output.elsewhere:
        return b"}"
    if output.binary:
        return b',"parameters":{"binary_data_size":%d}}' % len(buffer)
    name, datatype = output.spec.name, output.spec.datatype
    return b',"data":%b}' % data_to_json(name, datatype, element_count(shape), buffer)


def _document(
    identifier: str,
    model: str,
    version: int,
    parameters: dict[str, object] | None,
    outputs: list[bytes],
) -> bytes:
    """Join the parts in Triton's order of keys; outputs are JSON already."""
    parts = []
    if identifier:
        parts.append(b'"id":' + orjson.dumps(identifier))
    parts.append(b'"model_name":' + orjson.dumps(model))
    parts.append(b'"model_version":"%d"' % version)
    if parameters:
        parts.append(b'"parameters":' + _parameters(parameters))
    parts.append(b'"outputs":[' + b",".join(outputs) + b"]")
    return b"{" + b",".join(parts) + b"}"


def _parameters(parameters: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(parameters)
    except orjson.JSONEncodeError:
        # A model may set integers beyond 64 bits, and strings with lone surrogates: no Unicode text.
        text = json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace")
