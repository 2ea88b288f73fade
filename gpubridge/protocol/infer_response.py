"""A model's answer as a v2 response: a JSON header, and the binary outputs as they lie in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass

import orjson

from gpubridge.config import ModelConfig
from gpubridge.model_io import as_configured
from gpubridge.protocol.classification import classified
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.signatures import TensorSpec

__all__ = ["EncodedResponse", "encode_response"]


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


def encode_response(
    form: RequestForm, response: InferResponse, config: ModelConfig, version: int
) -> EncodedResponse:
    """Encode an answer in the form that its request asked for.

    Raises
    ------
    BridgeError
        When an output cannot be told as JSON.
    """
    signature = response.signature
    if response.parameters is None and form.answer_for is signature:
        # The same request was answered in the same form before: only the data differ.
        header, nbytes = form.answer
        return EncodedResponse(header, response.buffers, nbytes)
    classes = classes_of(form.outputs)
    if classes:
        response = classified(response, classes, config)
        signature = response.signature
    outputs = []
    buffers = []
    constant = response.parameters is None
    any_binary = False
    for tensor, buffer in zip(signature.tensors, response.buffers, strict=True):
        spec = tensor if tensor.name in classes else as_configured(tensor, config)
        if form.output_region(spec.name) is not None:
            outputs.append(_output_elsewhere(spec))
        elif _wants_binary(form, spec.name):
            any_binary = True
            outputs.append(_binary_output(spec, len(buffer)))
            buffers.append(buffer)
            constant = constant and spec.nbytes is not None
        else:
            outputs.append(_json_output(spec, buffer))
            constant = False
    header = _document(form.identifier, config.name, version, response.parameters, outputs)
    # Without a byte after it, the JSON is the whole answer: so it is at Triton.
    nbytes = sum(map(len, buffers)) or -1
    if constant and (any_binary or form.shared):
        form.answer_for = signature
        form.answer = header, nbytes
    return EncodedResponse(header, buffers, nbytes)


def _wants_binary(form: RequestForm, name: str) -> bool:
    if form.outputs is not None:
        output = form.outputs.get(name)
        if output is not None:
            return output.binary
    return form.binary_default


def _output_elsewhere(spec: TensorSpec) -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":%b}' % (
        orjson.dumps(spec.name),
        spec.datatype.encode(),
        orjson.dumps(spec.shape),
    )


def _binary_output(spec: TensorSpec, nbytes: int) -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":%b,"parameters":{"binary_data_size":%d}}' % (
        orjson.dumps(spec.name),
        spec.datatype.encode(),
        orjson.dumps(spec.shape),
        nbytes,
    )


def _json_output(spec: TensorSpec, buffer: memoryview) -> bytes:
    data = data_to_json(spec.name, spec.datatype, element_count(spec.shape), buffer)
    return b'{"name":%b,"datatype":"%b","shape":%b,"data":%b}' % (
        orjson.dumps(spec.name),
        spec.datatype.encode(),
        orjson.dumps(spec.shape),
        data,
    )


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
