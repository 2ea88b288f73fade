"""State shared by all models of a server."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gpubridge.config import PythonBackendSettings, ServerSettings
from gpubridge.dataplane import SendTurn
from gpubridge.engine.custom_metrics import CustomMetrics
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.ipc.in_flight import send_turn
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.supervisor.stub_process import StartStub, start_stub
from gpubridge.engine.workers import Workers
from gpubridge.telemetry.server_telemetry import ServerTelemetry

if TYPE_CHECKING:
    from gpubridge.engine.ipc.stub_connection import StubConnection
    from gpubridge.engine.response_cache import ResponseCache
    from gpubridge.engine.supervisor.instance import Instance


class CallEndpoint(Protocol):
    """The calls of one stub."""

    def give_up(self) -> None:
        """Fail all calls, and tell the stub that its requests are given up."""

    def close(self) -> None:
        """Cancel all calls: the stub is gone."""


class CallServer(Protocol):
    """Serves BLS calls: inference requests that models send to other models."""

    def open(
        self, sock: socket.socket, connection: StubConnection, caller: Instance, /
    ) -> CallEndpoint:
        """Serve the channel ``sock``, which this takes over, until the result is closed."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Objects that every model and instance gets.

    - ``settings``, ``backend``: limits of every model, and the debug ports.
    - ``cache``: None: every request is executed.
    """

    regions: Regions
    environments: ModelEnvironments
    settings: ServerSettings
    backend: PythonBackendSettings
    telemetry: ServerTelemetry
    calls: CallServer
    devices: DeviceManager
    workers: Workers
    threads: LoadThreads
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    turn: SendTurn = field(default_factory=send_turn)
    progress: LoadProgress = field(default_factory=LoadProgress)
    start_stub: StartStub = start_stub
    cache: ResponseCache | None = None
