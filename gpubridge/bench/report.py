"""Results of a measurement: the verdict, the table and the picture."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from gpubridge.bench.measurement import Measured, Point, size_text

SHARE = 0.05
"""Of the bytes handed over: the most that may cross PCIe on a path that copies nothing."""
PER_REQUEST = 16 << 10
"""Bytes of a request's commands and answers, which are not data."""
NOISE = {"counters": 1e5, "dmon": 5e6}
"""Bytes per second that are no data, by the meter: reading the counters crosses PCIe, too, and dmon counts whole megabytes."""
SEEN, BEYOND = 0.25, 4.0
"""Shares of the host path's bytes: the least and the most that a meter can plausibly show."""

_HEADINGS = (
    "path",
    "size",
    "requests",
    "p50 us",
    "p99 us",
    "handed",
    "host",
    "h2d",
    "d2h",
    "d2d",
    "PCIe in",
    "PCIe out",
    "GPU MiB",
)

_LEGEND = (
    "handed: bytes of input and output of one request; host, h2d, d2h, d2d: of these the bridge\n"
    "copied; PCIe in, out: what the GPU received and sent above idle, by its meter, for a request"
)

_MIB = 1 << 20


@dataclass(slots=True)
class Verdict:
    """Unexpected transfers and copies (``failures``), and missing measurements (``doubts``)."""

    failures: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Return whether there are no failures."""
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
    if len(measured.points) < measured.planned:
        verdict.doubts.append(
            f"it ended early: {len(measured.points)} of {measured.planned} rows were measured"
        )
    if measured.others:
        pids = ", ".join(map(str, measured.others))
        verdict.doubts.append(
            f"other processes used this GPU: PCIe's figures are theirs, too: {pids}"
        )
    for point in measured.points:
        if point.path.stays:
            _judge_copies(point, verdict)
            # Bytes that other processes may have moved are no fault.
            _judge_pcie(
                point, _noise(measured), verdict.doubts if measured.others else verdict.failures
            )
    _judge_meter(measured, verdict)
    return verdict


def _judge_copies(point: Point, verdict: Verdict) -> None:
    """Require no copy through the host, and on the device no more than the path needs."""
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


def _noise(measured: Measured) -> float:
    return NOISE["dmon" if measured.readings is None else "counters"]


def _judge_pcie(point: Point, noise: float, findings: list[str]) -> None:
    if point.crossed is None:
        return
    allowed = max(SHARE * point.handed, PER_REQUEST * point.requests) + noise * point.seconds
    if point.crossed > allowed:
        findings.append(
            f"{point.path.title}, {size_text(point.nbytes)}: PCIe saw {point.crossed:.3g} bytes "
            f"above idle, expected at most {allowed:.3g} of the {point.handed:.3g} handed over"
        )


def _judge_meter(measured: Measured, verdict: Verdict) -> None:
    """Doubt a meter that does not show the traffic of the host path, the control of each size."""
    if measured.no_pcie:
        verdict.doubts.append(f"PCIe was not watched: {measured.no_pcie}")
        return
    for point in measured.points:
        if point.crossed is None:
            where = f"{point.path.title}, {size_text(point.nbytes)}"
            verdict.doubts.append(f"{where}: no figure of PCIe's meter: {point.no_pcie}")
        elif not point.path.stays and not _plausible(point, point.crossed, _noise(measured)):
            verdict.doubts.append(
                f"at {size_text(point.nbytes)} PCIe's meter saw {point.crossed / point.handed:.0%} "
                f"of what the host path moved, expected {SEEN:.0%} to {BEYOND:.0%}: from what it "
                "says of the device paths of that size nothing follows"
            )


def _plausible(control: Point, crossed: float, noise: float) -> bool:
    """Return whether a meter has shown about the bytes that the host path moved."""
    commands = PER_REQUEST * control.requests + noise * control.seconds
    return SEEN * control.handed <= crossed <= BEYOND * control.handed + commands


def table(measured: Measured) -> str:
    """Return the figures of every path and size; bytes are those of one request."""
    rows = [_HEADINGS, *(_cells(point) for point in measured.points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{measured.device.name} ({measured.device.uuid})"]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    lines.append(_LEGEND)
    if measured.no_memory:
        lines.append(f"GPU MiB of server, models and client: {measured.no_memory}")
    return "\n".join(lines)


def _cells(point: Point) -> tuple[str, ...]:
    each = (point.copied[kind] / point.requests for kind in ("host", "h2d", "d2h", "d2d"))
    pcie = ("-", "-")
    if point.pcie is not None:
        seconds = point.seconds / point.requests
        pcie = (_amount(point.pcie.received * seconds), _amount(point.pcie.sent * seconds))
    return (
        point.path.title,
        size_text(point.nbytes),
        str(point.requests),
        f"{point.p50:,.0f}",
        f"{point.p99:,.0f}",
        size_text(2 * point.nbytes),
        *map(_amount, each),
        *pcie,
        "-" if point.gpu_mib is None else str(point.gpu_mib),
    )


def _amount(nbytes: float) -> str:
    """Return a number of bytes to three digits."""
    if nbytes < 1:
        return "0"
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= width:
            return f"{nbytes / width:.3g} {unit}"
    return f"{nbytes:.0f} B"


def draw(measured: Measured, verdict: Verdict, target: Path) -> str:
    """Write the picture to ``target``; return the reason if that is not possible."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and slow to import)

    by_path: dict[str, list[Point]] = defaultdict(list)
    for point in measured.points:
        by_path[point.path.title].append(point)
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for title, points in by_path.items():
        style = "o-" if points[0].path.stays else "s--"
        sizes = [point.nbytes / _MIB for point in points]
        right.plot(sizes, [point.p50 for point in points], style, label=title)
        left.plot(sizes, [_share(point) for point in points], style, label=title)
    seen = "by PCIe's counters" if not measured.no_pcie else "by the bridge's own counters"
    left.set_title(f"share of the request's bytes that crossed to or from the host\n{seen}")
    left.set_ylim(bottom=-0.05)
    right.set_yscale("log")
    right.set_title("latency of a request, median, µs")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("MiB of input and of output")
        axes.grid(visible=True, alpha=0.3)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    headline = verdict.text().split("\n", 1)[0]
    figure.suptitle(f"{measured.device.name}: {headline}", fontsize=10)
    figure.savefig(target, dpi=160, facecolor="white")
    return ""


def _share(point: Point) -> float:
    crossed = point.crossed
    if crossed is None:
        crossed = sum(point.copied[kind] for kind in ("h2d", "d2h"))
    return crossed / point.handed
