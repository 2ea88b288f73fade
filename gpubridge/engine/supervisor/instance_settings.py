"""Placement of a model's instances, and the settings of their stubs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpubridge.config import InstanceGroup, ModelConfig, ModelSettings
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.scheduling.sequence_requests import sequence_batching, state_settings
from gpubridge.engine.supervisor.warmup import WarmupSample
from gpubridge.transport.messages import Completes
from gpubridge.transport.stub_settings import StubModel, StubSettings

if TYPE_CHECKING:
    from gpubridge.engine.supervisor.context import EngineContext

_UPLOADING_WINDOW = 3
"""Requests at a stub that uploads inputs: one executes, the next uploads, a third waits to upload."""


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """Settings of one instance and its stub.

    - ``name``: Triton's form, ``{model}_{group}_{index}``.
    - ``device``: the number of its GPU, if it has one.
    - ``least_window``: requests that its stub may always have at once.
    """

    name: str
    stub: StubSettings
    environment: StubEnvironment
    output_limit: int
    timeout: float | None
    device: int | None = None
    warmup: Sequence[WarmupSample] = ()
    least_window: int = 1

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.stub.model.name


def debugged(settings: Iterable[InstanceSettings], port: int) -> list[InstanceSettings]:
    """Make each instance wait for a debugger before it imports its model, without time limit.

    ``port``: port of the first instance; the others use the ports after it. 0: any free ports.
    """
    return [
        replace(
            entry,
            stub=replace(entry.stub, debug_port=port + index if port else 0),
            timeout=None,
        )
        for index, entry in enumerate(settings)
    ]


def place_instances(
    config: ModelConfig,
    version: int,
    directory: Path,
    environment: StubEnvironment,
    warmup: Sequence[WarmupSample],
    context: EngineContext,
) -> list[InstanceSettings]:
    """Give each instance of a model its name, its device and its ``initialize`` arguments."""
    placement = _input_placement(config, context)
    settings: list[InstanceSettings] = []
    model = _stub_model(config, version, directory)
    sharing = _input_sharing(config)
    model_config = config.to_spaced_json()
    for group in config.instance_groups:
        places = [device for device in group.gpus or (0,) for _ in range(group.count)]
        for index, device in enumerate(places):
            name = f"{group.name}_{index}"
            here = Completes.ELSEWHERE if settings else Completes.HERE
            stub = StubSettings(
                model=model,
                instance=name,
                arguments={
                    "model_config": model_config,
                    "model_instance_kind": group.kind.removeprefix("KIND_"),
                    "model_instance_name": name,
                    "model_instance_device_id": str(device),
                    "model_repository": str(directory),
                    "model_version": str(version),
                    "model_name": config.name,
                },
                completion=here if config.draft else Completes.NOWHERE,
                busy_poll_us=context.backend.busy_poll_us,
                input_placement=placement,
                input_sharing=sharing,
            )
            settings.append(
                InstanceSettings(
                    name,
                    stub,
                    environment,
                    context.settings.memory.output_arena_limit,
                    context.backend.execute_timeout_seconds,
                    device if group.kind == "KIND_GPU" else None,
                    warmup,
                    _least_window(group, placement),
                )
            )
    return settings


def _stub_model(config: ModelConfig, version: int, directory: Path) -> StubModel:
    """Describe the model for the stubs of all its instances."""
    version_dir = directory / str(version)
    own = version_dir / (config.default_model_filename or "model.py")
    backend = config.backend_file
    sequences = sequence_batching(config)
    return StubModel(
        name=config.name,
        version=version,
        backend=config.backend,
        path=str(own if backend is None else backend),
        directory=str(own.parent if backend is None else version_dir),
        outputs=[output.name for output in config.outputs],
        decoupled=config.decoupled,
        batched=config.max_batch_size > 0,
        iterative=sequences is not None and sequences.iterative,
        # The requests of a sequence follow each other.
        coroutines=_coroutines(config) if sequences is None else 1,
        states=[] if sequences is None else state_settings(sequences, directory),
    )


def _coroutines(config: ModelConfig) -> int:
    return int(ModelSettings.from_parameters(config.parameters, config.name).coroutines or 1)


def _input_placement(config: ModelConfig, context: EngineContext) -> str:
    """Return where the model receives its inputs: ``source``, ``device`` or ``host``."""
    settings = ModelSettings.from_parameters(config.parameters, config.name)
    forced = {"yes": "host", "no": "source"}.get(settings.force_cpu_only_input_tensors)
    return settings.input_placement or forced or context.backend.input_placement or "source"


def _least_window(group: InstanceGroup, placement: str) -> int:
    """Return how many requests a stub may always have at once.

    With several instances on a GPU, one uploads while another executes: requests then wait for the
    first idle instance.
    """
    uploads = group.kind == "KIND_GPU" and placement == "device" and group.count == 1
    return _UPLOADING_WINDOW if uploads else 1


def _input_sharing(config: ModelConfig) -> str:
    """Return ``copy`` or ``share`` for inputs in clients' memory; empty: share until it fails."""
    # Models with sequences are those that keep inputs.
    sequences = config.message.WhichOneof("scheduling_choice") == "sequence_batching"
    settings = ModelSettings.from_parameters(config.parameters, config.name)
    return settings.input_sharing or ("copy" if sequences else "")
