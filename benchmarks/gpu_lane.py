"""Command line: ``python -m benchmarks.gpu_lane [--peer DIR]``; see docs/how-to/gpu-checks.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_memory import first_device, measure_limits
from benchmarks.gpu_report import GpuReport, GpuResult, markdown_page
from benchmarks.gpu_requests import Requests
from benchmarks.gpu_rows import ROWS, SMALL
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.peer import find_peer
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender, Launch, Ports, ServerProcess
from gpubridge import __version__
from gpubridge.bench.device_requests import ClientMemory
from gpubridge.errors import BridgeError

_PROJECT = Path(__file__).resolve().parent.parent
_MODELS = _PROJECT / "benchmarks" / "models" / "gpu"
_WARM_UP = 10


@dataclass(frozen=True, slots=True)
class BundledPeer:
    """A Triton in a directory with a program ``start.sh MODEL_REPOSITORY [flags]``."""

    directory: Path
    name: str = "Triton"
    python: str = "python3"

    def launch(self, repository: Path, ports: Ports) -> Launch:
        """Return how to serve ``repository`` on loopback."""
        command = [str(self.directory / "start.sh"), str(repository)]
        # Models that Triton cannot load leave it able to answer for the others.
        command += ["--exit-on-error=false", "--strict-readiness=false"]
        for protocol, port in (
            ("http", ports.http),
            ("grpc", ports.grpc),
            ("metrics", ports.metrics),
        ):
            command += [f"--{protocol}-address=127.0.0.1", f"--{protocol}-port={port}"]
        environment = dict(os.environ)
        # This folder has modules of the same names as Triton's.
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        kept = [path for path in paths if path and Path(path).resolve() != _PROJECT]
        environment["PYTHONPATH"] = os.pathsep.join(kept)
        return Launch(command, environment, self.directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 if every row has its figures and reaches its minimum."""
    options = _parser().parse_args(arguments)
    try:
        peer = _peer(options.peer)
        report = _begin(options, peer)
        _run(report, options, peer)
    except BridgeError as error:
        print(error, file=sys.stderr)
        return 2
    complaints = [f"{r.row.name}: {text}" for r in report.results for text in r.complaints]
    print("\n".join(complaints), file=sys.stderr)
    return 1 if complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_lane",
        description="Measure tensors on this machine's first GPU, and Triton beside it.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument("--output", metavar="DIR", default="benchmarks/results")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row, size and side")
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="SECONDS", help="nothing begins after that"
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes only: a trial")
    return parser


def _peer(directory: str | None) -> Contender | None:
    given = directory or os.environ.get("GPUBRIDGE_PEER")
    if given and os.access(Path(given) / "start.sh", os.X_OK):
        return BundledPeer(Path(given).resolve())
    return find_peer(directory)


def _begin(options: argparse.Namespace, peer: Contender | None) -> GpuReport:
    device, release = first_device()
    versions = {
        "gpubridge": __version__,
        "Python": Gpubridge.python,
        "driver": f"{_driver_version()} (CUDA {release})",
    }
    if peer is not None:
        versions["Triton"] = f"on Python {peer.python}"
    report = GpuReport(
        started=started_now(),
        commit=commit(),
        device=device.name,
        versions=versions,
        machine=describe_machine(),
        settings={"seconds": options.seconds, "smoke": options.smoke},
    )
    sizes = tuple(sorted({n for row in ROWS for n in row.sizes if _wanted(n, options)}))
    print("limits ...", file=sys.stderr, flush=True)
    report.limits = measure_limits(device, sizes, options.seconds)
    return report


def _wanted(nbytes: int, options: argparse.Namespace) -> bool:
    return not options.smoke or nbytes <= SMALL


def _driver_version() -> str:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.split("\n", 1)[0].strip()


def _run(report: GpuReport, options: argparse.Namespace, peer: Contender | None) -> None:
    """Measure row by row, both sides in turn; the report is written after each row."""
    deadline = time.monotonic() + options.budget
    device, _ = first_device()
    largest = max(n for row in ROWS for n in row.sizes if _wanted(n, options))
    contenders: list[Contender] = [Gpubridge()]
    if peer is not None:
        contenders.append(peer)
    report.results = results = [GpuResult(row) for row in ROWS]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpubridge-bench-")))
        memory = stack.enter_context(ClientMemory(device, largest))
        sides = []
        for contender in contenders:
            server = ServerProcess(contender, _MODELS, logs / contender.name)
            stack.enter_context(server)
            server.wait_ready()
            requests = Requests(contender.name, server.http_port, memory)
            sides.append(stack.enter_context(requests))
        for result in results:
            print(f"{result.row.name} ...", file=sys.stderr, flush=True)
            _measure(result, sides, options, deadline)
            _write(report, options.output, smoke=options.smoke)


def _measure(
    result: GpuResult, sides: Sequence[Requests], options: argparse.Namespace, deadline: float
) -> None:
    row = result.row
    for nbytes in row.sizes:
        if not _wanted(nbytes, options):
            continue
        for requests, times in zip(sides, (result.ours, result.theirs), strict=False):
            if times is result.theirs and not row.compared:
                continue
            if time.monotonic() > deadline:
                result.failures.append(f"no time left for {nbytes} bytes")
                return
            try:
                requests.check_row(row, nbytes)
                requests.time_row(row, nbytes, options.seconds / _WARM_UP)
                times[nbytes] = requests.time_row(row, nbytes, options.seconds)
            except (BridgeError, OSError) as error:
                # What Triton cannot do is told, and no failure of this run.
                found = result.notes if times is result.theirs else result.failures
                found.append(str(error))


def _write(report: GpuReport, folder: str, *, smoke: bool) -> None:
    stem = file_stem(folder, f"gpu {report.device}{' smoke' * smoke}")
    write_report(stem, report.as_document(), markdown_page(report))
    print(f"written: {stem}.json, .md", flush=True)


if __name__ == "__main__":
    sys.exit(main())
