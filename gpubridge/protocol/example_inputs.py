"""The smallest inputs that a model takes, for examples in commands, errors and the API's document."""

from __future__ import annotations

from math import prod
from typing import Any

from gpubridge.config import ModelConfig, TensorSpec

WRITTEN_OUT = 16
"""Elements of an input that an example writes out."""
_OTHER_VALUES: dict[str, Any] = {"BYTES": "text", "BOOL": True}


def needed_inputs(config: ModelConfig) -> list[TensorSpec]:
    """Return the inputs of a first request: those that are not optional, else the first one."""
    return [spec for spec in config.inputs if not spec.optional] or list(config.inputs[:1])


def smallest_shape(spec: TensorSpec, config: ModelConfig) -> list[int]:
    """Return the smallest shape of an input, with a batch of one."""
    batch = [1] if config.max_batch_size else []
    return [*batch, *(max(dim, 1) for dim in spec.dims)]


def smallest_count(spec: TensorSpec, config: ModelConfig) -> int:
    """Return the number of elements of the smallest shape."""
    return prod(smallest_shape(spec, config))


def example_values(spec: TensorSpec, config: ModelConfig) -> list[Any]:
    """Return values for the smallest shape, the first ones of many."""
    return [_OTHER_VALUES.get(spec.datatype, 1)] * min(smallest_count(spec, config), WRITTEN_OUT)


def generate_example(config: ModelConfig, most: int) -> dict[str, Any]:
    """Return the members of a generate request with the first ``most`` of the needed inputs."""
    values = {spec.name: example_values(spec, config) for spec in needed_inputs(config)[:most]}
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}
