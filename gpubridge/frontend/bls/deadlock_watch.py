"""Refuses calls of models that would never be answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpubridge.dataplane import Call
from gpubridge.engine.supervisor.instance import Instance
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.bls.deadlock_detection import Caller, Deadlock, WaitGraph, moves_on
from gpubridge.telemetry.logs import request_error

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class DeadlockWatch:
    """Looks at calls that would close a circle if an ``execute`` waits for each of its calls.

    One of a coroutine, or of several responses, may be waited for later or never: its stub is asked, now and
    again, until the circle is sure or open. One of an ensemble may come to a member of the circle later.

    ``callers``: returns those who make the calls of an instance.
    """

    def __init__(self, callers: Callable[[Instance], Iterable[Caller]]) -> None:
        self._callers = callers
        # Calls that would close a circle, and by whom.
        self._suspects: dict[Call, Caller] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = _FIRST_PAUSE

    def check(self, caller: Caller, call: Call) -> None:
        """Refuse a call that was submitted, now or once it is sure, if it waits for its caller's end."""
        self._suspects[call] = caller
        if self.look():
            self._pause = _FIRST_PAUSE
            self._ask()

    def look(self) -> bool:
        """Look at the suspicious calls, of which more is known now; returns whether some are left."""
        for call, caller in list(self._suspects.items()):
            going_on = call in caller.calls_of_execute()
            circle = self._deadlock(call, sure=True) if going_on else None
            if circle is not None:
                caller.refuse_call(call, _refusal(call, circle))
            elif going_on and (moves_on(call.request) or self._deadlock(call, sure=False)):
                continue
            del self._suspects[call]
        return bool(self._suspects)

    def _deadlock(self, call: Call, *, sure: bool) -> Deadlock | None:
        try:
            return WaitGraph(self._callers, sure=sure).deadlock(call)
        except Exception as error:
            request_error(error, "look for a circle of calls")
            return None

    def _ask(self) -> None:
        """Ask the stubs, and look again after a pause."""
        asked: dict[Caller, list[Call]] = {}
        for call in self._suspects:
            circle = self._deadlock(call, sure=False)
            for caller, unsure in () if circle is None else circle.unsure:
                asked.setdefault(caller, []).append(unsure)
        for caller, calls in asked.items():
            caller.ask_blocking(calls)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._on_timer)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _on_timer(self) -> None:
        self._timer = None
        if self.look():
            self._ask()


def _refusal(call: Call, circle: Deadlock) -> BridgeError:
    return BridgeError(
        f"Model {call.form.model.name} - Error when running inference: this call would never be answered: {' waits for '.join(circle.path)}, and all their "
        "instances are in use by this very request; give one of these models another instance",
        ErrorCode.UNAVAILABLE,
    )
