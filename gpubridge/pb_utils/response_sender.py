"""Response sender: a model sends responses by itself, during ``execute`` or after it."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from gpubridge.pb_utils.arguments import integer, wrong_type
from gpubridge.pb_utils.constants import TRITONSERVER_RESPONSE_COMPLETE_FINAL
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.response import InferenceResponse


class ResponseLine(Protocol):
    """Sink of one request's responses; injected by the process that runs the model."""

    decoupled: bool

    def wait_for_room(self, response: InferenceResponse, /) -> None:
        """Block while more responses wait than may, and the client does, and the line is open."""

    def close(self) -> None:
        """Hear that nothing will be sent any more."""

    def send(self, response: InferenceResponse | None, final: bool, /) -> None:
        """Take a response, or with None and ``final`` only the word that there are no more."""

    def cancelled(self) -> bool:
        """Tell whether the client no longer waits."""

    def let_go(self, sent: int, /) -> None:
        """Hear that the model has dropped the sender without a final response."""


class InferenceResponseSender:
    """Sends the responses of one request; made by ``InferenceRequest.get_response_sender()``.

    May be kept after ``execute`` has returned, and used in any thread. A sender that is dropped
    without :data:`TRITONSERVER_RESPONSE_COMPLETE_FINAL` ends its request then: nobody could any more.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_closed", "_line", "_lock", "_sent", "_turn")

    _closed: bool
    _line: ResponseLine
    _lock: threading.Lock
    _sent: int
    _turn: threading.Lock

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def _on(cls, line: ResponseLine) -> InferenceResponseSender:
        sender = object.__new__(cls)
        sender._line = line
        sender._closed = False
        sender._sent = 0
        sender._lock = threading.Lock()
        sender._turn = threading.Lock()
        return sender

    def __del__(self) -> None:
        if hasattr(self, "_line") and not self._closed:
            self._line.let_go(self._sent)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag, or both at once.

        Blocks while the client is so slow that too many responses wait for it (64, or 16 MiB).

        Parameters
        ----------
        response : InferenceResponse, optional
            Needed unless `flags` says that it is the end. An error response is one of many, and ends
            nothing by itself.
        flags : int, optional
            0, or ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` with the last response or after it.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If `flags` is another number, nothing is to be sent, the sender is closed, or a model
            that is not decoupled sends not exactly one response.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise wrong_type("response", "InferenceResponse", response)
        if not isinstance(flags, int):
            flags = integer(flags, "flags")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and not final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        # One at a time: after the final flag the server may give the request's number to another
        # one, whose client must not get what this model sends in another thread.
        with self._turn:
            self._check(response, final)
            if response is not None and not final:
                # Without the lock: who closes the sender meanwhile does not wait for a slow client.
                self._line.wait_for_room(response)
            with self._lock:
                self._check(response, final)
                self._sent += response is not None
                self._closed = final
                self._line.send(response, final)

    def _check(self, response: Any, final: bool) -> None:
        if not self._line.decoupled:
            if response is not None and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and final and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before "
                    "sending a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _close(self, *, unless_sent: bool = False) -> bool:
        """Send nothing from now on; returns whether it could have."""
        with self._lock:
            if self._closed or (unless_sent and self._sent):
                return False
            self._closed = True
        self._line.close()
        return True

    def is_cancelled(self) -> bool:
        """Tell whether the client no longer waits for responses."""
        return self._line.cancelled()
