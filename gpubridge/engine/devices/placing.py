"""Where a model's instances run, and what each of their stubs is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gpubridge.config import InstanceGroup, ModelConfig
from gpubridge.engine.context import EngineLimits
from gpubridge.engine.environment import StubEnvironment
from gpubridge.engine.instance_settings import InstanceSettings
from gpubridge.engine.sequence_requests import sequence_stub_settings
from gpubridge.engine.warmup import WarmupSample

_UPLOADING_WINDOW = 3
"""Requests at a stub that uploads: one that runs, the next, whose inputs are copied meanwhile, and one
that is there when that begins, for the same."""


class InstancePlacing:
    """Places the instances of one version of a model.

    - ``directory``: the model's directory.
    - ``limits``: bounds that hold for every model.
    """

    __slots__ = ("_directory", "_limits", "_version")

    def __init__(self, version: int, directory: Path, limits: EngineLimits) -> None:
        self._version = version
        self._directory = directory
        self._limits = limits

    def instances(
        self,
        config: ModelConfig,
        group: InstanceGroup,
        environment: StubEnvironment,
        warmup: Sequence[WarmupSample],
    ) -> list[InstanceSettings]:
        """Give each instance of a group its name, its device and its ``initialize`` arguments."""
        kind = group.kind.removeprefix("KIND_")
        devices = group.gpus or (0,)
        settings: list[InstanceSettings] = []
        version_dir = self._directory / str(self._version)
        own = version_dir / (config.default_model_filename or "model.py")
        backend = config.backend_file
        for device in devices:
            for _ in range(group.count):
                index = len(settings)
                name = f"{group.name}_{index}"
                stub = {
                    "path": str(own if backend is None else backend),
                    "backend": config.backend,
                    "model_dir": str(own.parent if backend is None else version_dir),
                    "name": config.name,
                    "version": self._version,
                    "instance": name,
                    "busy_poll_us": self._limits.busy_poll_us,
                    "outputs": [output.name for output in config.outputs],
                    "decoupled": config.decoupled,
                    "input_sharing": _input_sharing(config),
                    "input_placement": self._input_placement(config),
                    **sequence_stub_settings(config, self._directory),
                    "args": {
                        "model_config": json.dumps(config.to_dict()),
                        "model_instance_kind": kind,
                        "model_instance_name": name,
                        "model_instance_device_id": str(device),
                        "model_repository": str(self._directory),
                        "model_version": str(self._version),
                        "model_name": config.name,
                    },
                }
                settings.append(
                    InstanceSettings(
                        name,
                        stub,
                        environment,
                        self._limits.output_limit,
                        self._limits.stub_timeout,
                        device if group.kind == "KIND_GPU" else None,
                        warmup,
                        _least_window(group, stub["input_placement"]),
                    )
                )
        return settings

    def _input_placement(self, config: ModelConfig) -> str:
        """Return where the model gets its inputs: ``source``, ``device`` or ``host``."""
        parameters = config.parameters
        given = parameters.get("INPUT_PLACEMENT")
        if given is None and "FORCE_CPU_ONLY_INPUT_TENSORS" in parameters:
            given = "host" if parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] == "yes" else "source"
        return given or self._limits.input_placement or "source"


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
    return config.parameters.get("INPUT_SHARING", "copy" if sequences else "")
