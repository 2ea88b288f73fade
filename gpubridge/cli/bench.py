"""``gpubridge bench``: a load test of a served model, and the measurement of zero-copy transfers."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from gpubridge.bench.measurement import MODELS, Measured, measure, read_sizes
from gpubridge.bench.pcie_meter import open_pcie_meter
from gpubridge.bench.report import document, draw, judge, table
from gpubridge.cli import bench_load
from gpubridge.cuda_ipc import DeviceInfo, probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from gpubridge.errors import BridgeError, invalid

_SIZES = "1MiB,4MiB,16MiB,64MiB,256MiB"
_HOLDS, _FAILS, _UNABLE = 0, 1, 2
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
    "verdict, and writes zero_copy.json and zero_copy.png. The exit code is 0 if no copy was found, "
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
    add("--output", type=Path, default=Path(), metavar="DIR", help="directory of the files")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return read_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        measured = _measured(device, options, models)
    except BridgeError as error:
        sys.stderr.write(f"the measurement failed: {error.message}\n")
        return _UNABLE
    finally:
        signal.signal(signal.SIGTERM, before)
    verdict = judge(measured)
    figures = json.dumps(document(measured, verdict), indent=1)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / "zero_copy"
    stem.with_suffix(".json").write_text(figures + "\n", encoding="utf-8")
    undrawn = draw(measured, verdict, stem.with_suffix(".png"))
    if options.json:
        sys.stdout.write(figures + "\n")
    else:
        sys.stdout.write(f"{table(measured)}\n\n{verdict.text()}\n")
    written = f"written: {stem}.json" + ("" if undrawn else f", {stem}.png")
    sys.stderr.write(f"{written}\n{undrawn}\n" if undrawn else f"{written}\n")
    return _HOLDS if verdict.holds else _FAILS


def _device() -> DeviceInfo | str:
    """Return the first GPU, or why it cannot be measured."""
    probe = probe_devices()
    if not probe.count:
        return probe.reason
    device = probe.devices[0]
    shares = check_device(device.uuid).memory
    return device if shares.works else f"{device.name}: memory cannot be shared: {shares.reason}"


def _measured(device: DeviceInfo, options: argparse.Namespace, models: Path) -> Measured:
    with ExitStack() as stack:
        meter = open_pcie_meter(device.uuid)
        if not isinstance(meter, str):
            stack.callback(meter.close)
        return measure(device, options.sizes, options.seconds, meter, models=models, tell=_tell)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM, which also ends the server."""
    del frame
    sys.exit(128 + number)
