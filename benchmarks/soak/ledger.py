"""Keeps the account of a soak: each request that was sent, and the one thing that became of it."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from enum import Enum

__all__ = ["Ledger", "Outcome", "Ticket"]


class Outcome(str, Enum):
    """What may become of a request."""

    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HUNG_UP = "hung up"


# The stub was killed: by us, while the request was there or before its answer was out.
_KILLED = re.compile(r"Stub process '\w+' is not healthy\. It was killed by signal 9 \(SIGKILL\)")
_NUMBERS = re.compile(r"\d+")


class Ticket:
    """One request; whoever learns what became of it closes it."""

    def __init__(self, ledger: Ledger, kind: str) -> None:
        self._ledger = ledger
        self.kind = kind
        self.outcome: Outcome | None = None

    def close(self, outcome: Outcome, text: str = "") -> None:
        """Enter what became of it; ``text`` is the error of a failed one."""
        self._ledger.enter(self, outcome, text)


class Ledger:
    """Requests by kind. May be used by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._outcomes: defaultdict[str, Counter[Outcome]] = defaultdict(Counter)
        self._errors: Counter[str] = Counter()
        self._faults: list[str] = []

    def send(self, kind: str) -> Ticket:
        """Enter a request that is about to be sent."""
        with self._lock:
            self._sent[kind] += 1
        return Ticket(self, kind)

    def enter(self, ticket: Ticket, outcome: Outcome, text: str) -> None:
        """Enter what became of a request; called by its ticket."""
        with self._lock:
            if ticket.outcome is not None:
                self._faults.append(f"{ticket.kind}: {outcome.value} after {ticket.outcome.value}")
                return
            ticket.outcome = outcome
            self._outcomes[ticket.kind][outcome] += 1
            if outcome is Outcome.FAILED:
                self._errors[f"{ticket.kind}: {_NUMBERS.sub('N', text)}"] += 1
                if not _KILLED.search(text):
                    self._faults.append(f"{ticket.kind}: {text}")

    def fault(self, text: str) -> None:
        """Enter something that no request may meet: a wrong answer, a client that broke."""
        with self._lock:
            self._faults.append(text)

    @property
    def sent(self) -> int:
        """How many requests were sent."""
        return self._sent.total()

    def count(self, outcome: Outcome) -> int:
        """How many requests ended so."""
        return sum(counter[outcome] for counter in self._outcomes.values())

    def faults(self) -> list[str]:
        """What must not happen and did: a request with no outcome or two, or an error of its own."""
        with self._lock:
            missing = [
                f"{kind}: {sent - self._outcomes[kind].total()} of {sent} without an outcome"
                for kind, sent in self._sent.items()
                if sent != self._outcomes[kind].total()
            ]
            return missing + self._faults

    def table(self) -> str:
        """Return the account as text: a line per kind, then the errors with their numbers."""
        columns = [outcome.value for outcome in Outcome]
        lines = [f"{'kind':24}{'sent':>10}" + "".join(f"{name:>11}" for name in columns)]
        for kind, sent in sorted(self._sent.items()):
            counts = "".join(f"{self._outcomes[kind][outcome]:11,}" for outcome in Outcome)
            lines.append(f"{kind:24}{sent:10,}{counts}")
        lines += [f"{count:8,} x {text}" for text, count in self._errors.most_common(40)]
        return "\n".join(lines)
