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
from gpubridge.transport.signatures import Shapes, Signature

__all__ = ["FRAME_PREFIX", "FrameSegments", "encode_frame", "encode_response"]

FrameSegments = list[bytes | memoryview]

FRAME_PREFIX = 5
"""Bytes before each gRPC message: 0 for "not compressed", and its length."""

_JOINED_UP_TO = 16384

# Tags of length-delimited fields.
_ID = b"\x1a"
_RAW_OUTPUT = b"\x32"
_OUTPUT = b"\x2a"
_SHAPE = b"\x1a"
"""Of an output."""

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)


@dataclass(slots=True, eq=False)
class _AnswerForm:
    """What is the same in all answers of a signature to requests of a form.

    Attributes
    ----------
    names : bytes
        The fields before the id and the parameters.
    openings : list of bytes
        The fields of each output before its shape.
    elsewhere : list of bool
        Whether an output goes to the client's own memory.
    fixed : bool
        Whether the shapes alone decide what surrounds the buffers.
    shapes : Shapes or None
        Those of the last answer, which the following attributes describe.
    outputs : bytes
        The fields behind the id and the parameters.
    tags : tuple of bytes
        What comes before each buffer, if ``fixed``.
    nbytes : int
        Bytes of a message without id and parameters, if ``fixed``.
    opening : bytes
        A whole frame without id and parameters, up to the first buffer, if ``fixed``.
    """

    names: bytes
    openings: list[bytes]
    elsewhere: list[bool]
    fixed: bool
    shapes: Shapes | None = None
    outputs: bytes = b""
    tags: tuple[bytes, ...] = ()
    nbytes: int = 0
    opening: bytes = b""


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
    classes = classes_of(form.outputs)
    if classes:
        response = classified(response, classes, config)
        answer = _answer_form(form, response.signature, config, version)
    elif form.answer_for is response.signature:
        answer = form.answer
    else:
        answer = _answer_form(form, response.signature, config, version)
        form.answer_for, form.answer = response.signature, answer
    buffers = response.buffers
    if answer.shapes != response.shapes:
        _describe(answer, response, config, classes)
    tags = answer.tags
    if not answer.fixed:
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
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> _AnswerForm:
    names = message_class("ModelInferResponse")(
        model_name=config.name, model_version=str(version)
    ).SerializeToString()
    output = message_class("ModelInferResponse.InferOutputTensor")
    openings = [
        output(name=spec.name, datatype=spec.datatype).SerializeToString()
        for spec in signature.tensors
    ]
    elsewhere = [form.output_region(spec.name) is not None for spec in signature.tensors]
    fixed = all(
        there or spec.itemsize is not None
        for spec, there in zip(signature.tensors, elsewhere, strict=True)
    )
    return _AnswerForm(names, openings, elsewhere, fixed)


def _describe(
    answer: _AnswerForm, response: InferResponse, config: ModelConfig, classified: Collection[str]
) -> None:
    """Note what goes with the shapes of an answer; ``classified`` outputs keep theirs."""
    outputs = []
    for spec, opening, returned in zip(
        response.signature.tensors, answer.openings, response.shapes, strict=True
    ):
        shape = returned if spec.name in classified else as_configured(spec.name, returned, config)
        described = opening
        if shape:
            dims = b"".join([varint(dim) for dim in shape])
            described = b"%b%b%b%b" % (opening, _SHAPE, varint(len(dims)), dims)
        outputs.append(b"%b%b%b" % (_OUTPUT, varint(len(described)), described))
    answer.outputs = b"".join(outputs)
    if answer.fixed:
        # An output in the client's memory has its raw content, too: an empty one.
        sizes = [len(buffer) for buffer in response.buffers]
        answer.tags = tags = tuple([_RAW_OUTPUT + varint(nbytes) for nbytes in sizes])
        answer.nbytes = len(answer.names) + len(answer.outputs) + sum(map(len, tags)) + sum(sizes)
        opening = _prefix(answer.nbytes) + answer.names + answer.outputs
        answer.opening = opening + (tags[0] if tags else b"")
    answer.shapes = response.shapes


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
