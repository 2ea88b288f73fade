"""A short run of the lane under NVIDIA's compute-sanitizer: no access out of bounds, in any process."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.gpu.lane import SIMULATED

ROOT = Path(__file__).parents[2]
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
# Nothing but the driver, and nobody who dies: what is looked at is the bridge's own.
SHORT_RUN = ("tests/gpu/test_network.py", "tests/gpu/test_client_regions.py")
CHOSEN = "one_copy or at_offsets or region_to_region"
# Under memcheck to start a process with PyTorch takes longer than all of the run.
VARIABLES = {"GPUBRIDGE_TEST_LIBRARIES": "driver"}
SECONDS = 50
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


# Processes that never come to the GPU are no failure, nor calls that are tried and refused.
FLAGS = "--tool memcheck --target-processes all --require-cuda-init no --report-api-errors no"
PYTEST = "-m pytest -p no:cacheprovider -p no:xdist -q -k"


def command(tool, logs):
    checked = [tool, *FLAGS.split(), "--log-file", str(logs / "%p.log"), sys.executable]
    return [*checked, *PYTEST.split(), CHOSEN, *SHORT_RUN]


def test_the_short_run_is_of_the_driver_alone():
    words = [sys.executable, *PYTEST.split(), CHOSEN, *SHORT_RUN, "--collect-only"]
    done = run_command(words, cwd=ROOT, timeout=SECONDS, env={**os.environ, **VARIABLES})
    chosen = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(chosen) > 3, done.stdout
    assert not [name for name in chosen if "torch" in name or "cupy" in name]


@pytest.mark.real_gpu
@pytest.mark.last
def test_no_process_reads_or_writes_where_it_must_not(tmp_path):
    tool = shutil.which("compute-sanitizer", path=PLACES)
    if tool is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    assert not SIMULATED
    done = run_command(
        command(tool, tmp_path), cwd=ROOT, timeout=SECONDS, env={**os.environ, **VARIABLES}
    )
    logs = {file.name: file.read_text(errors="replace") for file in tmp_path.glob("*.log")}
    found = {name: SUMMARY.findall(text) for name, text in logs.items()}
    wrong = "\n".join(
        logs[name] for name, counts in found.items() if any(count != "0" for count in counts)
    )
    assert not wrong, wrong
    # The server, its stubs and a client, besides the tests themselves.
    assert len(logs) >= 3, sorted(logs)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
