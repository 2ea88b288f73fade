"""Writes traces to files: in a thread of its own, so that no request waits for a disk.

A file is a JSON array at every moment but that of a write: what a crash leaves can be read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

__all__ = ["TensorRecord", "TraceWriter"]

_logger = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20
"""Bytes of tensors that may wait to be written; beyond that traces are dropped."""
_MOST_JOBS = 10_000
_CLOSE_SECONDS = 10.0


class TensorRecord(NamedTuple):
    """A tensor of a trace.

    ``spell`` gives its values as text, in the writer's thread; None where its bytes are not to be
    looked at. It holds ``nbytes`` of memory.
    """

    identifier: int
    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    spell: Callable[[], str] | None
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands in the file."""
        tensor = {"name": self.name}
        if self.spell is not None:
            tensor["data"] = self.spell()
        tensor["shape"] = ",".join(map(str, self.shape))
        tensor["dtype"] = self.datatype
        return {"id": self.identifier, "activity": self.activity, "tensor": tensor}


Records = Sequence[dict[str, Any] | TensorRecord]


class TraceWriter:
    """A thread that writes records, started with the first of them.

    Owns the files that it has begun; each is begun anew once, whatever was in it.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[str, bool, Records] | None] = queue.Queue(_MOST_JOBS)
        self._thread: threading.Thread | None = None
        self._files: dict[str, _ArrayFile] = {}
        self._numbers: dict[str, int] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped = 0

    def append(self, path: str, records: Records) -> None:
        """Have records added to a file."""
        self._put(path, records, numbered=False)

    def write_numbered(self, path: str, records: Records) -> None:
        """Have records written to the next of the files ``path.0``, ``path.1`` and so on."""
        self._put(path, records, numbered=True)

    def close(self) -> None:
        """Wait until all is written, and close the files."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def _put(self, path: str, records: Records, *, numbered: bool) -> None:
        nbytes = _bytes_of(records)
        with self._lock:
            full = self._waiting_bytes + nbytes > _MOST_BYTES and self._waiting_bytes > 0
            if not full:
                self._waiting_bytes += nbytes
        if not full:
            try:
                self._jobs.put_nowait((path, numbered, records))
            except queue.Full:
                full = True
                self._written(nbytes)
        if full:
            self._dropped += 1
            if self._dropped == 1:
                _logger.warning("traces are dropped: they come faster than %s takes them", path)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
            self._thread.start()

    def _written(self, nbytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= nbytes

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                break
            path, numbered, records = job
            try:
                self._write(path, records, numbered=numbered)
            except OSError as error:
                if path not in self._refused:
                    self._refused.add(path)
                    _logger.error("traces are lost: cannot write %s: %s", path, error.strerror)  # noqa: TRY400
            self._written(_bytes_of(records))
        for file in self._files.values():
            file.close()

    def _write(self, path: str, records: Records, *, numbered: bool) -> None:
        objects = [orjson.dumps(r.to_json() if isinstance(r, TensorRecord) else r) for r in records]
        if numbered:
            number = self._numbers.get(path, 0)
            self._numbers[path] = number + 1
            file = _ArrayFile(f"{path}.{number}")
            try:
                file.append(objects)
            finally:
                file.close()
            return
        if path not in self._files:
            self._files[path] = _ArrayFile(path)
        self._files[path].append(objects)


class _ArrayFile:
    """A file that is one JSON array."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._end = 1
        self._empty = True
        os.pwrite(self._fd, b"[]", 0)

    def append(self, objects: Sequence[bytes]) -> None:
        """Add objects before the bracket that ends the array."""
        text = b",".join(objects)
        data = text if self._empty else b"," + text
        view = memoryview(data + b"]")
        at = self._end
        while view:
            done = os.pwrite(self._fd, view, at)
            view = view[done:]
            at += done
        self._end += len(data)
        self._empty = False

    def close(self) -> None:
        os.close(self._fd)


def _bytes_of(records: Records) -> int:
    return sum(r.nbytes for r in records if isinstance(r, TensorRecord))
