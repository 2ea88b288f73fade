"""The top level of a ModelInferRequest, field by field, without protobuf.

A request is its *form* (everything but the id and the raw contents), which is mostly the same bytes
again and again, and the raw contents, which may be large and are to be received where they stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpubridge.dataplane import read_fields
from gpubridge.errors import BridgeError, ErrorCode, invalid
from gpubridge.protocol.fields import long_id
from gpubridge.protocol.grpc.messages import MALFORMED

__all__ = ["RequestHead", "long_id", "malformed", "read_request", "too_many_fields"]


def malformed(reason: str) -> BridgeError:
    """Make the error of bytes that are no message: Triton's, with the reason as its cause."""
    error = BridgeError(MALFORMED, ErrorCode.INTERNAL)
    error.__cause__ = ValueError(reason)
    return error


def too_many_fields(most: int) -> BridgeError:
    """Make the error of a message of more fields."""
    return invalid(
        f"expected a request of at most {most} fields, got more; send large data as "
        "raw_input_contents"
    )


@dataclass(slots=True)
class RequestHead:
    """Top level of a message.

    - ``form``: the message without its id and raw contents; a message itself.
    - ``sizes``: bytes of each raw content.
    - ``offsets``: where each begins: in the message, or in the slot that it was received into.
    """

    form: bytes
    identifier: str
    sizes: Sequence[int]
    offsets: Sequence[int]


def read_request(message: bytes) -> RequestHead:
    """Read the top level of a whole message; raises BridgeError."""
    return RequestHead(*read_fields(message))
