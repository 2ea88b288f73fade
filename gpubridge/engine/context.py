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
from gpubridge.telemetry.server_telemetry import ServerTelemetry

if TYPE_CHECKING:
    from gpubridge.engine.instance_owner import CallServer

__all__ = ["EngineContext", "EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds that hold for every model.

    Attributes
    ----------
    output_limit : int
        Bytes of output memory of one stub.
    stub_timeout : float or None
        Seconds that one ``execute`` may take; None for ever.
    busy_poll_us : int
        Microseconds that server and stub stay awake for each other; 0 for never.
    restart_backoff_limit : float
        Seconds that an instance waits at the most before it starts another stub.
    input_placement : {"source", "device", "host"} or None
        Where models get their inputs, if they do not say.
    debug_ports : mapping of str to int
        Where models wait for a debugger, by name.
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

    Attributes
    ----------
    regions : Regions
        Memory that any stub can be handed.
    environments : ModelEnvironments
        What stubs run on.
    telemetry : ServerTelemetry
        Where they tell of themselves.
    calls : CallServer
        Serves the models' calls of each other.
    metrics : CustomMetrics
        What the models count.
    devices : DeviceMemory
        The GPUs and the server's memory on them.
    start_stub : StartStub
        Starts the stub of an instance.
    """

    regions: Regions
    environments: ModelEnvironments
    limits: EngineLimits
    telemetry: ServerTelemetry
    calls: CallServer
    devices: DeviceMemory
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    start_stub: StartStub = StubProcess
