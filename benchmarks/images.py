"""Command line: ``python -m benchmarks.images [--peer DIR]``; see README.md, Images."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from benchmarks import image_models
from benchmarks.figures import draw
from benchmarks.image_load import IMAGE_BYTES, ImageRequests, ask, register_region
from benchmarks.image_models import write_repository
from benchmarks.image_rows import BACKEND, OURS_PILLOW, TRITON, ImageReport, ImageRow
from benchmarks.image_steps import time_steps
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.peer import find_peer
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender, ServerProcess
from gpubridge import __version__
from gpubridge.errors import BridgeError

_PHOTOS = Path(__file__).resolve().parent.parent / "examples" / "image_preproc" / "images"
_BATCHES = (1, 2, 4, 8, 16, 32)
_INSTANCES = (1, 2)
_SCALING_BATCH = 8
_REGION = "gpubridge_bench_pixels"
# Of an instance, so that requests wait and dynamic batches form.
_CONNECTIONS = 4
_WARM_UP = 0.5
# Resizing rounds to whole levels, and the ways to a crop differ by one; the widest after normalising.
_ONE_LEVEL = 1 / 255 / 0.224 + 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 if everything reaches its minimum."""
    options = _parser().parse_args(arguments)
    try:
        report = _run(options)
    except BridgeError as error:
        print(error, file=sys.stderr)
        return 2
    stem = file_stem(options.output, "images quick" if options.quick else "images")
    write_report(stem, report.as_document(), report.page())
    draw(report.as_document(), stem.with_suffix(".png"))
    print(report.page())
    print(f"written: {stem}.json, .md, with matplotlib .png", file=sys.stderr)
    return 1 if report.complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.images",
        description="Measure photographs to tensors on CPUs, and Triton with a Pillow model beside it.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument("--output", metavar="DIR", default="benchmarks/results")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=_numbers, default=_BATCHES, metavar="N,N")
    parser.add_argument("--instances", type=_numbers, default=_INSTANCES, metavar="N,N")
    parser.add_argument("--quick", action="store_true", help="one short round: a smoke test")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _run(options: argparse.Namespace) -> ImageReport:
    if options.quick:
        options.seconds, options.rounds, options.batches = 1.0, 1, (1, 8)
    jpegs = [photo.read_bytes() for photo in sorted(_PHOTOS.glob("*.jpg"))]
    peer = find_peer(options.peer)
    versions = {
        "gpubridge": f"{__version__} on Python {Gpubridge.python}",
        "Pillow": importlib.metadata.version("pillow"),
    }
    if peer is not None:
        versions["Triton"] = f"on Python {peer.python}"
    report = ImageReport(
        started=started_now(),
        commit=commit(),
        machine=describe_machine(),
        versions=versions,
        settings={"seconds": options.seconds, "rounds": options.rounds},
        steps=time_steps(jpegs),
    )
    rows: list[ImageRow] = []
    report.rows = rows
    for instances in options.instances:
        rows += _measure(jpegs, instances, peer, options)
    report.scaling = _scale(jpegs, options)
    return report


def _measure(
    jpegs: Sequence[bytes], instances: int, peer: Contender | None, options: argparse.Namespace
) -> list[ImageRow]:
    """Return the rows of one number of instances: all servers are up, one is loaded at a time."""
    sides: list[tuple[str, Contender, str]] = [
        (BACKEND, Gpubridge(), image_models.BACKEND),
        (OURS_PILLOW, Gpubridge(), image_models.PILLOW),
    ]
    if peer is not None:
        sides.append((TRITON, peer, image_models.PILLOW))
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpubridge-images-")))
        servers = {}
        for index, (side, contender, make) in enumerate(sides):
            repository = write_repository(folder / str(index), instances, make=make)
            server = ServerProcess(contender, repository, folder / f"{index}.log")
            servers[side] = stack.enter_context(server)
            server.wait_ready()
        _compare(jpegs, servers)
        cases = [(batch, _CONNECTIONS * instances) for batch in options.batches]
        if instances == 1:
            cases.insert(0, (1, 1))
        for batch, connections in cases:
            print(f"{instances} instances, batch {batch} ...", file=sys.stderr, flush=True)
            row = ImageRow(instances, batch, connections, {side: [] for side in servers})
            requests = ImageRequests.of(jpegs, batch)
            for server in servers.values():
                requests.load(server, connections, _WARM_UP)
            for _ in range(options.rounds):
                for side, server in servers.items():
                    figures = requests.load(server, connections, options.seconds)
                    row.rounds[side].append(figures)
            rows.append(row)
        _compare(jpegs, servers)
    return rows


def _compare(jpegs: Sequence[bytes], servers: dict[str, ServerProcess]) -> None:
    """All sides have to make the same of the photographs, within one level."""
    answers = {side: ask(server.http_port, jpegs) for side, server in servers.items()}
    for side, pixels in answers.items():
        apart = np.abs(pixels - answers[OURS_PILLOW]).max()
        if apart > _ONE_LEVEL:
            raise BridgeError(
                f"{side}: pixels differ from Pillow's by {apart}, expected one level at most"
            )


def _scale(jpegs: Sequence[bytes], options: argparse.Namespace) -> list[float]:
    """Return images/s of two instances of one thread each over those of one, round by round.

    The pixels go to this process's shared memory: sending them over sockets would take processor time
    from the second instance.
    """
    print("two instances and one, of one thread ...", file=sys.stderr, flush=True)
    requests = ImageRequests.of(jpegs, _SCALING_BATCH, _REGION)
    with ExitStack() as stack:
        memory = SharedMemory(create=True, size=_SCALING_BATCH * IMAGE_BYTES)
        stack.callback(memory.unlink)
        stack.callback(memory.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpubridge-images-")))
        servers = []
        for instances in (1, 2):
            repository = write_repository(
                folder / str(instances), instances, make=image_models.BACKEND, THREADS="1"
            )
            log = folder / f"{instances}.log"
            servers.append(stack.enter_context(ServerProcess(Gpubridge(), repository, log)))
            servers[-1].wait_ready()
            register_region(
                servers[-1].http_port,
                "system",
                _REGION,
                {"key": f"/{memory.name.lstrip('/')}", "offset": 0, "byte_size": memory.size},
            )
            requests.load(servers[-1], 4, _WARM_UP)
        ratios = []
        for _ in range(options.rounds):
            one, two = (requests.load(server, 4, options.seconds).images for server in servers)
            ratios.append(two / one)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
