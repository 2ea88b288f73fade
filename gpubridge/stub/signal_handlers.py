"""Runs the handlers of signals that a model sets while its code runs, as Triton's stub does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any


class SignalHandlers:
    """Holds signals back from a model's handlers while the stub's own code runs.

    Such a handler may raise, at any point: a message or an answer would be lost. It runs in the next
    ``execute``. All is done in the main thread, which executes; the model's code runs by `call`.

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
            number, handler = self.held.popitem()
            handler(number, sys._getframe())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the model's code; handlers run meanwhile, those that wait first."""
        try:
            self.in_model = True
            self.run_held()
            return function(*arguments)
        finally:
            self.in_model = False

    def _set(self, signalnum: int, handler: Any) -> Any:
        """Stand for `signal.signal`."""
        held = _Held(self, handler) if callable(handler) else handler
        return _given(self._signal(signalnum, held))

    def _get(self, signalnum: int) -> Any:
        """Stand for `signal.getsignal`."""
        return _given(self._getsignal(signalnum))


# The interpreter may take a signal in the frame of `call` itself, where a handler that raises would leave
# ``in_model`` set, or in that of `run_held`, where one that waits would be lost.
_HOLDING = (SignalHandlers.call.__code__, SignalHandlers.run_held.__code__)


class _Held:
    """A handler of the model that runs while the model's code does."""

    __slots__ = ("_handlers", "given")

    def __init__(self, handlers: SignalHandlers, given: Any) -> None:
        self._handlers = handlers
        self.given = given

    def __call__(self, number: int, frame: Any) -> None:
        own = frame is not None and frame.f_code in _HOLDING
        if self._handlers.in_model and not own:
            self.given(number, frame)
        else:
            self._handlers.held[number] = self.given


def _given(handler: Any) -> Any:
    return handler.given if isinstance(handler, _Held) else handler
