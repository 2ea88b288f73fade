"""The models whose processes wait for a debugger: ``--debug-model NAME[:PORT]``."""

from __future__ import annotations

from collections.abc import Iterable

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["read_debug_models"]

_USUAL_PORT = 5678
"""Where debuggers look first."""
_MAX_PORT = 65535


def read_debug_models(texts: Iterable[str]) -> dict[str, int]:
    """Return the port for each model that is named; 0 for any free one.

    Raises
    ------
    BridgeError
        INVALID_ARG: a text is not NAME or NAME:PORT, or two models have one port.
    """
    ports: dict[str, int] = {}
    for text in texts:
        name, colon, number = text.partition(":")
        if not name or (colon and not (number.isdecimal() and int(number) <= _MAX_PORT)):
            raise _refuse(f"--debug-model expects NAME or NAME:PORT, got {text!r}")
        port = int(number) if colon else _USUAL_PORT
        if port and port in ports.values():
            raise _refuse(f"--debug-model {text}: port {port} is another model's; give NAME:PORT")
        ports[name] = port
    return ports


def _refuse(text: str) -> BridgeError:
    return BridgeError(text, ErrorCode.INVALID_ARG)
