"""Traces of requests: time stamps and tensors in files, or spans for OpenTelemetry.

A trace in a file is a list of JSON objects with its id, in Triton's format: first the model, then one object per
time stamp or tensor.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import orjson

from gpubridge.dataplane import TraceSampling
from gpubridge.errors import unavailable, unsupported
from gpubridge.telemetry.settings import TraceSettings
from gpubridge.telemetry.spans import Span, SpanContext, SpanTrace, parse_context

if TYPE_CHECKING:
    from gpubridge.telemetry.otlp import OtlpExport

_logger = logging.getLogger(__name__)
_MOST_BYTES = 256 << 20
"""Bytes of unwritten tensors above which traces are dropped."""

_MOST_JOBS = 10_000
_WRITTEN_BYTES = 1 << 20
"""Bytes written at once, so that other threads run between writes."""
_CLOSE_SECONDS = 10.0
_SERVER = ""
"""The key of the server's settings among those of models."""

_clock = time.monotonic_ns


class TensorRecord(NamedTuple):
    """A tensor of a trace, which keeps ``nbytes`` of memory.

    ``spell`` yields the text of its values in the writer's thread; None if its bytes are not readable.
    """

    identifier: int
    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    spell: Callable[[], Iterable[str]] | None
    nbytes: int

    def to_json(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces."""
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
    """Writes records in a thread, started by the first; truncates each file once."""

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
        """Append records to a file, or write them to the next of ``path.0``, ``path.1`` and so on."""
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
            thread = threading.Thread(target=self._work, name="traces", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The next trace tries it again; these wait.
                _logger.warning("traces wait to be written: %s", error)
                return
            self._thread = thread

    def close(self) -> None:
        """Wait until all records are written, up to a time limit, and close the files."""
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
                self._refused.discard(path)
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
            file = _ArrayFile(f"{path}.{number}")
            try:
                file.append(pieces)
            finally:
                file.close()
            self._numbers[path] = number + 1
            return
        if path not in self._files:
            self._files[path] = _ArrayFile(path)
        self._files[path].append(pieces)


class _ArrayFile:
    """A file that is one JSON array."""

    def __init__(self, path: str) -> None:
        # Non-blocking, so that a FIFO without a reader does not hang.
        how = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(path, how, 0o644)
        self._end = 1
        self._empty = True
        try:
            self._write(b"[]", 0)
        except OSError:
            self.close()
            raise

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append objects before the closing bracket; all of them, or none where that raises OSError."""
        at = self._end
        held = bytearray(b"" if self._empty else b",")
        try:
            for piece in pieces:
                held += piece
                if len(held) > _WRITTEN_BYTES:
                    at = self._write(held, at)
                    held.clear()
            self._end = self._write(held + b"]", at) - 1
        except OSError:
            # The disk is full, for example. What the bracket takes was there before.
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
                self._write(b"]", self._end)
            raise
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
    """The incomplete trace of one request; passed to ``sampler`` when complete."""

    __slots__ = (
        "__weakref__", "_open", "_records", "identifier", "model", "sampler", "stamps", "tensors",
    )  # fmt: skip

    context = ""

    def __init__(self, sampler: Sampler, identifier: int, model: dict[str, Any]) -> None:
        self.model = model["model_name"]
        level = sampler.settings.level
        self.stamps = "TIMESTAMPS" in level
        self.tensors = "TENSORS" in level
        self.identifier = identifier
        self.sampler = sampler
        self._open = True
        self._records: list[dict[str, Any] | TensorRecord] = [{"id": identifier, **model}]

    def stamp(self, name: str, nanoseconds: int = 0, **_: Any) -> None:
        """Add a time stamp in CLOCK_MONOTONIC nanoseconds; 0 for now."""
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
        """Add a tensor with its name, datatype and shape; see `TensorRecord`."""
        if self.tensors:
            self._records.append(TensorRecord(self.identifier, activity, *spec, spell, nbytes))

    def fail(self, message: str) -> None:
        """Ignore an error: these traces have none."""

    def add(self, parent: int, span: Span) -> None:
        """Ignore a span of the model's process."""

    def end(self) -> None:
        """Complete the trace, once."""
        if self._open:
            self._open = False
            self.sampler.collect(self._records)


AnyTrace = Trace | SpanTrace


class Sampler:
    """Chooses the requests to trace by one set of settings, and collects their traces."""

    def __init__(
        self, settings: TraceSettings, writer: TraceWriter, sampling: TraceSampling | None = None
    ) -> None:
        self.settings = settings
        self._writer = writer
        self._sampling = sampling or TraceSampling()
        self._sampling.restart(settings.rate if self.active else 0)
        self._gathered: list[Any] = []
        self._traces = 0
        self._retired = False

    @property
    def active(self) -> bool:
        """Return whether any request may be traced."""
        return self.settings.traced and self.settings.count != 0

    def chooses(self) -> bool:
        """Count a request; return whether it is traced."""
        settings = self.settings
        if not self.active:
            return False
        if not self._sampling.choose():
            return False
        if settings.count > 0:
            self.settings = replace(settings, count=settings.count - 1)
            if not self.active:
                self._sampling.restart(0)
        return True

    def collect(self, records: list[Any]) -> None:
        """Add a complete trace."""
        settings = self.settings
        if not settings.log_frequency:
            self._writer.put(settings.file, records)
            return
        self._gathered += records
        self._traces += 1
        if self._retired or self._traces >= settings.log_frequency:
            self.flush()

    def retire(self) -> None:
        """Stop choosing requests; incomplete traces are still collected."""
        self._retired = True
        self.flush()

    def flush(self) -> None:
        """Write the collected traces, also fewer than ``log_frequency``."""
        gathered, self._gathered = self._gathered, []
        self._traces = 0
        if gathered:
            self._writer.put(self.settings.file, gathered, numbered=True)


class Traces:
    """Trace settings of the server and of models, and their samplers.

    Settings not given for a model are the server's; those not given for the server are the command
    line's. ``used``: some request could be traced at any time before; ``sampling``: the requests that
    Python has to see.

    Raises BridgeError: UNAVAILABLE if OpenTelemetry is wanted and not installed.
    """

    def __init__(self, flags: TraceSettings) -> None:
        self._flags = flags
        if flags.level and not flags.traced:
            _logger.warning("no traces are written: --trace-config=triton,file=PATH is not given")
        self._given: dict[str, dict[str, Any]] = {_SERVER: {}}
        self._writer = TraceWriter()
        self._export = _export(flags) if flags.mode == "opentelemetry" else None
        self.sampling = TraceSampling()
        self.sampling.contexts = self._export is not None
        self._samplers = {_SERVER: Sampler(flags, self._writer, self.sampling)}
        self._ids = itertools.count(1)
        self._known: WeakValueDictionary[int, AnyTrace] = WeakValueDictionary()
        self.used = False
        self._refresh()

    @property
    def active(self) -> bool:
        """Return whether some request may be traced."""
        return self.sampling.active

    def settings(self, model: str = _SERVER) -> TraceSettings:
        """Return the settings of a model or the server; ``count`` is the number of remaining traces."""
        return self._sampler(model).settings

    def update(self, changes: Mapping[str, Any], model: str = _SERVER) -> None:
        """Change settings of a model or the server; None clears one; raises INVALID_ARG.

        The mode is fixed: raises UNSUPPORTED for another one.
        """
        mode = changes.get("mode", self._flags.mode)
        if mode != self._flags.mode:
            raise unsupported(
                f"trace_mode: expected '{self._flags.mode}', the mode of the server, got '{mode}'"
            )
        given = {name: dict(values) for name, values in self._given.items()}
        own = {**given.get(model, {}), **changes, "mode": None}
        given[model] = {name: value for name, value in own.items() if value is not None}
        wanted = {name: self._merged(given, name) for name in given}
        for settings in wanted.values():
            settings.check()
        self._given = given
        for name, settings in wanted.items():
            fresh = name == model or "count" not in self._given[name]
            self._replace(name, settings, new_count=fresh and "count" in changes)
        self._refresh()

    def sample(
        self, model: str, version: int, request_id: str, headers: tuple[bytes, bytes] | None = None
    ) -> AnyTrace | None:
        """Count a request of a model; return its trace if it is chosen.

        ``headers``: its traceparent and tracestate, whose choice precedes that of the settings.
        """
        sampler = self._sampler(model)
        parent = None if headers is None else parse_context(*headers)
        if parent is not None:
            if not parent.sampled or not sampler.settings.level:
                return None
        elif not sampler.chooses():
            return None
        if not sampler.active:
            self._refresh()
        return self._new(sampler, _fields(model, version, request_id), parent)

    def child(
        self, parent: AnyTrace, model: str, version: int, request_id: str, span: int = 0
    ) -> AnyTrace:
        """Return the trace of a request caused by another traced one, with the same sampler.

        ``span``: the span of the model's process that caused it, if any.
        """
        fields = _fields(model, version, request_id)
        cause = parent.span(span) if isinstance(parent, SpanTrace) else None
        fields["parent_id"] = parent.identifier
        return self._new(parent.sampler, fields, cause)

    def find(self, identifier: int) -> AnyTrace | None:
        """Return an incomplete trace by its id."""
        return self._known.get(identifier)

    def close(self) -> None:
        """Write the collected traces and close the writer."""
        for sampler in self._samplers.values():
            sampler.flush()
        self._writer.close()
        if self._export is not None:
            self._export.close()

    def _new(
        self, sampler: Sampler, fields: dict[str, Any], parent: SpanContext | None
    ) -> AnyTrace:
        number, export = next(self._ids), self._export
        trace: AnyTrace
        if export is None:
            trace = Trace(sampler, number, fields)
        else:
            caused = "parent_id" in fields
            trace = SpanTrace(sampler, number, fields, parent, export.put, caused=caused)
        self._known[trace.identifier] = trace
        return trace

    def _sampler(self, model: str) -> Sampler:
        return self._samplers.get(model) or self._samplers[_SERVER]

    def _merged(self, given: Mapping[str, Mapping[str, Any]], name: str) -> TraceSettings:
        return replace(self._flags, **{**given[_SERVER], **given[name]})

    def _replace(self, name: str, settings: TraceSettings, *, new_count: bool) -> None:
        """Replace the sampler of a model or the server if its settings have changed."""
        old = self._samplers.get(name)
        if name != _SERVER and not self._given[name]:
            # Without own settings, a model uses the server's sampler.
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
        sampling = None if name else self.sampling
        self._samplers[name] = Sampler(settings, self._writer, sampling)

    def _refresh(self) -> None:
        samplers, sampling = self._samplers.values(), self.sampling
        sampling.active = any(
            sampler.active or (sampling.contexts and bool(sampler.settings.level))
            for sampler in samplers
        )
        sampling.every = len(samplers) > 1
        self.used = self.used or self.active


def _fields(model: str, version: int, request_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_name": model, "model_version": version}
    return {**fields, "request_id": request_id} if request_id else fields


def _export(flags: TraceSettings) -> OtlpExport:
    """Return what exports spans; raises UNAVAILABLE without OpenTelemetry."""
    try:
        from gpubridge.telemetry.otlp import OtlpExport  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise unavailable(
            f"--trace-config mode=opentelemetry: the package {error.name} is missing: pip install "
            "'gpubridge[otel]'"
        ) from error
    return OtlpExport(flags.opentelemetry)
