"""Ensembles for tests, written in few words."""

from pathlib import Path

from google.protobuf import text_format

from gpubridge.config import ModelConfig, complete_model_config
from gpubridge.engine.ensemble.graph import EnsembleGraph, Wiring, draw_graph, wire
from gpubridge.schema import message_class

__all__ = ["draw", "ensemble", "member", "wired"]


def _config(text: str, name: str) -> ModelConfig:
    message = message_class("ModelConfig")()
    text_format.Parse(f'name: "{name}" {text}', message)
    return complete_model_config(message, Path("/nowhere") / name, gpu_count=0)


def _tensors(field: str, words: str) -> str:
    """Spell out ``A:FP32[-1,4] B?``: name, optional, datatype, dims; FP32[-1] where not given."""
    spelled = ""
    for word in words.split():
        name, _, kind = word.partition(":")
        datatype, _, dims = (kind or "FP32[-1]").partition("[")
        optional = "optional: true" if name.endswith("?") else ""
        spelled += (
            f'{field} {{ name: "{name.rstrip("?")}" data_type: TYPE_{datatype} '
            f"dims: [{dims.rstrip(']')}] {optional} }}\n"
        )
    return spelled


def member(
    name: str, inputs: str = "X", outputs: str = "Y", *, batch: int = 0, decoupled: bool = False
) -> ModelConfig:
    """Return the configuration of a Python model."""
    return _config(
        f'backend: "python" max_batch_size: {batch} '
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"
        + _tensors("input", inputs)
        + _tensors("output", outputs),
        name,
    )


def ensemble(
    *steps: str,
    inputs: str = "A",
    outputs: str = "B",
    batch: int = 0,
    inflight: int = 0,
    name: str = "e",
) -> ModelConfig:
    """Return the configuration of an ensemble; a step reads ``model:version X=A X2=t > Y=u``."""
    text = f'platform: "ensemble" max_batch_size: {batch}\n'
    text += _tensors("input", inputs) + _tensors("output", outputs)
    text += f"ensemble_scheduling {{ max_inflight_requests: {inflight}\n"
    for step in steps:
        before, _, after = step.partition(">")
        model, *reads = before.split()
        member_name, _, version = model.partition(":")
        text += f'step {{ model_name: "{member_name}" model_version: {version or -1} '
        for way, maps in (("input", reads), ("output", after.split())):
            for entry in maps:
                key, _, value = entry.partition("=")
                text += f'{way}_map {{ key: "{key}" value: "{value}" }} '
        text += "}\n"
    return _config(text + "}", name)


def draw(*steps: str, inputs: str = "A", outputs: str = "B") -> EnsembleGraph:
    """Return the graph of an ensemble."""
    return draw_graph(ensemble(*steps, inputs=inputs, outputs=outputs))


def wired(config: ModelConfig, *members: ModelConfig) -> tuple[EnsembleGraph, Wiring]:
    """Return the graph of an ensemble and its wiring; members by their names."""
    graph = draw_graph(config)
    known = {entry.name: entry for entry in members}
    return graph, wire(graph, config, [known[step.model] for step in graph.steps])
