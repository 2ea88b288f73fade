"""What figures say: whether anything has crossed PCIe that need not."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpubridge.bench.measurement import Measured, Point
from gpubridge.bench.sizes import size_text

__all__ = ["Verdict", "judge"]

_SHARE = 0.05
_PER_REQUEST = 16 << 10  # commands and answers of a request, not data
_NOISE = 5e6  # bytes per second: dmon counts whole megabytes
_SEEN = 0.25


@dataclass(slots=True)
class Verdict:
    """What was found.

    Attributes
    ----------
    failures : list of str
        What crossed, or was copied, that should not.
    doubts : list of str
        What could not be seen, so that nothing follows from it.
    """

    failures: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.failures

    def text(self) -> str:
        """Word it, the outcome first."""
        if self.failures:
            head = "verdict: NOT zero-copy"
        elif self.doubts:
            head = "verdict: zero-copy by the bridge's own counters; not confirmed by PCIe's"
        else:
            head = "verdict: zero-copy: device paths put nothing on PCIe beyond commands"
        lines = [head, *(f"  - {text}" for text in self.failures)]
        return "\n".join([*lines, *(f"  ? {text}" for text in self.doubts)])


def judge(measured: Measured) -> Verdict:
    """Return what the figures say."""
    verdict = Verdict()
    for point in measured.points:
        if point.path.stays:
            _judge_copies(point, verdict)
            _judge_pcie(point, verdict)
    _judge_meter(measured, verdict)
    return verdict


def _judge_copies(point: Point, verdict: Verdict) -> None:
    """No byte over the host, and on the device no more than the path needs."""
    where = f"{point.path.title}, {size_text(point.nbytes)}"
    for kind in ("host", "h2d", "d2h", "p2p"):
        if point.copied[kind]:
            verdict.failures.append(
                f"{where}: the bridge copied {point.copied[kind]} bytes {kind}, expected none"
            )
    allowed = point.path.copies * point.nbytes * point.requests
    if point.copied["d2d"] > allowed:
        verdict.failures.append(
            f"{where}: the bridge copied {point.copied['d2d']} bytes on the device, expected at "
            f"most {allowed} ({point.path.copies} times the tensor)"
        )


def _judge_pcie(point: Point, verdict: Verdict) -> None:
    if point.crossed is None:
        return
    allowed = max(_SHARE * point.handed, _PER_REQUEST * point.requests) + _NOISE * point.seconds
    if point.crossed > allowed:
        verdict.failures.append(
            f"{point.path.title}, {size_text(point.nbytes)}: PCIe saw {point.crossed:.3g} bytes "
            f"above idle, expected at most {allowed:.3g} of the {point.handed:.3g} handed over"
        )


def _judge_meter(measured: Measured, verdict: Verdict) -> None:
    """The host path is the control: a meter that does not see that one sees nothing."""
    if measured.no_pcie:
        verdict.doubts.append(f"PCIe was not watched: {measured.no_pcie}")
        return
    unseen = [point for point in measured.points if point.crossed is None]
    if unseen:
        verdict.doubts.append(f"PCIe's meter gave no figure for {len(unseen)} of the rows")
    control = [point for point in measured.points if not point.path.stays]
    shares = [point.crossed / point.handed for point in control if point.crossed is not None]
    if not shares or max(shares) < _SEEN:
        best = f"{max(shares):.0%}" if shares else "nothing"
        verdict.doubts.append(
            f"PCIe's meter saw {best} of what the host path moved, expected at least "
            f"{_SEEN:.0%}: from its silence nothing follows"
        )
