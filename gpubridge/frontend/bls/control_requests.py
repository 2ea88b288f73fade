"""Control requests of models: metrics, device memory, readiness and loading of models."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from io import FileIO
from typing import Any

from gpubridge.engine.custom_metrics import MetricOwner
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.repository.locks import ASKED_BY
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.supervisor.instance import Instance, InstanceState
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.control import ControlTasks, is_ready
from gpubridge.protocol.grpc.control import model_version
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import control_message

_KINDS = ("counter", "gauge", "histogram")


class ControlRequests:
    """Handles the control requests of one stub.

    - ``caller``: the instance that the stub runs.
    - ``send``: sends a message with descriptors, which the caller keeps, unless the stub is gone.
    - ``catch_up``: handles messages of the stub that are received but not yet handled.
    - ``arena``: allocates the stub's device memory, if it has a GPU.
    """

    def __init__(
        self,
        repository: ModelRepository,
        tasks: ControlTasks,
        caller: Instance,
        send: Callable[..., None],
        catch_up: Callable[[], None],
        arena: StubArena | None,
    ) -> None:
        self._arena = arena
        self._repository = repository
        self._tasks = tasks
        self._caller = caller
        self._send = send
        self._owner = MetricOwner(caller, catch_up)

    def close(self) -> None:
        """Remove the metrics of a stub that is gone; loads that it has requested continue."""
        self._repository.metrics.leave(self._owner)
        # Breaks the reference cycle with the connection, so that no memory waits for the collector.
        self._owner.catch_up = lambda: None

    def close_family(self, fields: dict[str, Any]) -> None:
        """Close a family of metrics that the model has deleted; raises MalformedMessage."""
        self._repository.metrics.close_family(self._owner, _take(fields, "family", int))

    def take(self, fields: dict[str, Any], fds: Sequence[int]) -> None:
        """Begin to handle a request; the caller keeps the descriptors.

        Raises MalformedMessage for an unknown or malformed request.
        """
        number = _take(fields, "question", int)
        about = _take(fields, "about", str)
        try:
            if about == "family":
                self._open_family(number, fields)
            elif about == "metric":
                self._open_metric(number, fields)
            elif about == "ready":
                self._answer_ready(number, fields)
            elif about == "device_memory":
                self._allocate_memory(number, fields)
            elif about == "load":
                self._change(number, self._load(fields, fds))
            elif about == "unload":
                self._change(number, self._unload(fields))
            else:
                raise MalformedMessage(f"a question about {about!r}")
        except MalformedMessage:
            raise
        except BridgeError as error:
            self._refuse(number, error)

    def _answer(self, number: int, *fds: int, **fields: Any) -> None:
        self._send(control_message(CallKind.ANSWER, question=number, **fields), fds)

    def _refuse(self, number: int, error: BridgeError) -> None:
        self._answer(number, error=error.message, code=int(error.code))

    # -- metrics ---------------------------------------------------------------------------------

    def _open_family(self, number: int, fields: dict[str, Any]) -> None:
        family = _take(fields, "family", int)
        kind = _take(fields, "metric", str)
        if kind not in _KINDS or family in self._owner.memberships:
            raise MalformedMessage(f"family {family} of kind {kind!r}")
        name = _take(fields, "name", str)
        description = _take(fields, "text", str)
        self._repository.metrics.open_family(self._owner, family, name, description, kind)
        self._answer(number)

    def _open_metric(self, number: int, fields: dict[str, Any]) -> None:
        family = _take(fields, "family", int)
        labels = _take(fields, "labels", dict)
        buckets = fields.get("buckets") or []
        if family not in self._owner.memberships:
            raise MalformedMessage(f"a metric of family {family}")
        if not all(isinstance(value, str) for value in labels.values()):
            raise MalformedMessage("a label that is no string")
        if type(buckets) is not list or not all(type(bound) is float for bound in buckets):
            raise MalformedMessage("a bucket that is no number")
        metrics = self._repository.metrics
        cell = metrics.open_metric(self._owner, family, labels, buckets)
        segment = metrics.segment
        self._answer(
            number,
            segment.fd,
            size=segment.size,
            head=cell.head,
            unit=cell.unit,
            bounds=list(cell.bounds),
        )

    # -- device memory ---------------------------------------------------------------------------

    def _allocate_memory(self, number: int, fields: dict[str, Any]) -> None:
        nbytes, refused = _take(fields, "nbytes", int), _take(fields, "refused", str)
        if self._arena is None or nbytes <= 0:
            raise MalformedMessage(f"{nbytes} bytes of device memory")

        def done(offer: tuple[dict[str, Any], tuple[int, ...]] | BridgeError) -> None:
            if isinstance(offer, BridgeError):
                self._refuse(number, offer)
            else:
                members, fds = offer
                self._answer(number, *fds, **members)

        self._tasks.start(self._arena.offer(nbytes, refused), done)

    # -- models ----------------------------------------------------------------------------------

    def _answer_ready(self, number: int, fields: dict[str, Any]) -> None:
        name = _take(fields, "model", str)
        version = model_version(_take(fields, "version", str))
        try:
            model = self._repository.find(name, version)
        except BridgeError:
            self._answer(number, ready=False)
        else:
            self._tasks.start(
                is_ready(model), lambda ready: self._answer(number, ready=ready is True)
            )

    def _change(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the repository, and answer when it has ended."""
        context = copy_context()
        if self._caller.state is InstanceState.STARTING:
            # A load waits for this stub, so its request must not wait for what that load has locked.
            context.run(ASKED_BY.set, self._caller.settings.model)

        def done(error: BridgeError | None) -> None:
            if error is None:
                self._answer(number)
            else:
                self._refuse(number, error)

        context.run(self._tasks.start, work, done)

    def _load(self, fields: dict[str, Any], fds: Sequence[int]) -> Coroutine[Any, Any, None]:
        name = _take(fields, "model", str)
        config = _take(fields, "config", str) or None
        sizes = fields.get("files") or []
        self._repository.check_control()
        if not sizes:
            return self._repository.load(name, config)
        if not _are_sizes(sizes) or not fds:
            raise MalformedMessage("files of a model without their sizes or their bytes")
        return self._load_files(name, config, sizes, os.fdopen(os.dup(fds[0]), "rb", buffering=0))

    async def _load_files(
        self, name: str, config: str | None, sizes: list[tuple[str, int]], memory: FileIO
    ) -> None:
        # In a thread: the descriptor may be of any file, and large.
        files = await self._repository.threads.run(
            f"reading the files sent for model '{name}'", partial(_read_files, sizes, memory)
        )
        await self._repository.load(name, config, files)

    def _unload(self, fields: dict[str, Any]) -> Coroutine[Any, Any, None]:
        name = _take(fields, "model", str)
        dependents = _take(fields, "dependents", bool)
        self._repository.check_control()
        return self._repository.unload(name, dependents=dependents)


def _take(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise MalformedMessage(f"field {name!r}: expected {kind.__name__}, got {value!r}")
    return value


def _are_sizes(sizes: Any) -> bool:
    return type(sizes) is list and all(
        type(entry) is list
        and len(entry) == 2
        and type(entry[0]) is str
        and type(entry[1]) is int
        and entry[1] >= 0
        for entry in sizes
    )


def _read_files(sizes: list[tuple[str, int]], memory: FileIO) -> dict[str, bytes]:
    fd = memory.fileno()
    total = sum(size for _, size in sizes)
    if os.fstat(fd).st_size != total:
        raise _cut_short(total)
    files = {}
    at = 0
    for path, size in sizes:
        parts = []
        end = at + size
        while at < end:
            # Releases the interpreter's lock; mostly one read, whose result is not copied.
            part = os.pread(fd, end - at, at)
            if not part:
                raise _cut_short(total)
            parts.append(part)
            at += len(part)
        files[path] = b"".join(parts)
    return files


def _cut_short(total: int) -> BridgeError:
    return invalid(
        f"expected {total} bytes of files, got other memory; leave it alone until they are loaded"
    )
