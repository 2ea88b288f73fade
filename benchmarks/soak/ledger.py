"""Keeps the account of a soak: each request that was sent, and the one thing that became of it."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from enum import Enum

__all__ = ["Ledger", "Outcome", "Ticket"]


class Outcome(str, Enum):
    """Outcomes of a request.

    One is answered rightly, fails with the stub that had it, or is refused: all stubs of a model are
    waiting to be started again, or a sequence was lost with its stub between two requests.
    """

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    HUNG_UP = "hung up"


# The stub was killed: by us, while the request was there or before its answer was out.
_REFUSED = re.compile(r"Request for model '\w+' cannot be served: Stub process")
_LOST_SEQUENCE = re.compile(
    r"must specify the START flag on the first request|start the sequence again with the START flag"
)
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

    def fail(self, text: str) -> None:
        """Enter that it ended with an error; the text says which."""
        refused = _REFUSED.search(text) or _LOST_SEQUENCE.search(text)
        self.close(Outcome.REFUSED if refused else Outcome.FAILED, text)


class Ledger:
    """Requests by kind. May be used by many threads.

    - ``lost_sequences``: how many sequences were lost between two of their requests.
    """

    def __init__(self) -> None:
        self.lost_sequences = 0
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
            if outcome in (Outcome.FAILED, Outcome.REFUSED):
                self._errors[f"{ticket.kind}: {_NUMBERS.sub('N', text)}"] += 1
                self.lost_sequences += bool(_LOST_SEQUENCE.search(text))
                if not (_KILLED.search(text) or _LOST_SEQUENCE.search(text)):
                    self._faults.append(f"{ticket.kind}: {text}")

    def fault(self, text: str) -> None:
        """Enter something that no request may meet: a wrong answer, a client that broke."""
        with self._lock:
            self._faults.append(text)

    @property
    def sent(self) -> int:
        """Number of requests that were sent."""
        return self._sent.total()

    def count(self, outcome: Outcome) -> int:
        """Number of requests with an outcome."""
        with self._lock:
            return sum(counter[outcome] for counter in self._outcomes.values())

    def faults(self) -> list[str]:
        """Faults: requests with no outcome or two, or with an unexpected error."""
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
