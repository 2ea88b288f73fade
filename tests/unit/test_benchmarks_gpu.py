"""The GPU rows of the benchmark: what figures say, what a page shows, and a dry run."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_lane
from benchmarks.gpu_lane import BundledPeer, main
from benchmarks.gpu_report import GpuReport, GpuResult, markdown_page
from benchmarks.gpu_rows import ROWS
from benchmarks.server_process import Ports
from gpubridge.errors import BridgeError
from tests.simcuda.machine import running_machine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BY_NAME = {row.name: row for row in ROWS}
COMPARED = BY_NAME["cuda_shm_identity"]
FLAT = BY_NAME["cuda_shm_place"]


def report(*results, **limits):
    return GpuReport(
        started="2026-01-01T00:00:00+00:00",
        commit="abc",
        device="Some GPU",
        versions={"gpubridge": "1.0"},
        machine={"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6.1"},
        settings={"seconds": 2.0, "smoke": False},
        limits=limits,
        results=results,
    )


def test_a_ratio_is_how_many_times_faster_and_needs_both_sides():
    result = GpuResult(COMPARED, ours={MIB: 100.0, 64 * MIB: 200.0}, theirs={64 * MIB: 700.0})
    assert result.ratio(64 * MIB) == 3.5
    assert result.ratio(MIB) is None
    assert result.complaints == []


def test_less_than_the_minimum_is_a_complaint():
    result = GpuResult(COMPARED, ours={64 * MIB: 200.0}, theirs={64 * MIB: 500.0})
    assert result.complaints == ["2.50 times Triton at 64 MiB, expected 3"]


def test_a_flat_row_may_not_grow_with_the_size():
    flat = GpuResult(FLAT, ours={65536: 10.0, MIB: 100.0, 1024 * MIB: 119.0})
    assert flat.complaints == []
    grown = GpuResult(FLAT, ours={MIB: 100.0, 1024 * MIB: 130.0})
    assert grown.complaints == ["not flat in size: the slowest takes 1.30 times the fastest"]
    assert GpuResult(replace(FLAT, flat=False), ours=grown.ours).complaints == []


def test_the_page_has_figures_limits_ratios_and_complaints():
    result = GpuResult(COMPARED, ours={64 * MIB: 250.0}, theirs={64 * MIB: 500.0})
    network = GpuResult(BY_NAME["network"], failures=["no time left for 1048576 bytes"])
    page = markdown_page(
        report(result, network, d2d={64 * MIB: 60.0}, h2d={64 * MIB: 70.0}, d2h={64 * MIB: 80.0})
    )
    assert "| 64 MiB | 250 | 60 | 190 | 500 | 2.00 |" in page
    assert "| HTTP in and out, the model's tensors on the GPU | 64 MiB | – | 150 | – |" in page
    assert "`network`: no time left" in page
    assert "expected 3" in page


def test_rows_that_triton_cannot_run_are_noted_without_a_complaint():
    result = GpuResult(COMPARED, ours={MIB: 1.0}, notes=["Triton: no such model"])
    assert result.complaints == []
    assert "`cuda_shm_identity`: Triton: no such model" in markdown_page(report(result))


def test_triton_does_not_find_modules_of_this_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}:{ROOT}/")
    launch = BundledPeer(tmp_path).launch(tmp_path, Ports(1, 2, 3))
    assert launch.environment["PYTHONPATH"] == str(tmp_path)


def test_the_minimum_is_that_of_the_readme():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    (line,) = [s for s in text.splitlines() if s.startswith("| CUDA shm in and out (GPU)")]
    found = re.search(r"(\d+)× at (\d+) MB", line)
    assert COMPARED.minimum == (int(found[2]) * MIB, float(found[1]))


def test_without_a_gpu_nothing_is_measured_and_the_exit_status_says_so(
    tmp_path, monkeypatch, capsys
):
    def absent():
        raise BridgeError("no GPU can be used: there is no driver")

    monkeypatch.setattr("benchmarks.gpu_lane.first_device", absent)
    assert main(["--output", str(tmp_path)]) == 2
    assert "there is no driver" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rows_without_time_say_so_and_end_the_run(tmp_path, monkeypatch, capsys):
    def run(report, options, peer):
        report.results = [GpuResult(row) for row in ROWS]
        for result in report.results:
            gpu_lane._measure(result, [peer], options, deadline=0.0)

    monkeypatch.setattr(gpu_lane, "_begin", lambda *_: report())
    monkeypatch.setattr(gpu_lane, "_run", run)
    assert main(["--smoke", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(ROWS)
    assert all("no time left for" in line for line in said)


@pytest.mark.nightly
def test_a_dry_run_on_the_simulated_driver(tmp_path):
    """Answers are checked, and what there is is written."""
    with running_machine() as machine:
        machine.set_memory(4 << 30)
        command = [sys.executable, "-m", "benchmarks.gpu_lane", "--smoke", "--seconds", "0.02"]
        done = subprocess.run(
            [*command, "--budget", "60", "--output", str(tmp_path)],
            cwd=ROOT,
            # Triton, if there is one, knows nothing of the simulated driver.
            env={**machine.environment(), "GPUBRIDGE_PEER": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert machine.violations() == []
    (page,) = tmp_path.glob("gpu_*_smoke.json")
    document = json.loads(page.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == set(BY_NAME)
    assert all(row["gpubridge_us"] for row in rows.values()), done.stderr
    # How flat a simulated GPU is has no meaning.
    failures = [text for row in rows.values() for text in row["complaints"] if "flat" not in text]
    assert failures == []
