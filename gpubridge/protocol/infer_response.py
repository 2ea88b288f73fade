"""A model's answer as a v2 response: a JSON header, and the binary outputs as they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from gpubridge.protocol.infer_request import RequestForm
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.request import InferResponse
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.messages import TensorSpec

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
        Bytes of all of them.
    """

    header: bytes
    buffers: list[memoryview]
    nbytes: int

    @property
    def binary(self) -> bool:
        """Whether any output is binary, which decides the content type."""
        return self.nbytes >= 0


def encode_response(
    form: RequestForm, response: InferResponse, model: str, version: int
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
    outputs = []
    buffers = []
    constant = response.parameters is None
    any_binary = False
    for spec, buffer in zip(signature.tensors, response.buffers, strict=True):
        if _wants_binary(form, spec.name):
            any_binary = True
            outputs.append(_binary_output(spec, len(buffer)))
            buffers.append(buffer)
            constant = constant and spec.nbytes is not None
        else:
            outputs.append(_json_output(spec, buffer))
            constant = False
    header = _document(form.identifier, model, version, response.parameters, outputs)
    nbytes = sum(map(len, buffers)) if any_binary else -1
    if constant and any_binary:
        form.answer_for = signature
        form.answer = header, nbytes
    return EncodedResponse(header, buffers, nbytes)


def _wants_binary(form: RequestForm, name: str) -> bool:
    if form.outputs is not None:
        output = form.outputs.get(name)
        if output is not None:
            return output.binary
    return form.binary_default


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
        parts.append(b'"parameters":' + orjson.dumps(parameters))
    parts.append(b'"outputs":[' + b",".join(outputs) + b"]")
    return b"{" + b",".join(parts) + b"}"
