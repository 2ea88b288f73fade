"""One instance of one version of one model runs where the developer is; all others as in a server."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.model_loader import ModelLoader, ModelSource, NotPrepared, PreparedModel
from gpubridge.engine.stub_process import RunningStub, StubProcess
from gpubridge.errors import ErrorCode, unavailable
from gpubridge.pb_utils import host
from gpubridge.stub.process import Stub
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.messages import Kind, control_message, decode_control

_logger = logging.getLogger(__name__)


def run_here(sock: socket.socket, note: Callable[[BaseException], None]) -> int:
    """Serve a stub's end of a channel in this thread until it closes; returns the exit code.

    ``note`` is told of what the model raises, in its thread, while the traceback is there.
    """
    channel = Channel(sock)
    try:
        message, fds = channel.receive()
        channel.send(control_message(Kind.CONNECTED))
        stub = Stub(channel, decode_control(message), fds, note)
        return stub.serve() if stub.initialize() else 1
    except ChannelClosed:
        return 0
    finally:
        host.detach()
        channel.close()


class StubHere:
    """A stub that runs in the thread that takes it from the queue; ``exited`` when that left it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Of another descriptor, since the stub's is closed under it.
        self._line = sock.dup()
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()

    def run(self, note: Callable[[BaseException], None]) -> None:
        """Serve the engine in this thread."""
        how = "was interrupted"
        try:
            how = f"exited with code {run_here(self._sock, note)}"
        finally:
            self._loop.call_soon_threadsafe(self._end, how)

    def kill(self, why: str | None = None) -> None:
        """Cut it off; the model's code, if it runs, is not disturbed."""
        del why
        try:
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It is closed already.
            pass

    def _end(self, how: str) -> None:
        self._line.close()
        if not self.exited.done():
            self.exited.set_result(how)


class Here:
    """Stub that runs in this process; the engine queues stubs, and None behind the last.

    ``instance``: the name of the instance that runs here; empty until its model is known.
    """

    def __init__(self) -> None:
        self.stubs: queue.SimpleQueue[StubHere | None] = queue.SimpleQueue()
        self.instance = ""
        self._started = False

    def start(
        self, environment: StubEnvironment, model: str, instance: str, sock: socket.socket
    ) -> RunningStub:
        """Start the stub of an instance, here if it is the one; UNAVAILABLE where it ran before."""
        if instance != self.instance:
            return StubProcess(environment, model, instance, sock)
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
        stub = StubHere(sock)
        self.stubs.put(stub)
        return stub


class OneInstanceLoader(ModelLoader):
    """Loads one version (None for the highest) and one instance of the model that runs here."""

    def __init__(
        self, here: Here, directory: Path, version: int | None, *loader: Any, **settings: Any
    ) -> None:
        super().__init__(*loader, **settings)
        self._here = here
        self._directory = directory
        self._version = version

    async def prepare(self, name: str, source: ModelSource) -> PreparedModel:
        """Read a model's configuration and choose its versions; raises as in a server."""
        prepared = await super().prepare(name, source)
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
        """Leave one instance of all that are configured; an ensemble has none."""
        if not config.instance_groups:
            return config
        group = config.instance_groups[0]
        group = replace(group, count=1, gpus=group.gpus[:1])
        self._here.instance = f"{group.name}_0"
        return replace(config, instance_groups=(group,))
