"""Runs one instance of one version of a model in this process, and all others as a server does."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig, ServerSettings
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.repository.loader import ModelLoader, ModelSource, NotPrepared, PreparedModel
from gpubridge.engine.repository.one_file import OneFileModels
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.supervisor.stub_output import log_line
from gpubridge.engine.supervisor.stub_process import RunningStub, start_stub
from gpubridge.engine.workers import Workers
from gpubridge.errors import ErrorCode, invalid, unavailable
from gpubridge.pb_utils import host
from gpubridge.server import build_repository
from gpubridge.stub.array_batches import Executes
from gpubridge.stub.executor import Executor
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.stub.process import ModelOutput, Stub
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.messages import Kind, control_message
from gpubridge.transport.output_pieces import LogLine
from gpubridge.transport.stub_settings import decode_initialize

_logger = logging.getLogger(__name__)


class _OutlivedStub(Stub):
    """A stub whose process goes on after it."""

    def _make_executor(self, model: Executes, states: SequenceStates | None) -> Executor:
        executor = super()._make_executor(model, states)
        # Without the thread that sends results during a slow batch: it ends with the process.
        executor.start_thread = _start_nothing  # type: ignore[method-assign]
        return executor

    def _hide_from_collector(self) -> None:
        """Leave all objects in the collector's view: they are gone before the process is."""


def _start_nothing(run: Callable[[], None]) -> bool:
    """Stand for `Executor.start_thread`."""
    del run
    return True


def run_in_process(sock: socket.socket, output: ModelOutput) -> int:
    """Serve a stub's end of a channel in this thread until it closes; return the exit code.

    ``output.note`` is called with exceptions of the model, in its thread, before their traceback is lost;
    without it they are logged.
    """
    channel = Channel(sock)
    try:
        message, fds = channel.receive()
        channel.send(control_message(Kind.CONNECTED))
        settings, memory, _ = decode_initialize(message)
        stub = _OutlivedStub(channel, settings, memory, fds, output)
        try:
            return stub.serve() if stub.initialize() else 1
        finally:
            stub.drop()
    except ChannelClosed:
        return 0
    finally:
        host.detach()
        channel.close()


class InProcessStub:
    """A stub that runs in the thread that takes it from the queue; ``exited`` when it has ended.

    - ``log``: gets the lines of the model's `Logger`, on any thread.
    """

    def __init__(self, sock: socket.socket, log: Callable[[LogLine], None]) -> None:
        self._sock = sock
        self._log = log
        self.pid = os.getpid()
        self.started = time.monotonic()
        self.last_lines: tuple[str, ...] = ()
        self.output_token = ""
        # A duplicate, since the stub closes its own descriptor.
        self._duplicate = sock.dup()
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()

    def run(self, note: Callable[[BaseException], None] | None) -> None:
        """Serve the engine in this thread."""
        how = "was interrupted"
        try:
            how = f"exited with code {run_in_process(self._sock, ModelOutput(self._log, note))}"
        finally:
            try:
                self._loop.call_soon_threadsafe(self._end, how)
            except RuntimeError:
                # The engine waited no longer for code of the model, and has closed its loop.
                self._duplicate.close()

    def kill(self, why: str | None = None) -> None:
        """Close its channel; running code of the model is not interrupted."""
        del why
        try:
            self._duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It is closed already.
            pass

    def _end(self, how: str) -> None:
        self._duplicate.close()
        if not self.exited.done():
            self.exited.set_result(how)


class StubStarter:
    """Starts the stubs of a run; the engine queues those for this process, and None as the last.

    ``instance``: the instance that runs in this process; empty until its model is known.
    """

    def __init__(self) -> None:
        self.stubs: queue.SimpleQueue[InProcessStub | None] = queue.SimpleQueue()
        self.instance = ""
        self._started = False

    async def start(
        self,
        environment: StubEnvironment,
        model: str,
        instance: str,
        sock: socket.socket,
        again: bool,
    ) -> RunningStub:
        """Start the stub of an instance, maybe in this process; UNAVAILABLE if that one has ended."""
        if instance != self.instance:
            return await start_stub(environment, model, instance, sock, again)
        if self._started:
            sock.close()
            raise unavailable("the model has ended in this process")
        self._started = True
        if environment.python != sys.executable:
            _logger.warning(
                "the model runs in this interpreter, %s, not in its own, %s",
                sys.executable,
                environment.python,
            )
        stub = InProcessStub(sock, partial(log_line, model, instance))
        self.stubs.put(stub)
        return stub


class OneInstanceLoader(ModelLoader):
    """Loads one version (None for the highest) and one instance of the model in a directory."""

    def __init__(
        self,
        starter: StubStarter,
        directory: Path,
        version: int | None,
        *loader: Any,
        **settings: Any,
    ) -> None:
        super().__init__(*loader, **settings)
        self._starter = starter
        self._directory = directory
        self._version = version

    async def prepare(
        self, name: str, source: ModelSource, was: PreparedModel | None = None
    ) -> PreparedModel:
        """Read a model's configuration and choose its versions; raises as `ModelLoader.prepare`."""
        prepared = await super().prepare(name, source, was)
        if source.directory != self._directory:
            return prepared
        version = self._version or prepared.versions[-1]
        if version not in prepared.versions:
            served = ", ".join(map(str, prepared.versions))
            raise NotPrepared(
                f"load failed for model '{name}'",
                f"expected a version that is served ({served}), got {version}",
                ErrorCode.INVALID_ARG,
            )
        return replace(prepared, versions=(version,), config=self._alone(prepared.config))

    def _finish(self, prepared: PreparedModel, returned: str | None) -> ModelConfig:
        config = super()._finish(prepared, returned)
        return config if prepared.source.directory != self._directory else self._alone(config)

    def _alone(self, config: ModelConfig) -> ModelConfig:
        """Reduce a configuration to its first instance; an ensemble has none."""
        if not config.instance_groups:
            return config
        group = config.instance_groups[0]
        group = replace(group, count=1, gpus=group.gpus[:1])
        self._starter.instance = f"{group.name}_0"
        return replace(config, instance_groups=(group,))


@contextmanager
def one_model(text: str) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the directory of a model, and repositories with the other models of its Python file.

    ``text``: the directory, or ``APP.py:NAME``; without a name the file's first model.
    """
    files = OneFileModels()
    try:
        path, _, name = text.partition(".py:")
        found = files.directories(f"{path}.py" if name else text)
        chosen = [each for each in found if each.name == (name or found[0].name)]
        if found and not chosen:
            known = ", ".join(f"'{each.name}'" for each in found)
            raise invalid(
                f"expected a model that {path}.py declares, which are {known}, got '{name}'"
            )
        yield (chosen or [Path(text).resolve()])[0], [each.parent for each in found]
    finally:
        files.close()


@asynccontextmanager
async def engine(
    settings: ServerSettings,
    telemetry: ServerTelemetry,
    starter: StubStarter,
    loader: Callable[..., ModelLoader],
    close_seconds: Callable[[], float],
) -> AsyncIterator[ModelRepository]:
    """Run an engine, whose models are loaded or have failed, for as long as the block runs."""
    workers = Workers()
    repository = build_repository(settings, telemetry, workers, starter.start, loader)
    try:
        await repository.load_initial()
        yield repository
    finally:
        await repository.close(close_seconds())
        workers.close()
