"""Waits for a debugger that is started elsewhere, at a port of loopback."""

from __future__ import annotations

import sys

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import Logger

__all__ = ["wait_for_debugger"]

_ADDRESS = "127.0.0.1"


def wait_for_debugger(instance: str, port: int) -> None:
    """Listen for a debugger and return when it is attached.

    Raises
    ------
    BridgeError
        INVALID_ARG: this interpreter has no debugpy, or the port is taken.
    """
    try:
        import debugpy  # noqa: PLC0415  (nothing else needs it)
    except ImportError as error:
        raise BridgeError(
            f"--debug-model: the interpreter of '{instance}' cannot import debugpy ({error}); "
            f"install it there: {sys.executable} -m pip install debugpy",
            ErrorCode.INVALID_ARG,
        ) from None
    try:
        address, bound = debugpy.listen((_ADDRESS, port))
    except (OSError, RuntimeError) as error:
        raise BridgeError(
            f"--debug-model: '{instance}' cannot listen for a debugger at {_ADDRESS}:{port}: "
            f"{error}; choose another port with --debug-model NAME:PORT",
            ErrorCode.INVALID_ARG,
        ) from None
    # A server that waits for somebody does not do that behind a log level.
    Logger.log_warn(f"waits for a debugger: attach it to {address}:{bound}")
    debugpy.wait_for_client()
    Logger.log_info("a debugger is attached")
