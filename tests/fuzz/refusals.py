"""Outcome of made-up bytes: a value, or an error of ours."""

from gpubridge.errors import BridgeError


def tried(function, *arguments):
    """Call a function; returns its value and None, or None and the error with which it has refused."""
    refusal = None
    try:
        return function(*arguments), None
    except BridgeError as error:
        refusal = error
    # Clients can be told, and it is not what an exception of ours is told as.
    assert refusal.message.encode(errors="strict")
    assert "is a bug of gpubridge" not in refusal.message, refusal.message
    return None, refusal
