"""Control requests of a model to the server: each waits for its answer."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from gpubridge.errors import BridgeError, ErrorCode


class Waiting(Protocol):
    """Something that a thread waits for.

    ``event``: made by who waits; set when it may be ready, or when somebody else has to read now.
    """

    event: threading.Event | None

    @property
    def ready(self) -> bool:
        """Return whether the wait is over."""


class Question:
    """One question.

    - ``answer``: the fields of the answer, once it has come.
    - ``fds``: the descriptors that came with it, which are the asker's.
    """

    __slots__ = ("answer", "event", "fds", "ready")

    def __init__(self) -> None:
        self.event: threading.Event | None = None
        self.answer: dict[str, Any] = {}
        self.fds: list[int] = []
        self.ready = False

    def deliver(self, answer: dict[str, Any], fds: list[int]) -> None:
        """Take the answer."""
        self.answer = answer
        self.fds = fds
        self.ready = True
        if self.event is not None:
            self.event.set()

    def check(self) -> None:
        """Raise the BridgeError that the server has answered, if it is one."""
        if "error" in self.answer:
            raise BridgeError(self.answer["error"], ErrorCode(self.answer["code"]))
