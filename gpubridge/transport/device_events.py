"""How records name the events that tensors on a GPU wait for: fields of their extras.

A stub's record says with ``event`` that all its tensors on the device are complete when that event of
its own arena has come to pass, and under which lease it is lent; without it, they are when the events
of whoever has lent them to the stub are. The server's records say with ``waits`` what each tensor waits
for: runs of (arena's region, event, tensors), the event -1 for tensors that are complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpubridge.transport.channel import MalformedMessage

__all__ = ["event_of", "waits_of", "with_event", "with_waits"]

_COMPLETE = -1


def with_event(extras: bytes, number: int, lease: int) -> bytes:
    """Return the extras of a stub's record that names an event."""
    return _with(b'"event":[%d,%d]' % (number, lease), extras)


def event_of(extras: Mapping[str, Any] | None, count: int) -> tuple[int, int] | None:
    """Return the event that a stub's record names, and its lease; None if it names none.

    Raises
    ------
    MalformedMessage
        When it is none of the ``count`` that the stub has.
    """
    event = extras.get("event") if extras else None
    if event is None:
        return None
    if (
        type(event) is not list
        or [type(each) for each in event] != [int, int]
        or not 0 <= event[0] < count
        or event[1] < 0
    ):
        raise MalformedMessage(f"event {event!r:.100} of a stub that has {count}")
    return event[0], event[1]


def with_waits(extras: bytes, waits: Sequence[tuple[int, int] | None]) -> bytes:
    """Return the extras of a server's record whose tensors wait for (region, event), or for nothing."""
    runs: list[list[int]] = []
    for wait in waits:
        region, number = wait or (0, _COMPLETE)
        if runs and runs[-1][:2] == [region, number]:
            runs[-1][2] += 1
        else:
            runs.append([region, number, 1])
    if all(run[1] == _COMPLETE for run in runs):
        return extras
    text = ",".join(f"[{region},{number},{count}]" for region, number, count in runs)
    return _with(b'"waits":[%b]' % text.encode(), extras)


def waits_of(extras: Mapping[str, Any] | None) -> list[tuple[int, int] | None] | None:
    """Return what each tensor of a server's record waits for; None where none waits for anything."""
    runs = extras.get("waits") if extras else None
    if runs is None:
        return None
    waits: list[tuple[int, int] | None] = []
    for region, number, count in runs:
        waits += [None if number == _COMPLETE else (region, number)] * count
    return waits


def _with(field: bytes, extras: bytes) -> bytes:
    return b"{%b,%b" % (field, extras[1:]) if len(extras) > 2 else b"{%b}" % field
