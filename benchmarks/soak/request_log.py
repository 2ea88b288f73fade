"""Log of a soak: each request that was sent, and its one outcome."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from enum import Enum

__all__ = ["Outcome", "RequestLog", "SentRequest"]


class Outcome(str, Enum):
    """Outcomes of a request.

    A request is answered correctly, fails with its stub, or is refused: all stubs of a model are being
    restarted, or a sequence was lost with its stub between two requests.
    """

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    HUNG_UP = "hung up"


# The soak killed the stub before the answer was sent.
_REFUSED = re.compile(r"Request for model '\w+' cannot be served: Stub process")
_LOST_SEQUENCE = re.compile(
    r"must specify the START flag on the first request|start the sequence again with the START flag"
)
_KILLED = re.compile(r"Stub process '\w+' is not healthy\. It was killed by signal 9 \(SIGKILL\)")
_NUMBERS = re.compile(r"\d+")


class SentRequest:
    """One request, which its client closes with the outcome."""

    def __init__(self, log: RequestLog, kind: str) -> None:
        self._log = log
        self.kind = kind
        self.outcome: Outcome | None = None

    def close(self, outcome: Outcome, text: str = "") -> None:
        """Record the outcome; ``text`` is the error of a failure."""
        self._log.enter(self, outcome, text)

    def fail(self, text: str) -> None:
        """Record an error as a failure or a refusal, by its text."""
        refused = _REFUSED.search(text) or _LOST_SEQUENCE.search(text)
        self.close(Outcome.REFUSED if refused else Outcome.FAILED, text)


class RequestLog:
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

    def send(self, kind: str) -> SentRequest:
        """Record a request that is about to be sent."""
        with self._lock:
            self._sent[kind] += 1
        return SentRequest(self, kind)

    def enter(self, sent: SentRequest, outcome: Outcome, text: str) -> None:
        """Record the outcome of a request; called by `SentRequest`."""
        with self._lock:
            if sent.outcome is not None:
                self._faults.append(f"{sent.kind}: {outcome.value} after {sent.outcome.value}")
                return
            sent.outcome = outcome
            self._outcomes[sent.kind][outcome] += 1
            if outcome in (Outcome.FAILED, Outcome.REFUSED):
                self._errors[f"{sent.kind}: {_NUMBERS.sub('N', text)}"] += 1
                self.lost_sequences += bool(_LOST_SEQUENCE.search(text))
                if not (_KILLED.search(text) or _LOST_SEQUENCE.search(text)):
                    self._faults.append(f"{sent.kind}: {text}")

    def fault(self, text: str) -> None:
        """Record a fault: a wrong answer, or a client that broke."""
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
        """Return the log as text: a line per kind, then the errors with their numbers."""
        columns = [outcome.value for outcome in Outcome]
        lines = [f"{'kind':24}{'sent':>10}" + "".join(f"{name:>11}" for name in columns)]
        for kind, sent in sorted(self._sent.items()):
            counts = "".join(f"{self._outcomes[kind][outcome]:11,}" for outcome in Outcome)
            lines.append(f"{kind:24}{sent:10,}{counts}")
        lines += [f"{count:8,} x {text}" for text, count in self._errors.most_common(40)]
        return "\n".join(lines)
