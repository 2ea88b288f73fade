"""Outcome of made-up bytes: a value, or an error of ours."""

from __future__ import annotations

from gpubridge.errors import BridgeError

__all__ = ["tried"]


def tried(function, *arguments):
    """Call a function; returns its value and None, or None and the error with which it has refused."""
    refusal = None
    try:
        return function(*arguments), None
    except BridgeError as error:
        refusal = error
    # Clients can be told.
    assert refusal.message.encode(errors="strict")
    return None, refusal
