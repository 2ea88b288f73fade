"""Triton's defaults of a configuration.

Every function edits the message it is given. Observed on Triton 2.51 by comparing configurations with
the responses of ``GET /v2/models/{name}/config``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Literal

from gpubridge.config.model_config import ModelSettings
from gpubridge.schema import ProtoMessage, message_class

GpuFallback = Literal["none", "host"]
_PARAMETERS = tuple(each.name.upper() for each in fields(ModelSettings))
_DEFAULT_SEQUENCE_IDLE_MICROSECONDS = 1_000_000


def normalise_model(config: ProtoMessage) -> list[str]:
    """Fill in everything except instance groups; return notices about settings without effect."""
    repeated = _drop_repeated(config)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("ensemble_scheduling"):
        return repeated
    # Other backends interpret these settings themselves.
    notices = repeated
    if config.backend == "python":
        notices = [*notices, *_optimization_notices(config), *_misspelt_parameters(config)]
    for buffer in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(buffer):
            getattr(config.optimization, buffer).enable = True
    _normalise_scheduling(config)
    return notices


def _drop_repeated(config: ProtoMessage) -> list[str]:
    """Remove repeated equal declarations of an input or output, which published configurations have."""
    notices = []
    for field in ("input", "output"):
        tensors = getattr(config, field)
        first: dict[str, ProtoMessage] = {}
        repeated = [
            index
            for index, tensor in enumerate(tensors)
            if first.setdefault(tensor.name, tensor) is not tensor and first[tensor.name] == tensor
        ]
        for index in reversed(repeated):
            notices.append(
                f"model '{config.name}': {field} '{tensors[index].name}' is declared more than once "
                "in the same way; one declaration is enough"
            )
            del tensors[index]
    return notices


def _misspelt_parameters(config: ProtoMessage) -> list[str]:
    """Return notices about parameters with names close to those that the server reads."""
    notices = []
    for key in config.parameters:
        near = difflib.get_close_matches(key.upper(), _PARAMETERS, n=1, cutoff=0.8)
        if near and key not in _PARAMETERS:
            notices.append(
                f"model '{config.name}': the parameter '{key}' has no effect on the server; did you "
                f"mean {near[0]}?"
            )
    return notices


def _optimization_notices(config: ProtoMessage) -> list[str]:
    fields = [f"optimization.{field.name}" for field, _ in config.optimization.ListFields()]
    if config.platform:
        fields.insert(0, "platform")
    return [
        f"model '{config.name}': the field '{field}' has no effect on a Python model"
        for field in fields
    ]


def _normalise_scheduling(config: ProtoMessage) -> None:
    scheduling = config.WhichOneof("scheduling_choice")
    batcher = None
    if scheduling == "dynamic_batching":
        batcher = config.dynamic_batching
    elif scheduling == "sequence_batching":
        sequence = config.sequence_batching
        if sequence.max_sequence_idle_microseconds == 0:
            sequence.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_MICROSECONDS
        if sequence.HasField("oldest"):
            batcher = sequence.oldest
    if batcher is not None and config.max_batch_size > 0 and not batcher.preferred_batch_size:
        batcher.preferred_batch_size.append(config.max_batch_size)


def normalise_instance_groups(
    config: ProtoMessage,
    gpu_count: Callable[[], int],
    gpu_fallback: GpuFallback,
    notices: list[str],
) -> int:
    """Fill in the name, count, kind and GPUs of every group; add notices.

    Returns the number of groups that run on the host although they ask for GPUs.

    A model without groups gets one with the model's name; unnamed groups are named
    ``{model}_{index}``. Invalid values are left for validation to refuse. The GPUs are counted only if
    needed.
    """
    kinds = message_class("ModelInstanceGroup")
    if not config.instance_group:
        kind = kinds.KIND_GPU if gpu_count() > 0 else kinds.KIND_CPU
        config.instance_group.add(name=config.name, kind=kind)
    on_host = 0
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        where = f"model '{config.name}', instance group '{group.name}'"
        if group.kind == kinds.KIND_AUTO:
            found = _resolve_auto(group, gpu_count(), where)
            notices += found
            on_host += len(found)
        elif group.kind == kinds.KIND_GPU and gpu_fallback == "host" and gpu_count() == 0:
            group.kind = kinds.KIND_CPU
            del group.gpus[:]
            on_host += 1
            notices.append(f"{where}: KIND_GPU runs on the host, because there is no GPU")
        if group.kind == kinds.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpu_count()))
        notices += [
            f"{where}: the field '{field}' has no effect here"
            for field in ("host_policy", "secondary_devices")
            if getattr(group, field)
        ]
    return on_host


def _resolve_auto(group: ProtoMessage, gpu_count: int, where: str) -> list[str]:
    """Choose the GPUs if all requested ones exist, as the schema promises, else the host."""
    if gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus):
        group.kind = group.KIND_GPU
        return []
    asked = list(group.gpus)
    group.kind = group.KIND_CPU
    del group.gpus[:]
    if not asked:
        return []
    return [f"{where}: KIND_AUTO runs on the host, because not all of the GPUs {asked} exist"]
