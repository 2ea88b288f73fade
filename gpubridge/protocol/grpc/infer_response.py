"""A model's answer as a ModelInferResponse: protobuf around the outputs as they lie in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpubridge.config import ModelConfig
from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import BridgeError
from gpubridge.model_io import as_configured
from gpubridge.protocol.classification import classified
from gpubridge.protocol.grpc.fields import varint
from gpubridge.protocol.grpc.messages import message_class
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse
from gpubridge.transport.signatures import Signature

__all__ = ["FRAME_PREFIX", "FrameSegments", "encode_frame", "encode_response"]

FrameSegments = list[bytes | memoryview]

FRAME_PREFIX = 5
"""Bytes before each gRPC message: 0 for "not compressed", and its length."""

_JOINED_UP_TO = 16384

# Tags of length-delimited fields.
_ID = b"\x1a"
_RAW_OUTPUT = b"\x32"

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)


@dataclass(slots=True, eq=False)
class _AnswerForm:
    """What is the same in all answers of a signature to requests of a form.

    Attributes
    ----------
    names, outputs : bytes
        The fields before the id and the parameters, and those behind them.
    tags : tuple of bytes or None
        What comes before each buffer; None where the sizes differ from answer to answer.
    nbytes : int
        Bytes of a message without id and parameters.
    opening : bytes
        A whole frame without id and parameters, up to the first buffer.
    """

    names: bytes
    outputs: bytes
    tags: tuple[bytes, ...] | None
    nbytes: int
    opening: bytes


def encode_frame(message: bytes) -> bytes:
    """Put the prefix before a message that gRPC sends as one frame."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)


def encode_response(
    form: RequestForm, identifier: str, response: InferResponse, config: ModelConfig, version: int
) -> FrameSegments:
    """Encode an answer as one gRPC frame, prefix included.

    Parameters
    ----------
    form : RequestForm
        That of the request; it remembers what the answer has in common with the next.
    identifier : str
        The request's id.

    Returns
    -------
    list of bytes or memoryview
        In order. One bytes object where the frame is small; else outputs are the response's
        own buffers, not copied.

    Raises
    ------
    BridgeError
        When a parameter or the size has no place in protobuf.
    """
    signature = response.signature
    buffers = response.buffers
    if form.answer_for is signature:
        answer: _AnswerForm = form.answer
    elif classes := classes_of(form.outputs):
        response = classified(response, classes, config)
        buffers = response.buffers
        answer = _answer_form(form, response.signature, config, version, classes)
    else:
        answer = _answer_form(form, signature, config, version)
        form.answer_for = signature
        form.answer = answer
    tags = answer.tags
    if tags is None:
        tags = tuple([_RAW_OUTPUT + varint(len(buffer)) for buffer in buffers])
    elif not identifier and response.parameters is None:
        return _segments(answer.opening, tags[1:], buffers, answer.nbytes)
    middle = b""
    if identifier:
        text = identifier.encode()
        middle = b"%b%b%b" % (_ID, varint(len(text)), text)
    if response.parameters:
        middle += _parameters(response.parameters)
    head = b"%b%b%b" % (answer.names, middle, answer.outputs)
    nbytes = len(head) + sum(map(len, tags)) + sum(map(len, buffers))
    opening = _prefix(nbytes) + head + (tags[0] if tags else b"")
    return _segments(opening, tags[1:], buffers, nbytes)


def _segments(
    opening: bytes, tags: tuple[bytes, ...], buffers: list[memoryview], nbytes: int
) -> FrameSegments:
    """Put the pieces of a frame in order; each buffer but the first has its tag before it."""
    if not buffers:
        return [opening]
    parts: FrameSegments = [opening, buffers[0]]
    for tag, buffer in zip(tags, buffers[1:], strict=True):
        parts.append(tag)
        parts.append(buffer)
    return [b"".join(parts)] if nbytes <= _JOINED_UP_TO else parts


def _prefix(nbytes: int) -> bytes:
    if nbytes >= 1 << 31:
        raise BridgeError(
            f"the response has {nbytes} bytes, more than the 2 GiB that a protobuf message may have; "
            "ask for fewer outputs at once or use HTTP"
        )
    return b"\0" + nbytes.to_bytes(4, "big")


def _answer_form(
    form: RequestForm,
    signature: Signature,
    config: ModelConfig,
    version: int,
    classified: Collection[str] = (),
) -> _AnswerForm:
    """Make the form of answers with this signature; ``classified`` outputs keep their shapes."""
    names = message_class("ModelInferResponse")(
        model_name=config.name, model_version=str(version)
    ).SerializeToString()
    outputs = message_class("ModelInferResponse")()
    for tensor in signature.tensors:
        spec = tensor if tensor.name in classified else as_configured(tensor, config)
        outputs.outputs.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    described = outputs.SerializeToString()
    # An output in the client's memory has its raw content, too: an empty one.
    sizes = [
        0 if form.output_region(tensor.name) is not None else tensor.nbytes
        for tensor in signature.tensors
    ]
    known = [nbytes for nbytes in sizes if nbytes is not None]
    if len(known) != len(sizes):
        return _AnswerForm(names, described, None, 0, b"")
    tags = tuple(_RAW_OUTPUT + varint(nbytes) for nbytes in known)
    nbytes = len(names) + len(described) + sum(map(len, tags)) + sum(known)
    opening = _prefix(nbytes) + names + described + (tags[0] if tags else b"")
    return _AnswerForm(names, described, tags, nbytes, opening)


def _parameters(parameters: dict[str, object]) -> bytes:
    """Return the fields of response parameters, by name."""
    message = message_class("ModelInferResponse")()
    for name in sorted(parameters):
        _set(message.parameters[_text(name)], name, parameters[name])
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def _set(there: ProtoMessage, name: str, value: object) -> None:
    if isinstance(value, bool):
        there.bool_param = value
    elif isinstance(value, str):
        there.string_param = _text(value)
    elif isinstance(value, float):
        there.double_param = value
    elif isinstance(value, int) and value in _INT64:
        there.int64_param = value
    elif isinstance(value, int) and value in _UINT64:
        there.uint64_param = value
    else:
        raise BridgeError(
            f"response parameter '{name}': expected a bool, a str, a float or an int of 64 bits, got "
            f"{value!r:.100}"
        )


def _text(text: str) -> str:
    """Replace lone surrogates, which are no Unicode text and which models may return."""
    return text.encode(errors="replace").decode()
