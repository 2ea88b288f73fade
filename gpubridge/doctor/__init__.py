"""Reports on this machine: abilities, the reasons of missing ones, and advice."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import gpubridge
from gpubridge.doctor.environments import environment_findings
from gpubridge.doctor.findings import Finding, device_findings, host_findings, package_findings

__all__ = ["Finding", "examine", "exit_code", "report"]


def examine(environments: Sequence[Path] = ()) -> list[Finding]:
    """Run all checks; short-lived processes check GPUs, and no framework is imported.

    ``environments``: directories of models' own Python environments to check, too.
    """
    found = [*host_findings(), *device_findings(), *package_findings()]
    return [*found, *environment_findings(environments)]


def report(findings: Iterable[Finding]) -> str:
    """Return the report's text, the needed findings first."""
    findings = list(findings)
    python = f"Python {platform.python_version()} ({sys.executable})"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    lines = [f"gpubridge {gpubridge.__version__}, {python}, {system}"]
    for title, needed in (("needed to serve", True), ("faster, or on a GPU, or for models", False)):
        lines += ["", title]
        for finding in findings:
            if finding.needed == needed:
                lines += _lines(finding)
    broken = [finding.subject for finding in findings if finding.needed and not finding.works]
    lines += ["", f"cannot serve: {', '.join(broken)}" if broken else "models can be served here"]
    return "\n".join(lines)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if something is missing that serving needs, else 0."""
    return int(any(finding.needed and not finding.works for finding in findings))


def _lines(finding: Finding) -> list[str]:
    verdict = "works" if finding.works else "no"
    lines = [f"  {verdict:5}  {finding.subject}: {finding.detail}"]
    if finding.advice:
        lines.append(f"         -> {finding.advice}")
    return lines
