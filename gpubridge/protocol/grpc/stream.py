"""The messages of ModelStreamInfer: answers and errors, each a ModelStreamInferResponse."""

from __future__ import annotations

from gpubridge.config.schema import ProtoMessage
from gpubridge.protocol.grpc.infer_response import FrameSegments, encode_frame
from gpubridge.protocol.grpc.messages import message_class

__all__ = ["error_frame", "failure_frame", "final_frame"]


def error_frame(text: str, identifier: str) -> FrameSegments:
    """Return the frame that tells why the request with this id was not taken."""
    message = message_class("ModelStreamInferResponse")(
        error_message=_utf8(text), infer_response={"id": identifier}
    )
    return [encode_frame(message.SerializeToString())]


def failure_frame(text: str, model: str, identifier: str, *, final: bool) -> FrameSegments:
    """Return the frame of a response that is an error; ``final`` when no other one follows it.

    Clients that have several requests on a stream count by that flag which of them are over.
    """
    message = message_class("ModelStreamInferResponse")(error_message=_utf8(text))
    _tell_final(message.infer_response, model, identifier, final)
    return [encode_frame(message.SerializeToString())]


def final_frame(model: str, identifier: str) -> FrameSegments:
    """Return the frame that says only that a request gets no further responses."""
    message = message_class("ModelStreamInferResponse")()
    _tell_final(message.infer_response, model, identifier, True)
    return [encode_frame(message.SerializeToString())]


def _tell_final(response: ProtoMessage, model: str, identifier: str, final: bool) -> None:
    response.model_name = model
    response.id = identifier
    response.parameters["triton_final_response"].bool_param = final


def _utf8(text: str) -> str:
    """Return the text without what no message can carry."""
    return text.encode(errors="replace").decode()
