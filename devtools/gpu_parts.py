"""Parts of the GPU lane: what a machine with a GPU can tell, each with its limit and where its results go."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from devtools.timed_parts import Part

__all__ = ["CALLS", "CALL_SECONDS", "PARTS", "RESULTS", "WITHOUT_GPU", "Lane"]

CALL_SECONDS = {"first": 480.0, "second": 300.0}
"""The seconds that each call takes at most."""
RESULTS = "GPUBRIDGE_GPU_RESULTS"
"""The variable that names the file to which tests and checks add a line each."""

_PROBE = """
from gpubridge.cuda_ipc import probe_devices

probe = probe_devices()
print(f"{probe.count} GPUs" if probe.count else f"no GPU can be used: {probe.reason}")
raise SystemExit(probe.count == 0)
"""
_NO_TESTS = 5
_SPREAD = "import importlib.util as i; raise SystemExit(i.find_spec('xdist') is None)"


@dataclass(frozen=True)
class Lane:
    """The checkout, its interpreter, and the folders of wheels and of results; paths are absolute."""

    root: Path
    python: str
    wheels: Path
    output: Path

    @property
    def site(self) -> Path:
        """The folder of packages that the wheels are installed to."""
        return self.root / "build" / "gpu-site"

    def variables(self) -> dict[str, str]:
        """Return the environment of all parts."""
        paths = [str(self.root), str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        results = str(self.output / "results.jsonl")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            RESULTS: results,
        }

    def has(self, code: str) -> bool:
        """Return whether the interpreter runs a line without an error."""
        command = [self.python, "-c", code]
        done = subprocess.run(
            command, cwd=self.root, env=self.variables(), capture_output=True, check=False
        )
        return done.returncode == 0


def _facts(lane: Lane, _: Sequence[str]) -> Part:
    names = "index,name,uuid,driver_version,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
    commands = (
        ("nvidia-smi", f"--query-gpu={names}", "--format=csv"),
        ("nvidia-smi", "pci", "--getCounters"),
        ("nvidia-smi", "topo", "-m"),
        ("nvidia-smi", "-q"),
        ("uname", "-a"),
        ("sh", "-c", "cat /proc/driver/nvidia/version /sys/hypervisor/type; df -h /dev/shm"),
        (lane.python, "-m", "pip", "list", "--format=freeze"),
    )
    limited = [("timeout", "-k", "1", "5", *command) for command in commands]
    return Part("facts", 20, limited, accepted=())


def _wheels(lane: Lane, _: Sequence[str]) -> Part:
    wheels = sorted(map(str, lane.wheels.glob("*.whl")))
    options = ("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
    install = (lane.python, "-m", "pip", "install", *options, "--target", str(lane.site), *wheels)
    return Part("wheels", 20, [install] if wheels else [])


def _build(lane: Lane, _: Sequence[str]) -> Part:
    """Compile the module in the checkout, unless an installation has brought one."""
    folder = str(lane.root / "build" / "gpu")
    found = (
        "import gpubridge._native as n, pathlib; "
        f"raise SystemExit(pathlib.Path(n.__file__).parent == pathlib.Path({str(lane.root / 'gpubridge')!r}))"
    )
    if lane.has(found):
        return Part("build", 80, [])
    commands = (
        ("cmake", "-S", ".", "-B", folder, f"-DPython_EXECUTABLE={lane.python}"),
        ("cmake", "--build", folder, "--parallel"),
        ("cmake", "--install", folder),
        (lane.python, "-m", "compileall", "-q", "gpubridge", str(lane.site)),
    )
    return Part("build", 80, commands)


def _probe(lane: Lane, _: Sequence[str]) -> Part:
    return Part("probe", 15, [(lane.python, "-c", _PROBE)], decides=True)


def _assumptions(lane: Lane, _: Sequence[str]) -> Part:
    return Part("assumptions", 30, [(lane.python, "-m", "tests.gpu.first_page")])


def _doctor(lane: Lane, _: Sequence[str]) -> Part:
    return Part("doctor", 30, [(lane.python, "-m", "gpubridge", "doctor")])


def _zero_copy(lane: Lane, arguments: Sequence[str]) -> Part:
    sizes = ("--sizes", "64MiB,16MiB,1MiB", "--seconds", "6", "--output", str(lane.output))
    command = (lane.python, "-m", "gpubridge", "bench", "zero-copy", *sizes, *arguments)
    counters = ("timeout", "-k", "1", "5", "sh", "-c", "nvidia-smi pci --getCounters || true")

    beside = partial(_dmon, lane.python, lane.output / "dmon.log")
    return Part("zero-copy", 120, [counters, command, counters], beside=beside)


def _verify(lane: Lane, _: Sequence[str]) -> Part:
    command = (lane.python, "-m", "gpubridge.bench.verify", str(lane.output))
    return Part("verify", 10, [command])


def _tests(lane: Lane, arguments: Sequence[str]) -> Part:
    count = min(6, os.cpu_count() or 1)
    workers = ("-n", str(count), "--dist", "loadfile") if lane.has(_SPREAD) else ()
    return _pytest(lane, "tests", None, "not last", (*workers, *arguments))


def _last(lane: Lane, arguments: Sequence[str]) -> Part:
    """Run what may hang on a driver, or needs the GPU for itself, one at a time."""
    return _pytest(
        lane, "last", 50, "last", ("--deselect", "tests/gpu/test_sanitizer.py", *arguments)
    )


def _sanitizer(lane: Lane, arguments: Sequence[str]) -> Part:
    return _pytest(lane, "sanitizer", 90, "last", ("-k", "test_sanitizer", *arguments))


def _pytest(
    lane: Lane, name: str, seconds: float | None, marks: str, arguments: Sequence[str]
) -> Part:
    """Return a part of tests; that none of those that are asked for has these marks is no failure."""
    # What other releases of the frameworks warn of is no failure, nor does a file that cannot be imported end others.
    options = ["-p", "no:cacheprovider", "-o", "filterwarnings=default", "-v"]
    options += ["--continue-on-collection-errors", "--ignore=tests/gpu/test_first_page.py"]
    command = (lane.python, "-m", "pytest", *options, "tests/gpu", *arguments, "-m", marks)
    return Part(name, seconds, [command], accepted=(0, _NO_TESTS))


def _bench(lane: Lane, arguments: Sequence[str]) -> Part:
    options = ("--budget", "45", "--seconds", "1", "--output", str(lane.output))
    return Part("bench", 65, [(lane.python, "-m", "benchmarks.gpu_lane", *options, *arguments)])


def _kernel(lane: Lane, arguments: Sequence[str]) -> Part:
    return Part("kernel", 20, [(lane.python, "-m", "benchmarks.gpu_image_kernel", *arguments)])


def _images(lane: Lane, arguments: Sequence[str]) -> Part:
    options = ("--batches", "8,128", "--seconds", "2", "--output", str(lane.output))
    return Part(
        "images", None, [(lane.python, "-m", "benchmarks.gpu_images", *options, *arguments)]
    )


@contextmanager
def _dmon(python: str, log: Path) -> Iterator[None]:
    """Let nvidia-smi write what crosses PCIe to a log: a line a second, with its time of UTC."""
    words = ("nvidia-smi", "dmon", "-s", "ut", "-o", "DT", "-d", "1")
    # It writes each line to a terminal at once, and may buffer lines to a file.
    command = (python, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *words)
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            env={**os.environ, "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as child,
    ):
        try:
            yield
        finally:
            # With the terminal goes its program.
            child.kill()


PARTS: dict[str, Callable[[Lane, Sequence[str]], Part]] = {
    "facts": _facts,
    "wheels": _wheels,
    "build": _build,
    "probe": _probe,
    "assumptions": _assumptions,
    "doctor": _doctor,
    "zero-copy": _zero_copy,
    "verify": _verify,
    "tests": _tests,
    "bench": _bench,
    "last": _last,
    "kernel": _kernel,
    "images": _images,
    "sanitizer": _sanitizer,
}
"""By name: each gets further arguments of its last program."""
WITHOUT_GPU = ("facts", "wheels", "build", "probe", "verify")
_READY = ("wheels", "build", "probe")
CALLS = {
    "first": ("facts", *_READY, "assumptions", "doctor", "zero-copy", "verify", "tests"),
    "second": (*_READY, "bench", "last", "kernel", "images"),
}
"""The parts of each call, in their order."""
