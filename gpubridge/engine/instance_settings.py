"""Placement of a model's instances, and the settings of their stubs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubridge.config import InstanceGroup, ModelConfig, ModelSettings
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.sequence_requests import sequence_stub_settings
from gpubridge.engine.warmup import WarmupSample

if TYPE_CHECKING:
    from gpubridge.engine.context import EngineContext

_UPLOADING_WINDOW = 3
"""Requests at a stub that uploads: one that runs, the next, whose inputs are copied meanwhile, and one
that is there when that begins, for the same."""


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """Settings by which an instance runs its stub.

    - ``name``: Triton's form, ``{model}_{group}_{index}``.
    - ``stub``: the fields of the INITIALIZE message: model path, version, ``initialize`` arguments.
    - ``device``: the number of its GPU, if it has one.
    - ``least_window``: requests that its stub may have at once, however long they take.
    """

    name: str
    stub: dict[str, Any]
    environment: StubEnvironment
    output_limit: int
    timeout: float | None
    device: int | None = None
    warmup: Sequence[WarmupSample] = ()
    least_window: int = 1


def debugged(settings: Iterable[InstanceSettings], port: int) -> list[InstanceSettings]:
    """Have each instance wait for a debugger before it imports its model, and hurry none of them.

    ``port``: of the first instance; the next ones have the ports after it. 0 for any free ones.
    """
    return [
        replace(entry, stub={**entry.stub, "debug_port": port + index if port else 0}, timeout=None)
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
    model_config = config.to_spaced_json()
    for group in config.instance_groups:
        places = [device for device in group.gpus or (0,) for _ in range(group.count)]
        for index, device in enumerate(places):
            name = f"{group.name}_{index}"
            stub = {
                **_stub_settings(config, version, directory),
                "instance": name,
                "busy_poll_us": context.backend.busy_poll_us,
                "input_placement": placement,
                "args": {
                    "model_config": model_config,
                    "model_instance_kind": group.kind.removeprefix("KIND_"),
                    "model_instance_name": name,
                    "model_instance_device_id": str(device),
                    "model_repository": str(directory),
                    "model_version": str(version),
                    "model_name": config.name,
                },
            }
            settings.append(
                InstanceSettings(
                    name,
                    stub,
                    environment,
                    context.settings.output_arena_limit,
                    context.backend.execute_timeout_seconds,
                    device if group.kind == "KIND_GPU" else None,
                    warmup,
                    _least_window(group, placement),
                )
            )
    return settings


def _stub_settings(config: ModelConfig, version: int, directory: Path) -> dict[str, Any]:
    """Return what the stubs of all instances are told."""
    version_dir = directory / str(version)
    own = version_dir / (config.default_model_filename or "model.py")
    backend = config.backend_file
    return {
        "path": str(own if backend is None else backend),
        "backend": config.backend,
        "model_dir": str(own.parent if backend is None else version_dir),
        "name": config.name,
        "version": version,
        "outputs": [output.name for output in config.outputs],
        "decoupled": config.decoupled,
        "input_sharing": _input_sharing(config),
        **sequence_stub_settings(config, directory),
    }


def _input_placement(config: ModelConfig, context: EngineContext) -> str:
    """Return where the model gets its inputs: ``source``, ``device`` or ``host``."""
    settings = ModelSettings.from_parameters(config.parameters, config.name)
    forced = {"yes": "host", "no": "source"}.get(settings.force_cpu_only_input_tensors)
    return settings.input_placement or forced or context.backend.input_placement or "source"


def _least_window(group: InstanceGroup, placement: str) -> int:
    """Return how many requests a stub may have at once, whatever it takes for them.

    Of several instances on a GPU one copies while another executes: there, requests had better wait
    for whichever is free first.
    """
    uploads = group.kind == "KIND_GPU" and placement == "device" and group.count == 1
    return _UPLOADING_WINDOW if uploads else 1


def _input_sharing(config: ModelConfig) -> str:
    """Return whether inputs in clients' memory are shared or copied; empty: until that fails."""
    # Models with sequences are those that keep inputs.
    sequences = config.message.WhichOneof("scheduling_choice") == "sequence_batching"
    settings = ModelSettings.from_parameters(config.parameters, config.name)
    return settings.input_sharing or ("copy" if sequences else "")
