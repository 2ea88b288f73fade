"""A model's answer as a ModelInferResponse: protobuf around the outputs as they lie in memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gpubridge.config import ModelConfig
from gpubridge.config.schema import ProtoMessage
from gpubridge.dataplane import MessageResponseTemplate
from gpubridge.errors import BridgeError, LongError
from gpubridge.model_io import as_configured
from gpubridge.protocol.classification import classified
from gpubridge.protocol.grpc.messages import message_class
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.request import InferResponse, LongParameters
from gpubridge.transport.signatures import Shapes, Signature

FrameSegments = list[bytes | memoryview]

FRAME_PREFIX = 5
"""Bytes before each gRPC message: 0 for "not compressed", and its length."""

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)

# How an output is told; the numbers are those of csrc/request/response_templates.h.
_ELSEWHERE, _BINARY = 0, 1

_FINAL = "triton_final_response"
_ERROR_MESSAGE = 1 << 3 | 2
"""The tag of that field of ModelStreamInferResponse."""


@dataclass(slots=True, eq=False)
class _Answer:
    """State shared by all responses of a signature to requests of a form.

    - ``template``: makes the frame.
    - ``reshaped``: whether clients may see other shapes than the model gives.
    """

    template: MessageResponseTemplate
    reshaped: bool


def plain_template(
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> MessageResponseTemplate | None:
    """Return what makes the frames of answers of which nothing has to be formatted; else None."""
    answer = _answer(form, signature, config, version)
    return None if answer.reshaped or classes_of(form.outputs) else answer.template


def encode_frame(message: bytes) -> bytes:
    """Put the prefix before a message that gRPC sends as one frame."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)


def encode_response(
    form: RequestForm,
    identifier: str,
    response: InferResponse,
    config: ModelConfig,
    version: int,
    *,
    final: bool | None = None,
) -> FrameSegments:
    """Encode an answer as one gRPC frame, prefix included.

    - ``form``: that of the request; it remembers what the answer has in common with the next.
    - ``final``: for a ModelStreamInferResponse: whether it is its request's last.

    Returns: in order. One bytes object where the frame is small; else long outputs are the
    response's own buffers, not copied.

    Raises BridgeError when a parameter or the size has no place in protobuf.
    """
    given = response.parameters
    rest: list[bytes] = []
    parameters = b"" if final is None else _final_parameter(final)
    if isinstance(given, LongParameters):
        # Behind the outputs: what is that long is not copied. The last one of a name counts.
        rest = [
            _parameters(part) if isinstance(part, dict) else part.fields for part in given.parts
        ]
        rest.append(parameters)
        parameters = b""
    elif given:
        parameters = _parameters(given if final is None else {**given, _FINAL: final})
    answer, response, shapes = _prepare(form, response, config, version)
    buffers, stream = response.buffers, final is not None
    frame = answer.template.encode(identifier, parameters, shapes, buffers, stream, rest)
    if isinstance(frame, int):
        raise BridgeError(
            f"the response has {frame} bytes, more than the 2 GiB that a protobuf message may have; "
            "ask for fewer outputs at once or use HTTP"
        )
    return frame


@functools.cache
def _final_parameter(final: bool) -> bytes:
    return _parameters({_FINAL: final})


def _prepare(
    form: RequestForm, response: InferResponse, config: ModelConfig, version: int
) -> tuple[_Answer, InferResponse, Shapes]:
    """Return what an answer is encoded with: classes instead of values, and clients' shapes."""
    classes: dict[str, int] = {}
    if form.answer_for is response.signature:
        answer: _Answer = form.answer
    elif classes := classes_of(form.outputs):
        response = classified(response, classes, config)
        answer = _answer(form, response.signature, config, version)
    else:
        answer = _answer(form, response.signature, config, version)
        form.answer_for, form.answer = response.signature, answer
    if not answer.reshaped:
        return answer, response, response.shapes
    shapes = tuple(
        shape if spec.name in classes else as_configured(spec.name, shape, config)
        for spec, shape in zip(response.signature.tensors, response.shapes, strict=True)
    )
    return answer, response, shapes


def _answer(form: RequestForm, signature: Signature, config: ModelConfig, version: int) -> _Answer:
    names = message_class("ModelInferResponse")(
        model_name=config.name, model_version=str(version)
    ).SerializeToString()
    output = message_class("ModelInferResponse.InferOutputTensor")
    openings = [
        output(name=spec.name, datatype=spec.datatype).SerializeToString()
        for spec in signature.tensors
    ]
    # An output in the client's memory has its raw content, too: an empty one.
    forms = bytes(
        [
            _BINARY if form.output_region(spec.name) is None else _ELSEWHERE
            for spec in signature.tensors
        ]
    )
    reshaped = any(output.reshape is not None for output in config.outputs)
    return _Answer(MessageResponseTemplate(names, openings, forms), reshaped)


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


def error_frame(text: str, identifier: str) -> FrameSegments:
    """Return the frame that tells why the request with this id was not taken."""
    message = message_class("ModelStreamInferResponse")(
        error_message=_text(text), infer_response={"id": identifier}
    )
    return [encode_frame(message.SerializeToString())]


def failure_frame(error: BridgeError, model: str, identifier: str, *, final: bool) -> FrameSegments:
    """Return the frame of a response that is an error; ``final`` when no other one follows it.

    Clients that have several requests on a stream count by that flag which of them are over.
    """
    message = message_class("ModelStreamInferResponse")()
    _tell_final(message.infer_response, model, identifier, final)
    if not isinstance(error, LongError):
        message.error_message = _text(error.message)
        return [encode_frame(message.SerializeToString())]
    # The text as it is, in a field of its own behind the others.
    opening = bytearray(message.SerializeToString())
    opening.append(_ERROR_MESSAGE)
    nbytes = length = sum(map(len, error.text))
    while length > 0x7F:
        opening.append(length & 0x7F | 0x80)
        length >>= 7
    opening.append(length)
    size = len(opening) + nbytes
    return [b"\0%b%b" % (size.to_bytes(4, "big"), bytes(opening)), *error.text]


def final_frame(model: str, identifier: str) -> FrameSegments:
    """Return the frame that says only that a request gets no further responses."""
    message = message_class("ModelStreamInferResponse")()
    _tell_final(message.infer_response, model, identifier, True)
    return [encode_frame(message.SerializeToString())]


def _tell_final(response: ProtoMessage, model: str, identifier: str, final: bool) -> None:
    response.model_name = model
    response.id = identifier
    response.parameters["triton_final_response"].bool_param = final
