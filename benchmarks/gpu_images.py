"""Command line: ``python -m benchmarks.gpu_images``; see docs/explanation/image-preprocessing.md."""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import importlib.util
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_image_limit import BareImages, bare_rate
from benchmarks.gpu_image_report import (
    BY_MODEL,
    ON_CPU,
    ON_DEVICE,
    OVER_HTTP,
    GpuImageReport,
    GpuImageRow,
)
from benchmarks.gpu_memory import first_device
from benchmarks.image_load import IMAGE_BYTES, ImageRequests, ask, ask_into, register_region
from benchmarks.image_models import BACKEND, CUPY, write_repository
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.serve import Gpubridge
from benchmarks.server_process import ServerProcess
from gpubridge import __version__
from gpubridge.bench.device_requests import ClientMemory
from gpubridge.cuda_ipc import DeviceInfo
from gpubridge.errors import BridgeError

_PHOTOS = Path(__file__).resolve().parent.parent / "examples" / "image_preproc" / "images"
_BATCHES = (1, 8, 32, 128)
_CONNECTIONS = 4
_REGION = "gpubridge_bench_pixels"
_WARM_UP = 1.0
_LATE = "no time left"
# Decoders differ in how they interpolate colours; what is served is to be what the limit makes.
_LEVEL = 1 / 255 / 0.224
# Make and kind of a model, and where its pixels go: a region, or None for HTTP.
_SERVED: tuple[tuple[str, str, dict[str, str | None]], ...] = (
    (BACKEND, "KIND_GPU", {OVER_HTTP: None, ON_DEVICE: _REGION}),
    (CUPY, "KIND_GPU", {BY_MODEL: _REGION}),
    (BACKEND, "KIND_CPU", {ON_CPU: None}),
)
_VISION = Path(__file__).resolve().parent / "torchvision_images.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 if everything was measured and reaches its minimum."""
    options = _parser().parse_args(arguments)
    try:
        report = _run(options)
    except BridgeError as error:
        print(error, file=sys.stderr)
        return 2
    stem = _keep(report, options.output)
    print(report.page())
    print(f"written: {stem}.json, .md", file=sys.stderr)
    return 1 if report.complaints else 0


def _keep(report: GpuImageReport, folder: str) -> Path:
    """Write what there is so far; return the path of its files, without an ending."""
    stem = file_stem(folder, f"gpu images {report.device}")
    write_report(stem, report.as_document(), report.page())
    return stem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_images",
        description="Measure photographs to tensors on this machine's first GPU.",
    )
    parser.add_argument("--output", metavar="DIR", default="benchmarks/results")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    parser.add_argument(
        "--budget", type=float, default=240.0, metavar="SECONDS", help="nothing begins after that"
    )
    parser.add_argument(
        "--batches",
        type=lambda text: tuple(int(word) for word in text.split(",")),
        default=_BATCHES,
        metavar="N,N",
    )
    return parser


def _run(options: argparse.Namespace) -> GpuImageReport:
    deadline = time.monotonic() + options.budget
    device, release = first_device()
    jpegs = [photo.read_bytes() for photo in sorted(_PHOTOS.glob("*.jpg"))]
    report = GpuImageReport(
        started=started_now(),
        commit=commit(),
        device=device.name,
        versions={"gpubridge": __version__, "CUDA": release, **_versions()},
        machine=describe_machine(),
        seconds=options.seconds,
    )
    report.rows = [GpuImageRow(batch) for batch in options.batches]
    for row in report.rows:
        if time.monotonic() > deadline:
            row.notes.append(f"the limit: {_LATE}")
            continue
        print(f"the limit, batch {row.batch} ...", file=sys.stderr, flush=True)
        batches = [_batch(jpegs, first, row.batch) for first in range(len(jpegs))]
        row.limit = bare_rate(device, batches, options.seconds)
        row.torchvision = _torchvision(row, options.seconds)
        _keep(report, options.output)
    for _ in _serve(device, jpegs, report.rows, options.seconds, deadline):
        _keep(report, options.output)
    return report


def _versions() -> dict[str, str]:
    names = [
        name
        for name in (d.metadata["Name"] for d in importlib.metadata.distributions())
        if name and name.lower().startswith(("nvidia-nvimgcodec", "torchvision", "pillow", "cupy"))
    ]
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def _batch(jpegs: Sequence[bytes], first: int, count: int) -> list[bytes]:
    return list(itertools.islice(itertools.cycle(jpegs), first, first + count))


def _torchvision(row: GpuImageRow, seconds: float) -> float | None:
    """Return torchvision's images/s, measured by a process of its own; None where it is not."""
    command = [sys.executable, str(_VISION), str(_PHOTOS), str(row.batch), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "it said nothing").rpartition("\n")[2]
        print(f"torchvision: {last}", file=sys.stderr)
        return None
    return float(done.stdout)


def _serve(
    device: DeviceInfo,
    jpegs: Sequence[bytes],
    rows: Sequence[GpuImageRow],
    seconds: float,
    deadline: float,
) -> Iterator[None]:
    """Measure the server: with the model on the GPU, by a model.py there, and on the CPU; yield after each."""
    most = max(len(jpegs), *(row.batch for row in rows))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpubridge-images-")))
        memory = stack.enter_context(ClientMemory(device, most * IMAGE_BYTES))
        for number, (make, kind, sides) in enumerate(_SERVED):
            if make == CUPY and importlib.util.find_spec("cupy") is None:
                print("model.py: CuPy is not installed", file=sys.stderr)
                continue
            if time.monotonic() > deadline:
                for row in rows:
                    row.notes += [f"{side}: {_LATE}" for side in sides]
                continue
            print(f"served, {make}, {kind} ...", file=sys.stderr, flush=True)
            repository = write_repository(folder / str(number), 1, make=make, kind=kind)
            log = folder / f"{number}.log"
            with ServerProcess(Gpubridge(), repository, log) as server:
                server.wait_ready()
                # The server's fallback to the CPU would be measured as the GPU.
                fell_back = "preprocessed on the CPU" in log.read_text()
                if kind == "KIND_GPU" and fell_back:
                    raise BridgeError(f"the model is not on the GPU:\n{log.read_text()}")
                if kind == "KIND_GPU":
                    _register(server, memory)
                    _check(device, jpegs, server, memory)
                _load(jpegs, server, rows, sides, seconds, deadline)
            yield


def _register(server: ServerProcess, memory: ClientMemory) -> None:
    handle = base64.b64encode(memory.target.handle).decode()
    described: dict[str, object] = {
        "raw_handle": {"b64": handle},
        "device_id": 0,
        "byte_size": memory.nbytes,
    }
    register_region(server.http_port, "cuda", _REGION, described)


def _load(
    jpegs: Sequence[bytes],
    server: ServerProcess,
    rows: Sequence[GpuImageRow],
    sides: Mapping[str, str | None],
    seconds: float,
    deadline: float,
) -> None:
    """Measure one server with batches of each size."""
    for row in rows:
        for side, region in sides.items():
            if time.monotonic() > deadline:
                row.notes.append(f"{side}: {_LATE}")
                continue
            requests = ImageRequests.of(jpegs, row.batch, region)
            try:
                requests.load(server, _CONNECTIONS, min(_WARM_UP, seconds))
                row.served[side] = requests.load(server, _CONNECTIONS, seconds)
            except BridgeError as error:
                row.notes.append(f"{side}: {error}")


def _check(
    device: DeviceInfo, jpegs: Sequence[bytes], server: ServerProcess, memory: ClientMemory
) -> None:
    """Check that answers, over HTTP and in the region, equal those of the limit's own path."""
    with BareImages(device, len(jpegs)) as bare:
        bare.run(jpegs)
        expected = bare.pixels(len(jpegs))
    memory.prepare(len(jpegs) * IMAGE_BYTES)
    answers = {"over HTTP": ask(server.http_port, jpegs)}
    ask_into(server.http_port, jpegs, _REGION)
    received = memory.received(len(jpegs) * IMAGE_BYTES)
    answers["in the region"] = np.frombuffer(received, np.float32).reshape(expected.shape)
    for where, pixels in answers.items():
        _compare(where, pixels, expected)


def _compare(where: str, pixels: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    apart = np.abs(pixels - expected)
    if not np.isfinite(apart).all() or apart.mean() > _LEVEL:
        raise BridgeError(
            f"pixels {where} differ by {apart.mean()} in the mean, expected {_LEVEL:.4f} at most"
        )


if __name__ == "__main__":
    sys.exit(main())
