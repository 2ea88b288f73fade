"""The report as text: a table for the terminal and a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Report, RowResult, median_of
from benchmarks.rows import Kind, Row

_HEADINGS = ("work", "figure", "gpubridge", "Triton", "ratio", "rounds", "minimum", "aim", "")
_NONE = "–"


def console_table(report: Report) -> str:
    """Return the rows as columns of text, with the failures in full below."""
    lines = [_HEADINGS, *(_cells(result) for result in report.results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    table = [
        "  ".join(
            cell.ljust(width) if column in (0, 1, len(widths) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    failures = [f"{r.row.name}: {r.failure}" for r in report.results if r.failure]
    return "\n".join(table + _details(report.results) + failures)


def markdown_page(report: Report, picture: str | None) -> str:
    """Return the page of a run; ``picture`` is the file name of its plot, if one was drawn."""
    machine = report.machine
    settings = report.settings
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}"
    )
    how = (
        f"{settings['rounds']} rounds of {settings['seconds']} s per side, in turn; load from "
        f"{settings['load_generator']} on the same machine; load average at the start "
        f"{machine['load_average']}."
    )
    lines = [
        "# gpubridge and Triton, side by side",
        "",
        "Written by `python -m benchmarks`, not by hand; what is unfair: [README](../README.md).",
        "",
        f"- {where}",
        f"- {versions}",
        f"- commit {report.commit}, {report.started}",
        f"- {how}",
        "",
        "Ratio: gpubridge / Triton per round, the median of the rounds, and their range.",
        "",
    ]
    if not settings["compared"]:
        lines += ["No Triton was given: these are gpubridge's figures alone.", ""]
    lines += _markdown_rows(report.results)
    lines += _load_rows(report.results)
    notes = _details(report.results)
    notes += [
        f"`{result.row.name}` failed: {_first_line(result.failure)}"
        for result in report.results
        if result.failure
    ]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    if picture is not None:
        lines += ["", f"![How many times better than Triton, row by row]({picture})"]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_rows(results: Sequence[RowResult]) -> list[str]:
    lines = [
        "| " + " | ".join(_HEADINGS) + " |",
        "|---|---|" + "---:|" * (len(_HEADINGS) - 3) + "---|",
    ]
    lines += ["| " + " | ".join(_cells(result)) + " |" for result in results]
    return lines


def _load_rows(results: Sequence[RowResult]) -> list[str]:
    """Return a second table with every figure of the load rows, side by side; medians of rounds."""
    columns = ("requests_per_second", "p50_us", "p99_us", "server_cpu_us")
    lines = []
    for result in results:
        if result.row.kind is not Kind.LOAD:
            continue
        for side, samples in (("gpubridge", result.ours), ("Triton", result.theirs)):
            if samples:
                cells = [_number(median_of(samples, column)) for column in columns]
                lines.append(f"| {' | '.join([result.row.title, side, *cells])} |")
    if not lines:
        return []
    headings = ("work", "side", "req/s", "p50 µs", "p99 µs", "server's CPU µs per request")
    return ["", f"| {' | '.join(headings)} |", "|---|---|---:|---:|---:|---:|", *lines]


def _cells(result: RowResult) -> tuple[str, ...]:
    row = result.row
    ratios = result.ratios
    return (
        row.title,
        row.unit,
        _number(result.our_median),
        _number(result.their_median),
        _ratio(result.ratio),
        f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else _NONE,
        _bar(row.minimum, row),
        _bar(row.aim, row),
        result.verdict.value,
    )


def _bar(bar: float | None, row: Row) -> str:
    if bar is None:
        return _NONE
    return f"{'≤' if row.less_is_better else '≥'} {bar:.2g}"


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _details(results: Sequence[RowResult]) -> list[str]:
    """Return the sentences of rows that one figure does not tell."""
    lines = []
    for result in results:
        if result.failure or not result.ours:
            continue
        if result.row.kind is Kind.SOAK:
            lines.append(_soak_sentence(result))
        elif result.row.kind is Kind.IDLE:
            sides = [("gpubridge", result.ours), ("Triton", result.theirs)]
            lines += [_idle_sentence(name, samples[-1]) for name, samples in sides if samples]
    return lines


def _soak_sentence(result: RowResult) -> str:
    sample = result.ours[-1]
    return (
        f"soak, gpubridge: {sample['requests']:,.0f} requests; RSS "
        f"{sample['rss_mib_before']:.1f} → {sample['rss_mib_after']:.1f} MiB, PSS "
        f"{sample['pss_mib_before']:.1f} → {sample['pss_mib_after']:.1f} MiB, descriptors "
        f"{sample['descriptors_before']:.0f} → {sample['descriptors_after']:.0f}, threads "
        f"{sample['threads_before']:.0f} → {sample['threads_after']:.0f}"
    )


def _idle_sentence(name: str, sample: dict[str, float]) -> str:
    return (
        f"idle, {name}: RSS {sample['rss_mib']:.1f} MiB, PSS {sample['pss_mib']:.1f} MiB, "
        f"{sample['processes']:.0f} processes, {sample['threads']:.0f} threads, "
        f"{sample['descriptors']:.0f} descriptors, {sample['idle_cpu_percent']:.1f} % of one CPU"
    )


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
