"""The lane of GPUs: its parts end in time, leave nothing behind, and what they leave makes the page."""

import json
import sys
from pathlib import Path

import pytest

from devtools import gpu_assumptions, gpu_page
from devtools.gpu_parts import CALL_SECONDS, CALLS, PARTS, Lane
from tests.commands import run_command
from tests.gpu import first_page
from tests.process.server import alive
from tests.simcuda.machine import lawful_machine

ROOT = Path(__file__).parents[2]
GPU_PAGES = (
    "explanation/device-memory.md",
    "explanation/device-ordering.md",
    "explanation/image-preprocessing.md",
    "explanation/simulated-driver.md",
    "how-to/gpu-checks.md",
    "how-to/gpu-deployment.md",
    "tutorials/gpu-image-model.md",
)
# In a process of its own, as the lane is: it adopts what parts leave.
PROGRAM = """
import sys
from pathlib import Path
from devtools import gpu_parts
from devtools.console import Failed
from devtools.environment import Checkout
from devtools.gpu import gpu
from devtools.timed_parts import Part

root, output = Path(sys.argv[1]), sys.argv[2]
python = sys.executable
ORPHAN = (
    "import os, signal, subprocess, sys\\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\\n"
    "print('orphan', child.pid, flush=True)\\n"
)
HANGS = ORPHAN + "try:\\n    signal.pause()\\nfinally:\\n    print('interrupted', flush=True)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
parts = {
    "first": (None, "print('well')"),
    "hangs": (2, HANGS),
    "deaf": (2, DEAF),
    "killed": (60, ORPHAN + "os.kill(os.getpid(), 9)"),
    "import": (60, "import nothing_of_that_name"),
    "then": (60, "print('ran')"),
    "probe": (60, "raise SystemExit('no GPU can be used: planted')"),
    "never": (60, "print('never')"),
}
gpu_parts.PARTS.clear()
for name, (seconds, code) in parts.items():
    part = Part(name, seconds, [(python, "-c", code)], decides=name == "probe")
    gpu_parts.PARTS[name] = lambda lane, _, part=part: part
gpu_parts.CALLS["first"] = tuple(parts)
try:
    gpu(Checkout(root, python, True, root / ".venv"), ["first", "--output", output])
except Failed as error:
    print(error)
"""


def test_each_part_ends_and_those_behind_it_run(tmp_path):
    done = run_command([sys.executable, "-c", PROGRAM, str(ROOT), str(tmp_path)], cwd=ROOT)
    parts = json.loads((tmp_path / "first.json").read_text())["parts"]
    assert {part["part"]: part["outcome"] for part in parts} == {
        "first": "passed",
        "hangs": "out of time",
        "deaf": "out of time",
        "killed": "failed",
        "import": "failed",
        "then": "passed",
        "probe": "failed",
        "never": "not begun",
    }, done.stderr
    detail = {part["part"]: part["detail"] for part in parts}
    assert detail["killed"].startswith("signal 9")
    assert "No module named 'nothing_of_that_name'" in detail["import"]
    assert "no GPU can be used: planted" in detail["probe"]
    assert "no GPU can be used: planted" in detail["never"]
    log = (tmp_path / "first.log").read_text()
    assert "interrupted" in log
    orphans = [int(line.split()[1]) for line in log.splitlines() if line.startswith("orphan")]
    assert len(orphans) == 2
    assert not any(map(alive, orphans))
    written = (tmp_path / "first.md").read_text()
    assert written in done.stdout
    assert "| hangs | out of time |" in written
    assert "hangs, deaf, killed, import, probe, never: not as it should be" in done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_limits_of_parts_leave_time_for_those_without(call, tmp_path):
    lane = Lane(ROOT, sys.executable, tmp_path, tmp_path)
    seconds = [PARTS[name](lane, ()).seconds for name in CALLS[call]]
    assert seconds[-1] is None
    assert None not in seconds[:-1]
    assert sum(seconds[:-1]) <= CALL_SECONDS[call] - 30


def unconfirmed():
    """Return what the page of GPU checks lists, from the same table as the lane's page."""
    for assumptions in gpu_assumptions.ASSUMPTIONS.values():
        for text, shown_by in assumptions:
            commands = dict.fromkeys(map(gpu_assumptions.command_of, shown_by))
            told = ", ".join(f"`{command}`" for command in commands) or "nothing yet"
            yield f"| {text} | {told} |"


def test_the_page_of_gpu_checks_lists_what_no_gpu_has_confirmed():
    page = (ROOT / "docs" / "how-to" / "gpu-checks.md").read_text()
    listed = page.partition("## What no GPU has confirmed yet")[2]
    found = [line for line in listed.splitlines() if line.startswith("| ")]
    assert found[1:] == [*unconfirmed()], "\n".join(unconfirmed())


@pytest.mark.parametrize("page", GPU_PAGES)
def test_pages_of_gpus_say_at_their_top_that_none_has_been_seen(page):
    beginning = (ROOT / "docs" / page).read_text().split("\n\n")[:3]
    assert any("**Not yet seen on a GPU**" in each for each in beginning)


def lines(folder, *results):
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in results))


def found(folder, text):
    (answer,) = [f for f in gpu_page.findings(folder, []) if text in f.text]
    return answer.answer, answer.detail


def test_what_is_found_is_the_worst_that_is_shown(tmp_path):
    test = "tests/gpu/test_failures.py::test_a_fault_of_a_kernel[torch]"
    fatal = "a fatal error"
    assert found(tmp_path, fatal)[0] == gpu_page.NOT_SHOWN
    lines(tmp_path, {"test": test, "outcome": "skipped", "why": "torch: absent"})
    assert found(tmp_path, fatal) == (gpu_page.NOT_SHOWN, "torch: absent")
    driver = {"test": test.replace("torch", "driver"), "outcome": "passed", "why": ""}
    lines(tmp_path, driver)
    assert found(tmp_path, fatal)[0] == gpu_page.HOLDS
    lines(tmp_path, driver, {"test": test, "outcome": "failed", "why": "assert"})
    assert found(tmp_path, fatal)[0] == gpu_page.REFUTED
    # A line that was being written when its process was killed.
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"check": "mem')
    assert found(tmp_path, fatal)[0] == gpu_page.REFUTED
    lines(tmp_path, {"check": "pinning", "reason": ""}, {"check": "pinning", "reason": "801"})
    assert found(tmp_path, "can be pinned") == (gpu_page.REFUTED, "801")


def test_what_shows_an_assumption_is_there():
    sources = {path.name: path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    for assumptions in gpu_assumptions.ASSUMPTIONS.values():
        for assumption in assumptions:
            for shown_by in assumption.shown_by:
                kind, name = shown_by.split(" ", 1)
                if kind in ("test", "last"):
                    file, _, test = name.partition("::")
                    before, _, _ = sources[file].partition(f"def {test or 'test_'}")
                    assert before != sources[file], name
                    mark = before.rpartition("\n\n")[2] if test else ""
                    assert (kind == "last") == ("mark.last" in mark), name
                else:
                    known = {"check": {*first_page._ASSUMED, "peers"}, "part": PARTS}
                    assert name in known.get(kind, {"of zero-copy"}), shown_by


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS)
def test_a_short_call_on_simulated_gpus_leaves_valid_results(call, tmp_path):
    """Everything is interrupted, or nearly; each file can be read."""
    with lawful_machine() as machine:
        done = run_command(
            [ROOT / "dev", "gpu", call, "--limit", "40", "--output", tmp_path],
            env={**machine.environment(), "PYTHON": sys.executable, "GPUBRIDGE_TEST_SIMCUDA": "1"},
        )
    parts = json.loads((tmp_path / f"{call}.json").read_text())["parts"]
    assert [part["part"] for part in parts] == [*CALLS[call]], done.stderr
    outcome = {part["part"]: part["outcome"] for part in parts}
    assert outcome["probe"] != "failed", (tmp_path / f"{call}.log").read_text()
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text())
    assert (tmp_path / f"{call}.md").read_text() in done.stdout
    # What a machine of that kind gives back.
    assert len(list(tmp_path.iterdir())) <= 8
