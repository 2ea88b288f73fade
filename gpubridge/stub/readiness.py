"""Answers the server's question whether the model is ready, beside whatever the model does."""

from __future__ import annotations

import inspect
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from gpubridge.stub.loader import model_error_text

__all__ = ["answer_readiness"]

_LONGEST_REASON = 16 * 1024


def answer_readiness(model: Any, run_coroutine: Callable[[Any], Any]) -> socket.socket | None:
    """Let a thread answer for a model that has an ``is_ready``.

    Parameters
    ----------
    run_coroutine : callable
        Runs a coroutine where those of the model run, and waits for it.

    Returns
    -------
    socket.socket or None
        The server's end, the caller's to close; None where there is nothing to ask.
    """
    is_ready = getattr(model, "is_ready", None)
    if not callable(is_ready):
        return None
    server, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(
        target=_answer, args=(ours, is_ready, run_coroutine), name="readiness", daemon=True
    )
    thread.start()
    return server


def _answer(
    ours: socket.socket, is_ready: Callable[[], Any], run_coroutine: Callable[[Any], Any]
) -> None:
    try:
        while ours.recv(1):
            ours.send(json.dumps(_ask(is_ready, run_coroutine)).encode())
    except OSError:
        # The server is gone, and soon this process.
        return


def _ask(is_ready: Callable[[], Any], run_coroutine: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        ready = is_ready()
        if inspect.iscoroutine(ready):
            ready = run_coroutine(ready)
    except BaseException as error:
        return {"ready": False, "error": model_error_text(error)[:_LONGEST_REASON]}
    if not isinstance(ready, bool):
        return {"ready": False, "error": "is_ready() must return a boolean value"}
    return {"ready": ready}
