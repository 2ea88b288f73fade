"""What a valid configuration asks for that this version does not do yet."""

from __future__ import annotations

from collections.abc import Iterator

from gpubridge.config.model_config import ModelConfig
from gpubridge.config.schema import ProtoMessage

__all__ = ["unsupported_features"]

# Top-level fields that are served nowhere: a field counts when it is present and not empty.
_FIELDS = {
    "batch_input": "no batch inputs are made",
    "batch_output": "outputs are not scattered",
    "model_operations": "no operation libraries are loaded",
    "cc_model_filenames": "one model file is used on every GPU",
}


def unsupported_features(config: ModelConfig) -> list[str]:
    """Return one sentence for each thing `config` asks for that this version does not do.

    Each names the model and the field, and says what happens instead. An empty list means that
    the configuration is served in full; whether the others refuse the model or warn is the
    caller's decision.
    """
    return [
        f"model '{config.name}': the field '{field}' is not supported yet: {instead}"
        for field, instead in _unsupported_fields(config.message)
    ]


def _unsupported_fields(message: ProtoMessage) -> Iterator[tuple[str, str]]:
    present = {field.name for field, _ in message.ListFields()}
    for name, instead in _FIELDS.items():
        if name in present:
            yield name, instead
    if message.response_cache.enable:
        yield "response_cache.enable", "every request is executed"
    if message.model_repository_agents.agents:
        yield "model_repository_agents", "no agents are run"
    yield from _unsupported_parts(message)


def _unsupported_parts(message: ProtoMessage) -> Iterator[tuple[str, str]]:
    if any(state.use_growable_memory for state in message.sequence_batching.state):
        yield (
            "sequence_batching.state.use_growable_memory",
            "states are in host memory, of the size that the model gave them",
        )
    for group in message.instance_group:
        if group.HasField("rate_limiter"):
            yield f"instance_group '{group.name}' rate_limiter", "instances run without limits"
        if group.passive:
            yield f"instance_group '{group.name}' passive", "its instances take requests too"
