"""``gpubridge bench zero-copy`` on a simulated machine, whose NVML and nvidia-smi count its driver's calls."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from gpubridge.bench import verify
from gpubridge.bench.measurement import MODELS
from gpubridge.bench.server_process import ServerProcess
from gpubridge.errors import BridgeError
from tests.process.forked_commands import run_forked
from tests.process.server import alive, wait_until
from tests.simcuda.build import build_management
from tests.simcuda.machine import lawful_machine
from tests.simcuda.processes import running_worker

ROOT = MODELS.parents[2]
SIZE = 256 << 10
PATHS = ["hand_on", "place", "chain", "host"]

# What it tells is what the simulated driver has copied between host and devices.
NVIDIA_SMI = """#!{python} -SE
import os, re, sys, time
log = os.path.join(os.environ["SIMCUDA_DIR"], "calls")

def copies():
    # Bytes to devices and to the host, by all calls so far.
    total = [0, 0]
    with open(log, "a+") as lines:
        lines.seek(0)
        while True:
            for line in lines:
                match = re.match(r"\\d+ cuMemcpy(HtoD|DtoH)\\w*\\((\\d+).*=0", line)
                if match:
                    total[match[1] == "DtoH"] += int(match[2])
            yield list(total)

if "dmon" in sys.argv:
    stamped = "DT" in sys.argv
    print("#Date Time gpu  rxpci  txpci" if stamped else "# gpu  rxpci  txpci", flush=True)
    print("# Idx   MB/s   MB/s", flush=True)
    interval = float(sys.argv[sys.argv.index("-d") + 1])
    copied = copies()
    before, at = next(copied), time.monotonic()
    while True:
        time.sleep(interval)
        now, then = next(copied), time.monotonic()
        rates = [round((n - b) / 1e6 / (then - at)) for n, b in zip(now, before)]
        before, at = now, then
        print(time.strftime("%Y%m%d %H:%M:%S") if stamped else "", "0", *rates, flush=True)
else:
    assert "--query-compute-apps=pid,used_memory" in sys.argv, sys.argv
    print({others!r})
    for pid in sorted(set(line.split()[0] for line in open(log))):
        if os.path.exists("/proc/" + pid):
            print(pid + ", 100")
"""


def on_path(folder, *, others=""):
    """Make a nvidia-smi; returns a PATH that begins with it."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(python=sys.executable, others=others))
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@contextmanager
def beside(machine, folder, path):
    """Let nvidia-smi write its log, as ./dev gpu does."""
    folder.mkdir()
    environment = {**machine.environment(), "PATH": path, "TZ": "UTC"}
    command = ["nvidia-smi", "dmon", "-s", "ut", "-o", "DT", "-d", "1"]
    with (
        (folder / "dmon.log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log) as child,
    ):
        try:
            yield
        finally:
            child.kill()


def verdict(folder):
    verify.main([str(folder)])
    return json.loads((folder / "verdict.json").read_text())


IMPORTS = """
import contextlib, functools, pathlib, time
import gpubridge.bench.dmon_meter as dmon, gpubridge.bench.measurement as measurement
import gpubridge.cli as cli, gpubridge.cli.bench as command
from gpubridge.cuda_ipc.device_check import DeviceCheck
from gpubridge.cuda_ipc.devices import Ability
with contextlib.suppress(ImportError):
    import cuda.bindings.driver
"""
# A dmon samples five times a second here. There is a pause behind each request: what meters tell needs traffic
# all the time, and not as much as there can be. The device is checked, by the
# command and by its server, where a test says so.
PROGRAM = """
time_each = measurement.time_each
measurement.time_each = lambda send, enough: time_each(lambda: (send(), time.sleep(0.03)), enough)
dmon._INTERVAL, dmon._SPAN = 0.2, 0.25
command.run = functools.partial(command.run, models=pathlib.Path(sys.argv.pop(1)))
if sys.argv.pop(1) == "unchecked":
    command.check_device = lambda uuid: DeviceCheck(*[Ability("")] * 5)
    flags, known = measurement._flags, ("device-events=share", "device-memory-handles=legacy")
    measurement._flags = lambda nbytes: [
        *flags(nbytes), *(f"--backend-config=python,{each}" for each in known)
    ]
sys.exit(cli.main(sys.argv[1:]))
"""


def bench(machine, folder, *flags, path="/nowhere", models=MODELS, nvml=None, check="unchecked"):
    """Run the command; returns its exit code, what it printed, and what it wrote.

    ``nvml`` is what there is of NVML; None for nothing.
    """
    environment = {**machine.environment(), "PATH": path}
    if nvml is not None:
        environment["LD_LIBRARY_PATH"] += f":{build_management()}"
        environment["SIMNVML"] = nvml
    words = ["bench", "zero-copy", f"--output={folder / 'out'}", f"--sizes={SIZE}", "--seconds=0.3"]
    done = run_forked(
        str(models), check, *words, *flags,
        cwd=ROOT, environment=environment, imports=IMPORTS, program=PROGRAM,
    )  # fmt: skip
    written = folder / "out" / "zero_copy.json"
    return done, json.loads(written.read_text()) if written.exists() else None


@pytest.fixture
def machine():
    with lawful_machine() as machine:
        machine.delay(100)
        yield machine
        for pid in {call.pid for call in machine.calls()}:
            assert not alive(pid)


# By counters of 32 bits, which wrap; and by dmon, where NVML has none.
@pytest.mark.parametrize("meter", ["counting", pytest.param("old", marks=pytest.mark.nightly)])
def test_device_paths_are_zero_copy_and_the_host_path_is_seen_to_cross(machine, tmp_path, meter):
    done, document = bench(machine, tmp_path, path=on_path(tmp_path / "bin"), nvml=meter)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: zero-copy: device paths put nothing on PCIe" in done.stdout
    assert document["holds"] is True
    assert document["failures"] == document["doubts"] == []
    rows = {row["path"]: row for row in document["rows"]}
    assert list(rows) == PATHS
    for name, copies in (("hand_on", 1), ("place", 0), ("chain", None)):
        row = rows[name]
        assert row["handed_bytes"] == 2 * SIZE * row["requests"]
        copied = row["copied_bytes"]
        assert (copied["host"], copied["h2d"], copied["d2h"]) == (0, 0, 0)
        assert copies is None or copied["d2d"] == copies * SIZE * row["requests"]
        assert 0 < row["p50_us"] <= row["p99_us"]
    host = rows["host"]
    assert host["copied_bytes"]["h2d"] == host["copied_bytes"]["d2h"] == SIZE * host["requests"]
    share = host["pcie_bytes"] / host["handed_bytes"]
    assert 0.25 < share < 2
    assert document["meter"] == (
        "NVML's PCIe byte counters" if meter == "counting" else "nvidia-smi dmon"
    )
    assert (document["driver"], document["link"]["most_generation"]) == ("555.42", 3)
    if meter == "counting":
        assert document["counters"]["bits"] == 32
        assert host["counters_first"] != host["counters_last"]
        # By what the GPU has counted alone.
        assert verify.main([str(tmp_path / "out")]) == 0
    # The client, the server and its stubs.
    assert host["gpu_mib"] % 100 == 0
    assert host["gpu_mib"] >= 600
    picture = tmp_path / "out" / "zero_copy.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert "no picture: matplotlib is not installed" in done.stdout + done.stderr
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


# What is judged of one is asked without a server: tests/unit/test_bench_zero_copy.py
@pytest.mark.nightly
@pytest.mark.parametrize("counters", ["counting", "wide"])
def test_a_copy_over_the_host_is_found_by_both_meters(machine, tmp_path, counters):
    planted = tmp_path / "models"
    shutil.copytree(MODELS, planted)
    config = planted / "hand_on_again" / "config.pbtxt"
    config.write_text(
        config.read_text()
        + 'parameters { key: "INPUT_PLACEMENT" value { string_value: "host" } }\n'
    )
    model = planted / "hand_on_again" / "1" / "model.py"
    model.write_text(model.read_text().replace("given.is_cpu()", "False"))
    path = on_path(tmp_path / "bin")
    with beside(machine, tmp_path / "out", path):
        more = ("--json", "--seconds=5", "--sizes=1MiB", "--paths=hand_on,chain,host")
        done, document = bench(machine, tmp_path, *more, path=path, models=planted, nvml=counters)
    found = verdict(tmp_path / "out")
    assert found["holds"] is False
    for meter in ("counters", "dmon"):
        assert any("two models" in f and f"{meter} received" in f for f in found["findings"])
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout) == document
    assert document["holds"] is False
    about_chain = [text for text in document["failures"] if "ensemble of two models" in text]
    assert about_chain == document["failures"]
    for words in ("bytes h2d, expected none", "bytes d2h, expected none", "PCIe saw"):
        assert any(words in text for text in about_chain), about_chain
    host = next(row for row in document["rows"] if row["path"] == "host")
    assert 0.5 < host["pcie_bytes"] / host["handed_bytes"] < 1.5


@pytest.mark.parametrize(
    ("nvml", "reasons"),
    [
        ("vgpu", ["virtual one (vGPU)"]),
        (None, ["libnvidia-ml.so.1 cannot be loaded", "; nvidia-smi is not on PATH"]),
    ],
)
def test_why_there_is_no_meter(machine, nvml, reasons):
    path = machine.environment()["LD_LIBRARY_PATH"] + (f":{build_management()}" if nvml else "")
    variables = {"LD_LIBRARY_PATH": path, "SIMNVML": nvml or "", "PATH": "/nowhere"}
    with running_worker(machine, variables) as worker:
        worker.do("from gpubridge.bench.pcie_meter import open_pcie_meter")
        worker.do("from gpubridge.bench.processes import processes_on")
        reason = worker.do("answer = open_pcie_meter('GPU-1')")
        assert all(each in reason for each in reasons), reason
        assert worker.do("answer = processes_on('GPU-1')").startswith("nvidia-smi does not tell")


def test_others_on_the_gpu_are_noticed(machine, tmp_path):
    with running_worker(machine, {"PATH": on_path(tmp_path / "bin", others="1, 17")}) as worker:
        worker.do("start()")
        worker.do("from gpubridge.bench.processes import BenchProcesses")
        assert worker.do("answer = sorted(BenchProcesses('GPU-1').others)") == [1]


def test_a_machine_without_a_gpu_says_what_it_would_need(machine, tmp_path):
    machine.set_devices(0)
    done, document = bench(machine, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nothing can be measured here" in done.stderr
    assert "needs an NVIDIA GPU with its driver" in done.stderr
    assert document is None


def test_a_machine_whose_processes_share_no_memory_is_told_so(machine, tmp_path):
    machine.fail("cuIpcGetMemHandle", 801)
    done, document = bench(machine, tmp_path, check="checked")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "memory cannot be shared" in done.stderr
    assert document is None


def test_a_server_that_cannot_start_is_told_with_its_log(tmp_path):
    command = ["sh", "-c", "echo planted; exit 1"]
    with ServerProcess("the benchmark's server", command, tmp_path / "log") as server:
        wait_until(lambda: not alive(server.pid), "its end")
        with pytest.raises(BridgeError, match="ended with exit code 1; its log:\\nplanted"):
            server.check_start(60)


def test_an_answer_that_is_not_what_was_sent_ends_the_run_and_leaves_the_rows_before_it(
    machine, tmp_path
):
    planted = tmp_path / "models"
    shutil.copytree(MODELS, planted)
    model = planted / "hand_on_again" / "1" / "model.py"
    nothing = 'request.output("OUTPUT0", given.shape(), "float32", device="cuda")'
    model.write_text(
        model.read_text().replace('pb_utils.Tensor.from_dlpack("OUTPUT0", given)', nothing)
    )
    done, document = bench(machine, tmp_path, f"--sizes={SIZE},4", models=planted)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"chain: an answer of {SIZE} bytes is not what was sent" in done.stderr
    # One size after the other.
    assert [(row["path"], row["bytes"]) for row in document["rows"]] == [
        ("hand_on", SIZE),
        ("place", SIZE),
    ]
    assert "it ended early: 2 of 8 rows were measured" in document["doubts"]
