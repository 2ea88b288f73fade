"""The messages of ModelStreamInfer: answers and errors, each a ModelStreamInferResponse."""

from __future__ import annotations

from gpubridge.protocol.grpc.fields import varint
from gpubridge.protocol.grpc.infer_response import FRAME_PREFIX, FrameSegments, encode_frame
from gpubridge.protocol.grpc.messages import message_class

__all__ = ["error_frame", "final_frame", "stream_frame"]

# The tag of the field infer_response.
_INFER_RESPONSE = b"\x12"


def stream_frame(frame: FrameSegments) -> FrameSegments:
    """Return a ModelInferResponse's frame as that of a stream; buffers are not copied."""
    first = bytes(frame[0])
    nbytes = int.from_bytes(first[1:FRAME_PREFIX], "big")
    before = _INFER_RESPONSE + varint(nbytes)
    prefix = b"\0" + (len(before) + nbytes).to_bytes(4, "big")
    return [prefix + before + first[FRAME_PREFIX:], *frame[1:]]


def error_frame(text: str, identifier: str) -> FrameSegments:
    """Return the frame that tells an error of the request with this id."""
    message = message_class("ModelStreamInferResponse")(
        error_message=text.encode(errors="replace").decode(), infer_response={"id": identifier}
    )
    return [encode_frame(message.SerializeToString())]


def final_frame(model: str, identifier: str) -> FrameSegments:
    """Return the frame that says only that a request gets no further responses."""
    message = message_class("ModelStreamInferResponse")()
    message.infer_response.model_name = model
    message.infer_response.id = identifier
    message.infer_response.parameters["triton_final_response"].bool_param = True
    return [encode_frame(message.SerializeToString())]
