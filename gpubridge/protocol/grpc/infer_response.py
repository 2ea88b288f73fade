"""Encoding of ModelInferResponse messages around the outputs, which are not copied."""

from __future__ import annotations

import functools

from gpubridge.config import ModelConfig
from gpubridge.dataplane import MessageResponseTemplate
from gpubridge.errors import BridgeError, LongError
from gpubridge.protocol.request_form import RequestForm, classes_of
from gpubridge.protocol.response_encoding import (
    ResponseEncoding,
    output_encodings,
    prepare_response,
    reshapes,
)
from gpubridge.request import InferResponse, LongParameters
from gpubridge.schema import ProtoMessage, message_class
from gpubridge.transport.signatures import Signature

FrameSegments = list[bytes | memoryview]

FRAME_PREFIX = 5
"""Bytes before each gRPC message: 0 for "not compressed", and its length."""

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)

_FINAL = "triton_final_response"
_ERROR_MESSAGE = 1 << 3 | 2
"""The tag of ``error_message`` in ModelStreamInferResponse."""


def plain_template(
    form: RequestForm, config: ModelConfig, version: int, signature: Signature
) -> MessageResponseTemplate | None:
    """Return the template of responses without formatted outputs; None if some are formatted.

    ``form`` keeps the last one.
    """
    if classes_of(form.outputs):
        return None
    encoding: ResponseEncoding | None = form.encoding
    if encoding is None or encoding.signature is not signature:
        encoding = form.encoding = _encoding(form, signature, config, version)
    return encoding.template if encoding.plain else None


def encode_frame(message: bytes) -> bytes:
    """Return a message with the prefix of a gRPC frame."""
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
    """Encode a response as one gRPC frame with its prefix.

    - ``form``: of the request; caches the template of its responses.
    - ``final``: for a ModelStreamInferResponse: whether it is the last of its request.

    Returns the segments of the frame: one for a small frame; else long outputs are the response's own
    buffers, not copied.

    Raises BridgeError for a parameter or size that protobuf cannot represent.
    """
    given = response.parameters
    rest: list[bytes] = []
    parameters = b"" if final is None else final_parameter(final)
    if isinstance(given, LongParameters):
        # After the outputs, so that long parameters are not copied. The last of equal names counts.
        rest = [
            _parameters(part) if isinstance(part, dict) else part.fields for part in given.parts
        ]
        rest.append(parameters)
        parameters = b""
    elif given:
        parameters = _parameters(given if final is None else {**given, _FINAL: final})
    encoding, response, shapes = prepare_response(
        form, response, config, lambda signature: _encoding(form, signature, config, version)
    )
    buffers, stream = response.buffers, final is not None
    frame: FrameSegments | int = encoding.template.encode(
        identifier, parameters, shapes, buffers, stream, rest
    )
    if isinstance(frame, int):
        raise BridgeError(
            f"the response has {frame} bytes, more than the 2 GiB that a protobuf message may have; "
            "ask for fewer outputs at once or use HTTP"
        )
    return frame


@functools.cache
def final_parameter(final: bool) -> bytes:
    """Return the encoded parameter that says whether a response of a stream is its request's last."""
    return _parameters({_FINAL: final})


def _encoding(
    form: RequestForm, signature: Signature, config: ModelConfig, version: int
) -> ResponseEncoding:
    names = message_class("ModelInferResponse")(
        model_name=config.name, model_version=str(version)
    ).SerializeToString()
    output = message_class("ModelInferResponse.InferOutputTensor")
    openings = [
        output(name=spec.name, datatype=spec.datatype).SerializeToString()
        for spec in signature.tensors
    ]
    # An output in client memory has an empty raw content.
    outputs = output_encodings(form, signature)
    template = MessageResponseTemplate(names, openings, outputs)
    return ResponseEncoding(signature, template, outputs, not reshapes(config))


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
    """Replace lone surrogates, which models may return but UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def error_frame(text: str, identifier: str) -> FrameSegments:
    """Return the frame of an error for a request that was not submitted."""
    message = message_class("ModelStreamInferResponse")(
        error_message=_text(text), infer_response={"id": identifier}
    )
    return [encode_frame(message.SerializeToString())]


def failure_frame(error: BridgeError, model: str, identifier: str, *, final: bool) -> FrameSegments:
    """Return the frame of an error response; ``final`` if it is the last of its request.

    Clients with several requests on a stream use that flag to count finished requests.
    """
    message = message_class("ModelStreamInferResponse")()
    _set_final(message.infer_response, model, identifier, final)
    if not isinstance(error, LongError):
        message.error_message = _text(error.told)
        return [encode_frame(message.SerializeToString())]
    # The text is appended as the last field, without a copy.
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
    """Return the frame that only marks the end of a request's responses."""
    message = message_class("ModelStreamInferResponse")()
    _set_final(message.infer_response, model, identifier, True)
    return [encode_frame(message.SerializeToString())]


def _set_final(response: ProtoMessage, model: str, identifier: str, final: bool) -> None:
    response.model_name = model
    response.id = identifier
    response.parameters["triton_final_response"].bool_param = final
