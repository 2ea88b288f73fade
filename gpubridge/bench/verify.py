"""Verdict on a measurement by the GPU's own figures: ``python -m gpubridge.bench.verify DIR``.

It reads what ``gpubridge bench zero-copy`` has written to DIR (``zero_copy.json``) and, where there is one, the log of
``nvidia-smi dmon -s ut -o DT`` of the same time (``dmon.log``, in UTC). Of the document it takes what was sent, and when, and
the raw counters of the GPU; what the bridge says of its copies, and the verdict there, it does not. It prints for each size
what crossed PCIe in each direction, in bytes and as a share of what the client handed over, and writes ``verdict.json``.

A meter speaks of a size if it saw the host path of that size, the control. The exit status is 0 if every size is confirmed
by a meter and none contradicts, 1 if one does, 2 if nothing follows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from gpubridge.bench.dmon_log import DmonSample, read_dmon_log
from gpubridge.bench.dmon_meter import PcieRate
from gpubridge.bench.measurement import size_text
from gpubridge.bench.pcie_meter import ByteCounts, Reading
from gpubridge.bench.report import BEYOND, NOISE, PER_REQUEST, SEEN, SHARE

_LEAST_SAMPLES = 2
_STAMP = 1.0  # seconds: dmon tells the second of a sample
_HOLDS, _FAILS, _NOTHING = 0, 1, 2


class Span(NamedTuple):
    """A time, as seconds of the epoch."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes that a client sent along a path in a time; ``stays`` if it can stay on the GPU."""

    title: str
    stays: bool
    nbytes: int
    requests: int
    span: Span
    p50: float

    @property
    def handed(self) -> int:
        """The bytes of all inputs, and those of all outputs."""
        return self.nbytes * self.requests


class Crossing(NamedTuple):
    """Bytes that crossed PCIe during a row, by a meter, above the idle link's."""

    meter: str
    received: float
    sent: float

    def plausible(self, row: Row) -> bool:
        """Return whether a meter has seen in each direction about what the host path moved."""
        beyond = BEYOND * row.handed + self._commands(row)
        return all(SEEN * row.handed <= each <= beyond for each in (self.received, self.sent))

    def quiet(self, row: Row) -> bool | None:
        """Return whether no more crossed in either direction than commands; None if data could pass for those."""
        allowed = max(SHARE * row.handed, self._commands(row))
        if max(self.received, self.sent) > allowed:
            return False
        return True if allowed < SEEN * row.handed else None

    def _commands(self, row: Row) -> float:
        return PER_REQUEST * row.requests + NOISE[self.meter] * row.span.seconds

    def text(self, row: Row) -> str:
        """Word it, with shares of what was handed over in each direction."""
        each = (
            f"{way} {nbytes:.3g} bytes ({nbytes / row.handed:.1%})"
            for way, nbytes in (("received", self.received), ("sent", self.sent))
        )
        return ", ".join(each)


@dataclass(slots=True)
class Judgement:
    """Verdict of the meters: lines for each row, contradictions, and the sizes that nothing confirms."""

    lines: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        """Return the verdict; None if nothing follows."""
        if self.against:
            return False
        return None if self.unconfirmed else True

    def document(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        verdict = {
            True: "zero-copy: confirmed by the GPU's own figures",
            False: "NOT zero-copy",
            None: "nothing follows for some sizes",
        }[self.holds]
        return {
            "holds": self.holds,
            "verdict": verdict,
            "findings": [*self.against, *self.unconfirmed, *self.lines],
        }


class Evidence:
    """A document and a log; ``log`` is None where there is none. Raises KeyError or ValueError if it is malformed."""

    def __init__(self, document: dict[str, Any], log: str | None) -> None:
        self.rows = [_row(each) for each in document["rows"]]
        self._idle = Span(_epoch(document["pcie_idle_began"]), _epoch(document["pcie_idle_ended"]))
        self._counts = _counts(document["counters"])
        index = document["nvidia_smi_index"]
        self._samples = None if log is None else read_dmon_log(log, index or 0)

    def crossings(self, row: Row) -> list[Crossing | str]:
        """Return what each meter says of a row, or why it says nothing."""
        found: list[Crossing | str] = []
        for meter, samples in (("counters", self._counts), ("dmon", self._samples)):
            if samples is None:
                continue
            during, idle = self._rate(samples, row.span), self._rate(samples, self._idle)
            if isinstance(during, str):
                found.append(f"{meter}: {during}")
                continue
            # The link is idle for a second, too short for dmon: then all that it saw counts.
            above = during if isinstance(idle, str) else during.above(idle)
            seconds = row.span.seconds
            found.append(Crossing(meter, above.received * seconds, above.sent * seconds))
        return found or ["there are neither counters nor a log of nvidia-smi dmon"]

    @staticmethod
    def _rate(samples: ByteCounts | Sequence[DmonSample], span: Span) -> PcieRate | str:
        if isinstance(samples, ByteCounts):
            return samples.rate(*span)
        # The moment of a sample is known to a second, and it describes the time before.
        found = [each for each in samples if span.began + _STAMP <= each.at <= span.ended - _STAMP]
        if len(found) < _LEAST_SAMPLES:
            return f"{len(found)} samples, expected at least {_LEAST_SAMPLES}"
        return PcieRate(*(sum(each[k] for each in found) / len(found) for k in (1, 2)))


def judge(evidence: Evidence) -> Judgement:
    """Return what follows from all rows, size by size."""
    judgement = Judgement()
    for row in evidence.rows:
        # Half of the requests took the median or longer, one after the other.
        if row.requests * row.p50 / 2 > row.span.seconds * 1.01:
            judgement.against.append(
                f"{row.title}, {size_text(row.nbytes)}: {row.requests} requests of {row.p50 * 1e6:.0f} µs do not fit "
                f"into {row.span.seconds:.2f} s"
            )
    for nbytes in sorted({row.nbytes for row in evidence.rows}):
        _judge_size(nbytes, evidence, judgement)
    if not evidence.rows:
        judgement.unconfirmed.append("no row was measured")
    return judgement


def _judge_size(nbytes: int, evidence: Evidence, judgement: Judgement) -> None:
    rows = [row for row in evidence.rows if row.nbytes == nbytes]
    size = size_text(nbytes)
    seeing, quiet, loud = set(), dict[str, int](), False
    # The control first.
    for row in sorted(rows, key=lambda row: row.stays):
        for crossing in evidence.crossings(row):
            where = f"{size}, {row.title}"
            if isinstance(crossing, str):
                judgement.lines.append(f"{where}: {crossing}")
                continue
            judgement.lines.append(f"{where}: {crossing.meter}: {crossing.text(row)}")
            if not row.stays:
                if crossing.plausible(row):
                    seeing.add(crossing.meter)
                continue
            silent = crossing.quiet(row) if crossing.meter in seeing else None
            if silent:
                quiet[crossing.meter] = quiet.get(crossing.meter, 0) + 1
            elif silent is False:
                loud = True
                judgement.against.append(f"{where}: {crossing.meter} {crossing.text(row)}")
    if loud:
        return
    device_rows = sum(row.stays for row in rows)
    confirming = sorted(meter for meter, count in quiet.items() if count == device_rows)
    if confirming:
        judgement.lines.append(f"{size}: confirmed by {' and '.join(confirming)}")
    else:
        judgement.unconfirmed.append(f"{size}: {_why_not(rows, seeing)}")


def _why_not(rows: Iterable[Row], seeing: set[str]) -> str:
    if all(row.stays for row in rows):
        return "the host path, the control, was not measured"
    if all(not row.stays for row in rows):
        return "no device path was measured"
    if not seeing:
        return f"no meter saw {SEEN:.0%} to {BEYOND:.0%} of what the host path moved"
    return "no meter has a figure of every device path that tells data from commands"


def _row(row: dict[str, Any]) -> Row:
    span = Span(_epoch(row["began"]), _epoch(row["ended"]))
    return Row(row["title"], row["stays"], row["bytes"], row["requests"], span, row["p50_us"] / 1e6)


def _counts(raw: dict[str, Any] | None) -> ByteCounts | None:
    if raw is None:
        return None
    counts = ByteCounts(raw["link_bytes_per_second"])
    for line in raw["readings"]:
        began, ended, received, sent = line.split()
        counts.add(Reading(float(began), float(ended), int(received), int(sent)))
    return counts


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def main(arguments: Sequence[str]) -> int:
    """Judge a folder, print and write what follows; return the exit status."""
    folder = Path(arguments[0])
    log = folder / "dmon.log"
    try:
        document = json.loads((folder / "zero_copy.json").read_text(encoding="utf-8"))
        evidence = Evidence(document, log.read_text(errors="replace") if log.exists() else None)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(
            f"expected zero_copy.json of gpubridge bench zero-copy in {folder}: {error!r}\n"
        )
        return _NOTHING
    found = judge(evidence).document()
    (folder / "verdict.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join([*found["findings"], f"verdict: {found['verdict']}", ""]))
    return {True: _HOLDS, False: _FAILS, None: _NOTHING}[found["holds"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
