"""What all models of a server share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpubridge.engine.custom_metrics import CustomMetrics
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.regions import Regions
from gpubridge.engine.stub_process import StartStub, StubProcess
from gpubridge.engine.workers import Workers
from gpubridge.telemetry.server_telemetry import ServerTelemetry

if TYPE_CHECKING:
    from gpubridge.engine.instance_owner import CallServer


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds that hold for every model.

    - ``output_limit``: bytes of output memory of one stub.
    - ``stub_timeout``: seconds that one ``execute`` may take; None for ever.
    - ``busy_poll_us``: microseconds that server and stub stay awake for each other; 0 for never.
    - ``restart_backoff_limit``: seconds that an instance waits at the most before it starts another
      stub.
    - ``input_placement``: where models get their inputs, if they do not say.
    - ``debug_ports``: where models wait for a debugger, by name.
    """

    output_limit: int
    stub_timeout: float | None
    busy_poll_us: int
    restart_backoff_limit: float
    input_placement: str | None = None
    debug_ports: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What every model and instance is given.

    - ``regions``: memory that any stub can be handed.
    - ``environments``: what stubs run on.
    - ``telemetry``: where they tell of themselves.
    - ``calls``: serves the models' calls of each other.
    - ``metrics``: what the models count.
    - ``devices``: the GPUs and the server's memory on them.
    - ``workers``: for what takes long.
    - ``start_stub``: starts the stub of an instance.
    """

    regions: Regions
    environments: ModelEnvironments
    limits: EngineLimits
    telemetry: ServerTelemetry
    calls: CallServer
    devices: DeviceMemory
    workers: Workers
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    start_stub: StartStub = StubProcess
