"""What a run says at its end: how long collecting took, and what was skipped, with what would bring it.

This is a plugin of pytest.
"""

import re
import time
from collections import Counter

import pytest

from devtools.programs import PACKAGES

__all__ = ["RunReport", "remedy", "table"]

_EXTRA = "./dev test-extra"
_MODULES = {
    _EXTRA: (
        "boto3",
        "gcp_storage_emulator",
        "gcsfs",
        "helm_python",
        "ipykernel",
        "jax",
        "matplotlib",
        "moto",
        "nbclient",
        "nbformat",
        "nvidia",
        "openai",
        "ray",
        "s3fs",
    ),
    "pip install --group docs": ("furo", "myst_parser"),
    "pip install torch": ("torch",),
}
_GPU = "a GPU (./dev gpu); GPUBRIDGE_TEST_SIMCUDA=1 runs tests/gpu on simulated ones"
_REMEDIES = (
    (re.compile(r"apt-get install"), ""),
    (re.compile(r"needs openai|needs ray|rapidocr|perf_analyzer|wordllama"), _EXTRA),
    (re.compile(r"onnxruntime"), "./dev test"),
    (re.compile(r"compiled module"), "a build of the compiled module (./dev test makes it)"),
    (re.compile(r"GPU|simulated driver"), _GPU),
    (re.compile(r"NumPy|bindings|releases? of|release$"), "another release of that package"),
    (re.compile(r"not installed"), "an installation of it"),
    (re.compile(r"namespaces|/dev/shm"), "root, or user namespaces"),
)


def remedy(reason: str) -> str:
    """Return what would have a test run that was skipped for this reason; "" where that is not known."""
    module = re.match(r"could not import '(\w+)", reason)
    if module:
        named = [way for way, names in _MODULES.items() if module[1] in names]
        return named[0] if named else "./dev test installs it"
    program = re.search(r"(?:expected )?(\S+)(?: is not on PATH)?$", reason)
    if program and program[1] in PACKAGES:
        return f"apt-get install {PACKAGES[program[1]]}"
    return next((way for pattern, way in _REMEDIES if pattern.search(reason)), "")


def table(reasons: Counter[str]) -> list[str]:
    """Return a line for each reason, the most frequent first."""
    return [
        f"{count:5d}  {reason}" + (f"  ->  {remedy(reason)}" if remedy(reason) else "")
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]


class RunReport:
    """What this process has seen of its run; made for each."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._collected = self._started
        self._skipped_files: dict[str, str] = {}

    def pytest_collectreport(self, report):
        """Note a file that is skipped as a whole, here or in a worker: its tests are in no other report."""
        if report.skipped:
            self._skipped_files[report.nodeid] = reason_of(report)

    def pytest_collection_finish(self):
        """Note the end of collecting in this process."""
        self._collected = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self):
        """Note the end of collecting in a worker."""
        self._collected = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter):
        """Print the time of collecting, and the table."""
        seconds = self._collected - self._started
        terminalreporter.line(f"collecting took {seconds:.1f} s, the start of workers included")
        skipped = terminalreporter.stats.get("skipped", [])
        tests = [report for report in skipped if report.nodeid not in self._skipped_files]
        for what, reasons in (
            ("tests skipped", Counter(map(reason_of, tests))),
            ("files skipped as a whole", Counter(self._skipped_files.values())),
        ):
            if reasons:
                terminalreporter.section(
                    f"{reasons.total()} {what}: why, and what would bring them"
                )
                for line in table(reasons):
                    terminalreporter.line(line)


def reason_of(report) -> str:
    """Return why a test or file was skipped, without pytest's words around it."""
    _, _, text = report.longrepr
    return text.removeprefix("Skipped: ")
