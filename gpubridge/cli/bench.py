"""``gpubridge bench``: a load test of a served model, and the measurement of zero-copy transfers."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from gpubridge.bench.device_requests import PATHS, BenchPath
from gpubridge.bench.document import document, write_document
from gpubridge.bench.measurement import MODELS, Measured, Plan, measure, read_sizes
from gpubridge.bench.pcie_meter import open_pcie_meter
from gpubridge.bench.report import draw, judge, table
from gpubridge.cli import bench_load
from gpubridge.cuda_ipc import DeviceInfo, probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from gpubridge.errors import BridgeError, invalid

_SIZES = "1MiB,4MiB,16MiB,64MiB,256MiB"
_PATHS = {path.name: path for path in PATHS}
_HOLDS, _FAILS, _UNABLE, _INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT
_NEEDS = (
    "gpubridge bench zero-copy needs an NVIDIA GPU with its driver, cuda-python (pip install "
    "'gpubridge[gpu]'), and memory that processes may share (CUDA IPC); NVML, or nvidia-smi on "
    "PATH, shows what PCIe sees. gpubridge doctor says what is missing here.\n"
)


USAGE = "load URL MODEL [FLAG ...] | gpubridge bench zero-copy [FLAG ...]"
DESCRIPTION = (
    "load: send requests to a model of a server over HTTP, and print rate and latencies (p50, p90, p99, "
    "p99.9). The exit code is 1 if a request failed. zero-copy: send tensors of growing sizes through models on the first GPU, in CUDA shared memory and, for "
    "comparison, over the host, and read the GPU's counters of PCIe traffic. Prints a table and a "
    "verdict, and writes zero_copy.json, after each row, and zero_copy.png. The exit code is 0 if no copy was found, "
    "1 if one was, 2 if nothing was measured."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "benchmark",
        choices=("load", "zero-copy"),
        metavar="load|zero-copy",
        help="load a served model; or check that tensors on a GPU stay there, by counters of the bridge and of PCIe",
    )
    add(
        "target",
        nargs="*",
        metavar="URL MODEL",
        help="load: the server's HTTP port, and a model of it",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    bench_load.add_arguments(parser)
    add = parser.add_argument_group("zero-copy").add_argument
    add("--sizes", type=_sizes, default=_SIZES, metavar="LIST", help="sizes of the tensors")
    add(
        "--seconds",
        type=float,
        default=3.0,
        metavar="X",
        help="seconds of load for each path and size, longer if PCIe is sampled once a second (before driver 555)",
    )
    add(
        "--paths",
        type=_paths,
        default=PATHS,
        metavar="LIST",
        help=f"paths that are measured, of {','.join(_PATHS)}; the host path is the others' control",
    )
    add("--output", type=Path, default=Path(), metavar="DIR", help="directory of the files")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return read_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _paths(text: str) -> tuple[BenchPath, ...]:
    names = [word.strip() for word in text.split(",")]
    if unknown := [name for name in names if name not in _PATHS]:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(_PATHS)}, got {unknown[0]!r}")
    return tuple(path for name, path in _PATHS.items() if name in names)


def run(options: argparse.Namespace, models: Path = MODELS) -> int:
    """Run a benchmark, print and write the results; return the exit code.

    ``models``: the repository whose paths zero-copy measures.
    """
    if options.benchmark == "load":
        return bench_load.run(options)
    if options.target:
        raise invalid(f"'gpubridge bench zero-copy' expects flags only, got {options.target[0]!r}")
    device = _device()
    if isinstance(device, str):
        sys.stderr.write(f"nothing can be measured here: {device}\n{_NEEDS}")
        return _UNABLE
    options.output.mkdir(parents=True, exist_ok=True)
    results = _Results(options.output / "zero_copy")
    status = 0
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        _measure(device, options, models, results)
    except BridgeError as error:
        sys.stderr.write(f"the measurement failed: {error.message}\n")
        status = _UNABLE
    except KeyboardInterrupt:
        sys.stderr.write("the measurement was interrupted\n")
        status = _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return results.told(as_json=options.json, status=status)


class _Results:
    """Results that have been measured so far; ``stem`` is the path of its files, without an ending."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._measured: Measured | None = None

    def keep(self, measured: Measured) -> None:
        """Write the document of the rows so far."""
        self._measured = measured
        written = document(measured, judge(measured))
        write_document(written, self._stem.with_suffix(".json"))

    def told(self, *, as_json: bool, status: int) -> int:
        """Print and draw what there is; return the exit code, ``status`` if that is not 0."""
        measured = self._measured
        if measured is None:
            return status or _UNABLE
        verdict = judge(measured)
        undrawn = draw(measured, verdict, self._stem.with_suffix(".png"))
        if as_json:
            sys.stdout.write(self._stem.with_suffix(".json").read_text(encoding="utf-8"))
        else:
            sys.stdout.write(f"{table(measured)}\n\n{verdict.text()}\n")
        written = f"written: {self._stem}.json" + ("" if undrawn else f", {self._stem}.png")
        sys.stderr.write(f"{written}\n{undrawn}\n" if undrawn else f"{written}\n")
        return status or (_HOLDS if verdict.holds else _FAILS)


def _device() -> DeviceInfo | str:
    """Return the first GPU, or why it cannot be measured."""
    probe = probe_devices()
    if not probe.count:
        return probe.reason
    device = probe.devices[0]
    shares = check_device(device.uuid).memory
    return device if shares.works else f"{device.name}: memory cannot be shared: {shares.reason}"


def _measure(
    device: DeviceInfo, options: argparse.Namespace, models: Path, results: _Results
) -> None:
    plan = Plan(options.sizes, options.seconds, options.paths)
    with ExitStack() as stack:
        meter = open_pcie_meter(device.uuid)
        if not isinstance(meter, str):
            stack.callback(meter.close)
        measure(device, plan, meter, models=models, tell=_tell, keep=results.keep)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM, which also ends the server."""
    del frame
    sys.exit(128 + number)
