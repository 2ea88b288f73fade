"""An ensemble's graph with the models that it names: do their tensors fit, which of them fan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.engine.ensemble.graph import EnsembleGraph
from gpubridge.errors import invalid
from gpubridge.tensor.dtypes import config_name

ROOT = -1
"""The origin of what comes once per request."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the members add to a graph.

    A step whose model is decoupled answers any number of times; what follows it runs once for each
    answer. That step is the *origin* of all tensors up to the next such step.

    - ``fans_out``: the steps whose model is decoupled.
    - ``origins``: by step, the origin of its inputs.
    - ``output_origin``: the origin of the ensemble's outputs.
    """

    fans_out: frozenset[int]
    origins: tuple[int, ...]
    output_origin: int

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return bool(self.fans_out)


@dataclass(frozen=True, slots=True)
class _Known:
    """Who said first what a tensor is like."""

    datatype: str
    dims: tuple[int, ...]
    batched: bool
    model: str


def wire(graph: EnsembleGraph, config: ModelConfig, members: Sequence[ModelConfig]) -> Wiring:
    """Check that the members' tensors fit together.

    ``members``: the configuration of each step's model.

    Raises BridgeError: INVALID_ARG, in Triton's words.
    """
    known: dict[str, _Known] = {}
    batched = config.max_batch_size > 0
    for spec in (*config.inputs, *config.outputs):
        dims = spec.dims if spec.reshape is None else spec.reshape
        known.setdefault(spec.name, _Known(spec.datatype, dims, batched, config.name))
    for step, member in zip(graph.steps, members, strict=True):
        if 0 < member.max_batch_size < config.max_batch_size:
            raise invalid(
                f"ensemble {graph.name} allows maximum batch size {config.max_batch_size}, but it "
                f"contains model {member.name} which only allows maximum batch size to be "
                f"{member.max_batch_size}"
            )
        inputs = {spec.name: spec for spec in member.inputs}
        outputs = {spec.name: spec for spec in member.outputs}
        for way, end, mapped, specs in (
            ("to", "input", step.inputs, inputs),
            ("from", "output", step.outputs, outputs),
        ):
            for name, tensor in mapped.items():
                if name not in specs:
                    word = "mapping" if way == "to" else "mapped"
                    raise invalid(
                        f"in ensemble {graph.name}, ensemble tensor {tensor} is {word} {way} "
                        f"non-existing {end} {name} in model {member.name}"
                    )
                _agree(graph.name, tensor, specs[name], member, known)
        for name, spec in inputs.items():
            if name not in step.inputs and not spec.optional:
                raise invalid(
                    f"in ensemble {graph.name}, input {name} in model {member.name} is not mapped to "
                    "any ensemble tensors"
                )
    return _find_origins(graph, members)


def _agree(
    ensemble: str,
    tensor: str,
    spec: TensorSpec,
    member: ModelConfig,
    known: dict[str, _Known],
) -> None:
    """Refuse a tensor that is said to be of two kinds."""
    here = _Known(spec.datatype, spec.dims, member.max_batch_size > 0, member.name)
    before = known.setdefault(tensor, here)
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent"
    if before.datatype != here.datatype:
        raise invalid(
            f"{where} data type: {config_name(before.datatype)} is inferred from model "
            f"{before.model} while {config_name(here.datatype)} is inferred from model {here.model}"
        )
    fits = _compatible(before.dims, here.dims)
    if before.batched != here.batched:
        # One may name the batch dimension that the other only has.
        fits = fits or _compatible(_full(before), _full(here))
    if not fits:
        raise invalid(
            f"{where} shape: {_text(before.dims)} is inferred from model {before.model} while "
            f"{_text(here.dims)} is inferred from model {here.model}"
        )


def _full(known: _Known) -> tuple[int, ...]:
    return (-1, *known.dims) if known.batched else known.dims


def _compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(
        a == b or a < 0 or b < 0 for a, b in zip(one, other, strict=True)
    )


def _text(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _find_origins(graph: EnsembleGraph, members: Sequence[ModelConfig]) -> Wiring:
    fans_out = frozenset(i for i, member in enumerate(members) if member.decoupled)
    tensors = dict.fromkeys(graph.inputs, ROOT)
    origins = [ROOT] * len(graph.steps)
    left = list(graph.steps)
    while left:
        for step in [s for s in left if all(t in tensors for t in s.inputs.values())]:
            left.remove(step)
            origin = _common_origin(graph.name, step.model, step.inputs.values(), tensors)
            origins[step.index] = origin
            after = step.index if step.index in fans_out else origin
            tensors.update(dict.fromkeys(step.outputs.values(), after))
    output_origin = _common_origin(graph.name, graph.name, graph.outputs, tensors)
    return Wiring(fans_out, tuple(origins), output_origin)


def _common_origin(
    ensemble: str, model: str, tensors: Iterable[str], origins: Mapping[str, int]
) -> int:
    found = {origins[tensor] for tensor in tensors}
    if len(found) > 1:
        raise invalid(
            f"in ensemble {ensemble}, step of model '{model}' receives inputs originated from "
            "different decoupled models"
        )
    return found.pop() if found else ROOT


def fit_shape(shape: tuple[int, ...], dims: Sequence[int], *, batched: bool) -> tuple[int, ...]:
    """Return the shape in which a tensor goes on to where ``dims`` are configured.

    It may come from a model that batches to one that does not, or the other way round: then a batch
    dimension of 1 is added or taken away, if that makes it fit. Other shapes stay what they are.
    """
    expected = (-1, *dims) if batched else tuple(dims)
    if _compatible(shape, expected):
        return shape
    if batched and _compatible(shape, dims):
        return (1, *shape)
    if not batched and shape[:1] == (1,) and _compatible(shape[1:], dims):
        return shape[1:]
    return shape
