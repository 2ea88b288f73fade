"""Regions of system shared memory, of which each connection of a load client has one in and one out."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.varied_rows import REGIONS
from gpubridge.errors import BridgeError

_FOLDER = Path("/dev/shm")  # noqa: S108  (where POSIX has shared memory on Linux)


@contextlib.contextmanager
def shared_regions(connections: int, nbytes: int) -> Iterator[tuple[str, ...]]:
    """Make the regions of so many connections; they are removed at the end. Yields their names."""
    names = tuple(f"{prefix}{number:04}" for prefix in REGIONS for number in range(connections))
    try:
        for name in names:
            np.arange(nbytes // 4, dtype=np.float32).tofile(_FOLDER / name)
        yield names
    finally:
        for name in names:
            (_FOLDER / name).unlink(missing_ok=True)


def register(names: tuple[str, ...], port: int) -> None:
    """Register regions with the server whose HTTP port is given; BridgeError if it refuses."""
    for name in names:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        region = {"key": f"/{name}", "offset": 0, "byte_size": (_FOLDER / name).stat().st_size}
        path = f"/v2/systemsharedmemory/region/{name}/register"
        try:
            connection.request("POST", path, json.dumps(region))
            answer = connection.getresponse()
            if answer.status != 200:
                raise BridgeError(f"POST {path}: status {answer.status}: {answer.read()!r}")
        finally:
            connection.close()


def clear_outputs(names: tuple[str, ...]) -> None:
    """Fill the regions of outputs with zeros."""
    for name in names[len(names) // 2 :]:
        np.memmap(_FOLDER / name, np.float32, "r+")[:] = 0


def check_output(names: tuple[str, ...], server: str) -> None:
    """Raise BridgeError unless the first output has what the first input has."""
    given, got = (
        np.memmap(_FOLDER / name, np.float32, "r") for name in (names[0], names[len(names) // 2])
    )
    if not np.array_equal(given, got):
        raise BridgeError(f"{server}: the output in {names[len(names) // 2]} is not the input")
