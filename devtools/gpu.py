"""What only a machine with a GPU can tell, by an interpreter as it is: ``./dev gpu``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from devtools.console import Failed, run_steps, say
from devtools.environment import Checkout
from devtools.processes import output_of, run

__all__ = ["gpu"]

_PROBE = """
from gpubridge.cuda_ipc import probe_devices

probe = probe_devices()
print(f"{probe.count} GPUs" if probe.count else f"no GPU: {probe.reason}")
raise SystemExit(probe.count == 0)
"""
_NO_TESTS = 5
Part = Callable[["_Lane", list[str]], bool]


def gpu(checkout: Checkout, arguments: list[str]) -> None:
    """Run a part, or all of them: nothing is installed, compiled or fetched."""
    part, *rest = arguments or ["all"]
    if part != "all" and part not in _PARTS:
        raise Failed(
            f"unknown part of gpu: {part}; expected doctor, tests, bench, images or zero-copy, or none "
            "for all of them"
        )
    lane = _Lane(checkout)
    lane.look()
    chosen = _PARTS if part == "all" else {part: _PARTS[part]}
    steps = [(f"gpu {name}", partial(each, lane, rest)) for name, each in chosen.items()]
    run_steps(steps, "not as it should be")


class _Lane:
    """The interpreter with its variables."""

    def __init__(self, checkout: Checkout) -> None:
        self._root = checkout.root
        self._python = checkout.python
        given = os.environ.get("PYTHONPATH")
        path = f"{checkout.root}{os.pathsep}{given}" if given else str(checkout.root)
        self._variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def python(self, *arguments: str, quiet: bool = False) -> int:
        """Run the interpreter; return its exit status."""
        command = [self._python, *arguments]
        return run(command, cwd=self._root, variables=self._variables, quiet=quiet)

    def limited(self, seconds: int, *arguments: str) -> int:
        """Run the interpreter for so long at most; interrupt it then, and kill it if that is no help."""
        most = min(seconds, int(os.environ.get("GPUBRIDGE_GPU_SECONDS") or seconds))
        command = ["timeout", "-s", "INT", "-k", "10", str(most), self._python, *arguments]
        return run(command, cwd=self._root, variables=self._variables)

    def look(self) -> None:
        """Raise `Failed` where there is no GPU, or no compiled module."""
        say(f"looking for a GPU with {self._python} ({output_of([self._python, '-V'])})")
        sys.stdout.flush()
        if self.python("-c", _PROBE):
            raise Failed("no GPU can be used here: nothing was tested")
        if self.python("-c", "import gpubridge._native"):
            raise Failed(
                "the compiled module is not there: cmake -S . -B build && cmake --build build && "
                "cmake --install build (docs/how-to/building.md)"
            )


def _doctor(lane: _Lane, _: list[str]) -> bool:
    return lane.limited(80, "-m", "gpubridge", "doctor") == 0


def _tests(lane: _Lane, arguments: list[str]) -> bool:
    """Run what may hang last, one at a time; what was seen by the end of the time is told, as on Ctrl-C."""
    spread = lane.python("-c", "import xdist", quiet=True) == 0
    workers = ["-n", "4", "--dist", "loadfile"] if spread else []
    first = _pytest(lane, 300, "not last", [*workers, *arguments])
    return _pytest(lane, 150, "last", arguments) and first


def _pytest(lane: _Lane, seconds: int, marks: str, arguments: list[str]) -> bool:
    """Run tests; that none of those that are asked for has these marks is no failure."""
    # What other releases of the frameworks warn of is no failure.
    options = ("-p", "no:cacheprovider", "-o", "filterwarnings=default", "-v")
    command = ("-m", "pytest", *options, "tests/gpu", *arguments, "-m", marks)
    return lane.limited(seconds, *command) in (0, _NO_TESTS)


def _bench(lane: _Lane, arguments: list[str]) -> bool:
    return lane.limited(250, "-m", "benchmarks.gpu_lane", "--budget", "220", *arguments) == 0


def _images(lane: _Lane, arguments: list[str]) -> bool:
    kernel = lane.limited(80, "-m", "benchmarks.gpu_image_kernel")
    images = lane.limited(270, "-m", "benchmarks.gpu_images", *arguments)
    return kernel == images == 0


def _zero_copy(lane: _Lane, arguments: list[str]) -> bool:
    command = ("-m", "gpubridge", "bench", "zero-copy", "--output", "benchmarks/results")
    return lane.limited(300, *command, *arguments) == 0


# All limits together are below 25 minutes.
_PARTS: dict[str, Part] = {
    "doctor": _doctor,
    "tests": _tests,
    "bench": _bench,
    "images": _images,
    "zero-copy": _zero_copy,
}
