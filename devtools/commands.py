"""Commands of ``./dev``: their names, their help, and the call of each."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from devtools import (
    checks,
    coverage,
    demo,
    docs,
    fuzzing,
    gate,
    gpu,
    peer,
    sanitizers,
    stress,
    testing,
    versions,
    wheel,
)
from devtools.console import Failed
from devtools.environment import Checkout, need

__all__ = ["COMMANDS", "USAGE", "main"]

USAGE = """\
usage: ./dev COMMAND [ARGUMENTS]

  demo [--stay]  serve examples and show them: text read from pictures, texts by topic, speeds, an
                error; pictures in demo-output; --stay leaves the server running until Ctrl-C
  test [...]    what a change may break, two workers per core (8 at most); arguments go to pytest
                (./dev test -k arena, ./dev test -n 0 for none but this process);
                ./dev test --fast runs the unit tests, without a server, in a minute;
                ./dev test --all runs everything: kills, soaks, deep properties, each way to build,
                sanitizers, fleets, coverage against its floors; for hours;
                ./dev test --gate runs what must pass before a change lands (.ci/run): check, all tests
                with each package and simulated GPUs, and sanitize and building where what they
                depend on has changed;
                ./dev test --fleet runs faults of fleets on Ray, for a quarter of an hour;
                ./dev test --peer [small|all] puts random requests and configurations to the real
                Triton, too, and reports what differs without a reason; small takes two minutes;
                ./dev test --versions [lowest|newest|protobuf-N] runs the server's tests with those
                versions of what pyproject.toml allows;
                ./dev test -m building -n 0 builds the package as users do, for minutes
  test-extra [...]  the tests of packages that test does not install (JAX, Matplotlib, nvImageCodec, openai,
                NVRTC, s3fs, gcsfs, Jupyter, perf_analyzer, grpc-js), in an environment of their own: 1 GB
  stress [TEST...] [--repeat N] [--seconds S]  repeat tests (those of servers) beside a load on all cores;
                prints failures by test; further arguments go to pytest
  coverage [...]  every test with coverage by lines and branches, also of the processes that tests
                start; prints both for each package, whether the tests pass or not; arguments go
                to pytest; without any, a package that fell below its floor is a failure
  check         format, lint, types and layers; changes nothing
  sanitize [...]  the compiled module's tests, built with ASan and UBSan, and the inputs that
                fuzzing has kept; arguments go to pytest instead of the tests marked plane
  fuzz [TARGET] [SECONDS]  feed a target of tests/fuzz/native, or each of them, with what reaches
                further and further into it (60 seconds each); needs clang++
  docs [--external]  build the documentation site in build/site; every warning is an error, as is
                a link that leads nowhere (--external: also links to other sites)
  bench [...]   measure on this machine; arguments go to python -m benchmarks
  gpu [first|second|PART] [--output DIR] [--wheels DIR] [--limit SECONDS]  what needs a GPU, with PYTHON
                and the wheels in .whl, in two calls of 480 and 300 s at most; results in
                build/gpu-results; parts and their arguments: docs/how-to/gpu-checks.md
  serve [...]   gpubridge serve with these arguments
  wheel [DIR]   make a wheel in DIR (dist) that installs elsewhere without compiling: for this Python, and
                for C libraries from the version that its name says on (manylinux, by auditwheel)
  help          this text

  PYTHON          the interpreter to use (default: python3, else the newest python3.N)
  GPUBRIDGE_VENV  where the virtual environment lives (default: .venv)
"""


def main(root: str, python: str, arguments: list[str]) -> NoReturn:
    """Run a command of the checkout at `root`, with `python` to make environments; end the process."""
    # Ends programs that commands have started as their `finally` says.
    signal.signal(signal.SIGTERM, _end)
    name, *rest = arguments or ["help"]
    if name in ("help", "-h", "--help"):
        sys.stdout.write(USAGE)
        sys.exit()
    try:
        if name not in COMMANDS:
            sys.stderr.write(USAGE)
            raise Failed(f"unknown command: {name}")
        status = COMMANDS[name](Checkout.of(root, python), rest)
    except Failed as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(status or 0)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _test(checkout: Checkout, arguments: list[str]) -> int | None:
    levels = {"--all": gate.test_all, "--gate": gate.gate, "--versions": versions.test_versions}
    if arguments and arguments[0] in levels:
        levels[arguments[0]](checkout, arguments[1:])
        return 0
    if arguments and arguments[0] == "--peer":
        return peer.test_peer(checkout, arguments[1:])
    return testing.test(checkout, arguments)


def _bench(checkout: Checkout, arguments: list[str]) -> None:
    need(checkout, "bench")
    os.chdir(checkout.root)
    _replace_by(checkout, "benchmarks", *arguments)


def _serve(checkout: Checkout, arguments: list[str]) -> None:
    need(checkout)
    _replace_by(checkout, "gpubridge", "serve", *arguments)


def _replace_by(checkout: Checkout, *arguments: str) -> NoReturn:
    """Go on as the environment's Python with a module, so that signals reach it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(checkout.runner, [str(checkout.runner), "-m", *arguments])


COMMANDS: dict[str, Callable[[Checkout, list[str]], int | None]] = {
    "bench": _bench,
    "check": checks.check,
    "coverage": coverage.coverage,
    "demo": demo.demo,
    "docs": docs.docs,
    "fuzz": fuzzing.fuzz,
    "gpu": gpu.gpu,
    "sanitize": sanitizers.sanitize,
    "serve": _serve,
    "stress": stress.stress,
    "test": _test,
    "test-extra": testing.test_extra,
    "wheel": wheel.wheel,
}
