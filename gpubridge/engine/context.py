"""State that all models of a server share."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gpubridge.config import PythonBackendSettings, ServerSettings
from gpubridge.dataplane import SendTurn
from gpubridge.engine.custom_metrics import CustomMetrics
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.devices.region import Closable
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.in_flight import send_turn
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.regions import Regions
from gpubridge.engine.stub_process import StartStub, StubProcess
from gpubridge.engine.workers import Workers
from gpubridge.telemetry.server_telemetry import ServerTelemetry

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance
    from gpubridge.engine.stub_connection import StubConnection


class CallServer(Protocol):
    """Serves the calls that models make of other models."""

    def open(self, sock: socket.socket, link: StubConnection, caller: Instance, /) -> Closable:
        """Serve the channel ``sock``, which is owned from now on, until that is closed."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """State that every model and instance gets.

    ``settings``, ``backend``: bounds that hold for every model, and where models wait for a
    debugger.
    """

    regions: Regions
    environments: ModelEnvironments
    settings: ServerSettings
    backend: PythonBackendSettings
    telemetry: ServerTelemetry
    calls: CallServer
    devices: DeviceMemory
    workers: Workers
    threads: LoadThreads
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    turn: SendTurn = field(default_factory=send_turn)
    start_stub: StartStub = StubProcess
