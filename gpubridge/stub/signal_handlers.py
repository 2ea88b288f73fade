"""Runs the handlers of signals that a model sets while its code runs, as Triton's stub does."""

from __future__ import annotations

import signal
import sys
from typing import Any


class SignalHandlers:
    """Holds signals back from a model's handlers while the stub's own code runs.

    Such a handler may raise, at any point: a message or an answer would be lost. It runs in the next
    ``execute``. All is done in the main thread, which executes; the model's code runs in a ``with``.

    - ``in_model``: whether the model's code runs.
    - ``held``: the handlers that wait, by the numbers of their signals.
    """

    __slots__ = ("_getsignal", "_signal", "held", "in_model")

    def __init__(self) -> None:
        self.in_model = True
        self.held: dict[int, Any] = {}
        self._signal, self._getsignal = signal.signal, signal.getsignal

    def install(self) -> None:
        """Hold back the signals of this process, which is a stub alone; before the model is imported."""
        for number in signal.valid_signals():
            handler = self._getsignal(number)
            if callable(handler):
                self._set(number, handler)
        signal.signal, signal.getsignal = self._set, self._get

    def run_held(self) -> None:
        """Run the handlers that wait; what one raises is the model's."""
        while self.held:
            number = next(iter(self.held))
            self.held.pop(number)(number, sys._getframe())

    def __enter__(self) -> None:
        """Let handlers run in a block, those that wait first."""
        try:
            self.in_model = True
            self.run_held()
        except BaseException:
            self.in_model = False
            raise

    def __exit__(self, *_: object) -> None:
        self.in_model = False

    def _set(self, signalnum: int, handler: Any) -> Any:
        """Stand for `signal.signal`."""
        held = _Held(self, handler) if callable(handler) else handler
        return _given(self._signal(signalnum, held))

    def _get(self, signalnum: int) -> Any:
        """Stand for `signal.getsignal`."""
        return _given(self._getsignal(signalnum))


class _Held:
    """A handler of the model that runs while the model's code does."""

    __slots__ = ("_handlers", "given")

    def __init__(self, handlers: SignalHandlers, given: Any) -> None:
        self._handlers = handlers
        self.given = given

    def __call__(self, number: int, frame: Any) -> None:
        if self._handlers.in_model:
            self.given(number, frame)
        else:
            self._handlers.held[number] = self.given


def _given(handler: Any) -> Any:
    return handler.given if isinstance(handler, _Held) else handler
