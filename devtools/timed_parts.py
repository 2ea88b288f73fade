"""Parts of a command that each have a limit; what one leaves is written before the next one begins."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from devtools.console import say

__all__ = ["FAILED", "LATE", "NOT_BEGUN", "PASSED", "Part", "PartRunner", "Record"]

PASSED: Final = "passed"
FAILED: Final = "failed"
LATE: Final = "out of time"
NOT_BEGUN: Final = "not begun"

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_LEAST_SECONDS = 1.0
_GRACE_SECONDS = 10.0
_TAIL_BYTES = 1200
_COMMAND = 60


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other.

    - ``seconds``: their limit together; None for all that is left.
    - ``accepted``: exit statuses that are no failure; empty for every one.
    - ``decides``: no further part begins after this one has failed (one that ran out of time decides nothing).
    - ``beside``: what runs meanwhile.
    """

    name: str
    seconds: float | None
    commands: Sequence[Sequence[str]]
    accepted: Sequence[int] = (0,)
    decides: bool = False
    beside: Callable[[], AbstractContextManager[object]] = field(default=contextlib.nullcontext)


@dataclass(frozen=True)
class Record:
    """One part as it went; ``began`` is a time of UTC."""

    part: str
    began: str
    seconds: float
    limit: float
    outcome: str
    detail: str = ""


class PartRunner:
    """Runs parts in a process of one thread; NAME.json and NAME.log in ``folder`` say how they went.

    It adopts processes whose parents have ended, and ends those that a part has left: they would go on
    holding the GPU.
    """

    def __init__(
        self, name: str, folder: Path, cwd: Path, variables: Mapping[str, str], seconds: float
    ) -> None:
        self.records: list[Record] = []
        self._cwd, self._variables = cwd, variables
        self._end = time.monotonic() + seconds
        self._refusal = ""
        self._document = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._log.write_bytes(b"")
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)

    def run(self, part: Part) -> Record:
        """Run a part; its record has been written when this returns."""
        began, started = datetime.now(timezone.utc), time.monotonic()
        left = self._end - started
        limit = left if part.seconds is None else min(left, part.seconds)
        if limit < _LEAST_SECONDS:
            outcome, detail = NOT_BEGUN, "no time was left"
        elif self._refusal:
            outcome, detail = NOT_BEGUN, self._refusal
        else:
            say(f"{part.name}, {limit:.0f} s at most")
            with part.beside():
                outcome, detail = self._run(part, started + limit)
        if part.decides and outcome == FAILED:
            self._refusal = f"{part.name}: {detail}"
        seconds = round(time.monotonic() - started, 1)
        when = began.isoformat(timespec="milliseconds")
        record = Record(part.name, when, seconds, round(limit, 1), outcome, detail)
        self.records.append(record)
        document = {"parts": [asdict(each) for each in self.records]}
        self._document.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        say(f"{part.name}: {outcome} after {seconds} s{f': {detail}' if detail else ''}")
        return record

    def _run(self, part: Part, end: float) -> tuple[str, str]:
        """Run the commands until one fails, or the time is over; return the outcome, and why."""
        failures = []
        for command in part.commands:
            begins = self._log.stat().st_size
            status = self._status(command, end)
            if status is None:
                return LATE, f"{_brief(command)} was interrupted"
            if part.accepted and status not in part.accepted:
                way = f"signal {-status}" if status < 0 else f"exit status {status}"
                failures.append(f"{way}: {self._last_words(begins)}")
                break
        return (FAILED, failures[0]) if failures else (PASSED, "")

    def _status(self, command: Sequence[str], end: float) -> int | None:
        """Run a program until a moment at most; return its exit status, or None if it had to be ended."""
        kept = _children()
        with self._log.open("ab") as log:
            log.write(f"\n==> {' '.join(command)}\n".encode())
            log.flush()
            try:
                child = subprocess.Popen(
                    list(command),
                    cwd=self._cwd,
                    env=dict(self._variables),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                return 127
        try:
            return self._ended(child, end)
        finally:
            # A group outlives its leader; processes in groups of their own have become children of this one.
            _end_group(child.pid, signal.SIGKILL)
            child.wait()
            _end_children(kept)

    def _ended(self, child: subprocess.Popen[bytes], end: float) -> int | None:
        """Wait for a child: until shortly before the end, and for as long as an interrupt gives it."""
        left = max(0.0, end - time.monotonic())
        grace = min(_GRACE_SECONDS, left / 4)
        try:
            return child.wait(left - grace)
        except subprocess.TimeoutExpired:
            _end_group(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))
        return None

    def _last_words(self, begins: int) -> str:
        """Return the last line of what a command has written to the log."""
        with self._log.open("rb") as log:
            log.seek(max(begins, self._log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def _brief(command: Sequence[str]) -> str:
    """Return the beginning of a command, as one line."""
    line = " ".join([Path(command[0]).name, *command[1:]]).split("\n", 1)[0]
    return line if len(line) <= _COMMAND else f"{line[:_COMMAND]} ..."


def _end_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _children() -> set[int]:
    """Return the processes whose parent is this one; not every system lists them."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if status.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(int(status.parent.name))
    return found


def _end_children(kept: set[int]) -> None:
    """Kill what this process has adopted, and what it adopts by that, until nothing else is left."""
    while pids := _children() - kept:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
