"""The events of an HTTP/2 connection, and what is wrong with messages of gRPC that are none.

The first value of an event is its kind, the second its stream (0 for the connection); the docstrings
name the others.
"""

from __future__ import annotations

from typing import Final

from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.protocol.grpc.messages import MALFORMED

CALL: Final = 0
"""A call with its only message: method, headers, message, whether that is compressed."""
BEGIN: Final = 1
"""A call has begun: method (-1 for none of ours), headers, whether its request has ended."""
MESSAGES: Final = 2
"""Messages: bytes that were taken for them, messages, whether they are compressed, the end."""
DATA: Final = 3
"""Part of a large message: a view, valid until more is received, and whether it is the last."""
FILLED: Final = 4
"""The memory given to ``receive_into`` is full: whether the request has ended."""
FAILED: Final = 5
"""Malformed message: the fault, a number and a limit; see `framing_failure`."""
RESET: Final = 6
"""The stream is gone: the peer reset it, or broke a rule. The code."""
WRITABLE: Final = 7
"""All that was queued for the stream is on its way."""
PING: Final = 8
"""The peer has sent a PING, which is answered."""
PONG: Final = 9
"""A PING of ours was answered: its payload."""
CLOSED: Final = 10
"""The connection is over and its streams are gone: a code and a text."""
LARGE: Final = 11
"""A large message begins, which comes in pieces: its bytes."""

_FLAG, _TOO_LONG, _SECOND_MESSAGE, _INCOMPLETE = range(4)


def framing_failure(fault: int, value: int, limit: int) -> CallFailed:
    """Return how a call ends whose messages are wrong."""
    if fault == _TOO_LONG:
        return CallFailed(
            Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({value} vs. {limit})"
        )
    if fault == _SECOND_MESSAGE:
        # gRPC's status for a number of requests that the method does not take.
        return CallFailed(Status.UNIMPLEMENTED, "expected one message in the request, got another")
    if fault == _FLAG:
        return CallFailed(
            Status.INTERNAL, f"expected 0 or 1 as the flag before a message, got {value}"
        )
    if fault == _INCOMPLETE:
        return CallFailed(Status.INTERNAL, "the request ends in the middle of a message")
    return CallFailed(Status.INTERNAL, MALFORMED)
