"""Traces of requests: what happened to each when, and with which tensors.

A trace is a list of JSON objects that share its id, in Triton's form: first the model, then one
object per time stamp or tensor.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import orjson

from gpubridge.telemetry.settings import TraceSettings

_logger = logging.getLogger(__name__)
_MOST_BYTES = 256 << 20
"""Bytes of tensors that may wait to be written; beyond that traces are dropped."""

_MOST_JOBS = 10_000
_WRITTEN_BYTES = 1 << 20
"""Written at once; others get to run between."""
_CLOSE_SECONDS = 10.0
_SERVER = ""
"""The name that the server's own settings have among those of models."""

_clock = time.monotonic_ns


class TensorRecord(NamedTuple):
    """A tensor of a trace, which holds ``nbytes`` of memory.

    ``spell`` gives its values in the writer's thread, in pieces; None where its bytes are not to be
    looked at.
    """

    identifier: int
    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    spell: Callable[[], Iterable[str]] | None
    nbytes: int

    def to_json(self) -> Iterator[bytes]:
        """Yield the object that stands in the file, in pieces."""
        about = {"shape": ",".join(map(str, self.shape)), "dtype": self.datatype}
        whole = {"id": self.identifier, "activity": self.activity}
        yield orjson.dumps(whole)[:-1] + b',"tensor":{"name":' + orjson.dumps(self.name) + b","
        if self.spell is not None:
            yield b'"data":"'
            for number, piece in enumerate(self.spell()):
                yield (b"," if number else b"") + orjson.dumps(piece)[1:-1]
            yield b'",'
        yield orjson.dumps(about)[1:] + b"}"


Records = Sequence[dict[str, Any] | TensorRecord]


class TraceWriter:
    """Writes records in a thread that starts with the first; each file is begun anew once."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[str, bool, Records] | None] = queue.Queue(_MOST_JOBS)
        self._thread: threading.Thread | None = None
        self._files: dict[str, _ArrayFile] = {}
        self._numbers: dict[str, int] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped = 0

    def put(self, path: str, records: Records, *, numbered: bool = False) -> None:
        """Have records added to a file, or written to the next of ``path.0``, ``path.1`` and so on."""
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

    def close(self) -> None:
        """Wait until all is written, unless that hangs, and close the files."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._jobs.put(None, timeout=_CLOSE_SECONDS)
            except queue.Full:
                return
            thread.join(_CLOSE_SECONDS)

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
        pieces = _pieces_of(records)
        if numbered:
            number = self._numbers.get(path, 0)
            self._numbers[path] = number + 1
            file = _ArrayFile(f"{path}.{number}")
            try:
                file.append(pieces)
            finally:
                file.close()
            return
        if path not in self._files:
            self._files[path] = _ArrayFile(path)
        self._files[path].append(pieces)


class _ArrayFile:
    """A file that is one JSON array."""

    def __init__(self, path: str) -> None:
        # Without waiting, where it is a FIFO, for somebody who reads.
        how = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(path, how, 0o644)
        self._end = 1
        self._empty = True
        os.pwrite(self._fd, b"[]", 0)

    def append(self, pieces: Iterable[bytes]) -> None:
        """Add objects before the bracket that ends the array."""
        at = self._end
        held = bytearray(b"" if self._empty else b",")
        for piece in pieces:
            held += piece
            if len(held) > _WRITTEN_BYTES:
                at = self._write(held, at)
                held.clear()
        self._end = self._write(held + b"]", at) - 1
        self._empty = False

    def _write(self, data: bytes | bytearray, at: int) -> int:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], at + done)
        return at + done

    def close(self) -> None:
        os.close(self._fd)


def _pieces_of(records: Records) -> Iterator[bytes]:
    for number, record in enumerate(records):
        if number:
            yield b","
        if isinstance(record, TensorRecord):
            yield from record.to_json()
        else:
            yield orjson.dumps(record)


def _bytes_of(records: Records) -> int:
    return sum(r.nbytes for r in records if isinstance(r, TensorRecord))


class Trace:
    """One request's trace, in the making; ``sampler`` takes it when it is complete."""

    __slots__ = ("__weakref__", "_open", "_records", "identifier", "sampler", "stamps", "tensors")

    def __init__(self, sampler: Sampler, identifier: int, model: dict[str, Any]) -> None:
        level = sampler.settings.level
        self.stamps = "TIMESTAMPS" in level
        self.tensors = "TENSORS" in level
        self.identifier = identifier
        self.sampler = sampler
        self._open = True
        self._records: list[dict[str, Any] | TensorRecord] = [{"id": identifier, **model}]

    def stamp(self, name: str, nanoseconds: int = 0) -> None:
        """Note when something happened, in CLOCK_MONOTONIC nanoseconds; 0 for now."""
        if self.stamps:
            stamp = {"name": name, "ns": nanoseconds or _clock()}
            self._records.append({"id": self.identifier, "timestamps": [stamp]})

    def tensor(
        self,
        activity: str,
        spec: tuple[str, str, tuple[int, ...]],
        spell: Callable[[], Iterable[str]] | None,
        nbytes: int,
    ) -> None:
        """Note a tensor by name, datatype and shape; for the others see `TensorRecord`."""
        if self.tensors:
            self._records.append(TensorRecord(self.identifier, activity, *spec, spell, nbytes))

    def end(self) -> None:
        """Hand the trace over to be written; later calls do nothing."""
        if self._open:
            self._open = False
            self.sampler.collect(self._records)


class Sampler:
    """Chooses the requests that are traced by one set of settings, and gathers their traces."""

    def __init__(self, settings: TraceSettings, writer: TraceWriter) -> None:
        self.settings = settings
        self._writer = writer
        self._seen = 0
        self._gathered: list[Any] = []
        self._traces = 0
        self._retired = False

    @property
    def active(self) -> bool:
        """Return whether any request can be chosen."""
        return bool(self.settings.level) and self.settings.count != 0

    def chooses(self) -> bool:
        """Count a request, and return whether it is traced."""
        settings = self.settings
        if not self.active:
            return False
        self._seen += 1
        if self._seen % settings.rate:
            return False
        if settings.count > 0:
            self.settings = replace(settings, count=settings.count - 1)
        return True

    def collect(self, records: list[Any]) -> None:
        """Take a complete trace."""
        settings = self.settings
        if not settings.log_frequency:
            self._writer.put(settings.file, records)
            return
        self._gathered += records
        self._traces += 1
        if self._retired or self._traces >= settings.log_frequency:
            self.flush()

    def retire(self) -> None:
        """Choose no further requests: others take over, but the traces of some are not complete."""
        self._retired = True
        self.flush()

    def flush(self) -> None:
        """Have what was gathered written, be it as much as was asked for or not."""
        gathered, self._gathered = self._gathered, []
        self._traces = 0
        if gathered:
            self._writer.put(self.settings.file, gathered, numbered=True)


class Traces:
    """All settings for traces, those of the server and of models, and who is traced by them.

    A model's setting that was not given is the server's; a server's that was not given is the
    command line's. ``active``: any request may be traced; ``used``: that ever was so.
    """

    def __init__(self, flags: TraceSettings) -> None:
        self._flags = flags
        self._given: dict[str, dict[str, Any]] = {_SERVER: {}}
        self._writer = TraceWriter()
        self._samplers = {_SERVER: Sampler(flags, self._writer)}
        self._ids = itertools.count(1)
        self._known: WeakValueDictionary[int, Trace] = WeakValueDictionary()
        self.active = self.used = False
        self._refresh()

    def settings(self, model: str = _SERVER) -> TraceSettings:
        """Return the settings for a model, or the server's; ``count`` is what is left of it."""
        return self._sampler(model).settings

    def update(self, changes: Mapping[str, Any], model: str = _SERVER) -> None:
        """Change settings of a model or the server; None clears one, INVALID_ARG changes none."""
        given = {name: dict(values) for name, values in self._given.items()}
        own = {**given.get(model, {}), **changes}
        given[model] = {name: value for name, value in own.items() if value is not None}
        wanted = {name: self._merged(given, name) for name in given}
        for settings in wanted.values():
            settings.check()
        self._given = given
        for name, settings in wanted.items():
            fresh = name == model or "count" not in self._given[name]
            self._replace(name, settings, new_count=fresh and "count" in changes)
        self._refresh()

    def sample(self, model: str, version: int, request_id: str) -> Trace | None:
        """Return a new trace if the model's next request is to have one."""
        sampler = self._sampler(model)
        if not sampler.chooses():
            return None
        if not sampler.active:
            self._refresh()
        return self._new(sampler, _fields(model, version, request_id))

    def child(self, parent: Trace, model: str, version: int, request_id: str) -> Trace:
        """Return a new trace of a request that comes of another one; it goes where that one goes."""
        fields = _fields(model, version, request_id)
        return self._new(parent.sampler, {**fields, "parent_id": parent.identifier})

    def find(self, identifier: int) -> Trace | None:
        """Return the trace of a request that is still there."""
        return self._known.get(identifier)

    def close(self) -> None:
        """Write what is left and end the writer."""
        for sampler in self._samplers.values():
            sampler.flush()
        self._writer.close()

    def _new(self, sampler: Sampler, fields: dict[str, Any]) -> Trace:
        trace = Trace(sampler, next(self._ids), fields)
        self._known[trace.identifier] = trace
        return trace

    def _sampler(self, model: str) -> Sampler:
        return self._samplers.get(model) or self._samplers[_SERVER]

    def _merged(self, given: Mapping[str, Mapping[str, Any]], name: str) -> TraceSettings:
        return replace(self._flags, **{**given[_SERVER], **given[name]})

    def _replace(self, name: str, settings: TraceSettings, *, new_count: bool) -> None:
        """Have a model's, or the server's, requests chosen by other settings, if they are others."""
        old = self._samplers.get(name)
        if name != _SERVER and not self._given[name]:
            # The server's own sampler is its model's, too.
            del self._given[name]
            old = self._samplers.pop(name, None)
            if old is not None:
                old.retire()
            return
        if old is not None:
            if not new_count:
                settings = replace(settings, count=old.settings.count)
            if settings == old.settings:
                return
            old.retire()
        self._samplers[name] = Sampler(settings, self._writer)

    def _refresh(self) -> None:
        self.active = any(sampler.active for sampler in self._samplers.values())
        self.used = self.used or self.active


def _fields(model: str, version: int, request_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_name": model, "model_version": version}
    return {**fields, "request_id": request_id} if request_id else fields
