"""The graph of an ensemble from its configuration, validated with Triton's error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.errors import invalid
from gpubridge.tensor.datatypes import config_name

if TYPE_CHECKING:
    from gpubridge.engine.repository.model_index import VersionStatus

_ANY_VERSION = -1

ROOT = -1
"""The origin of tensors that exist once per request."""


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a model in an ensemble.

    - ``version``: None for the member's highest version.
    - ``inputs``, ``outputs``: the ensemble's tensor by the member's input, output.
    """

    index: int
    model: str
    version: int | None
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True, slots=True)
class EnsembleGraph:
    """Acyclic graph of tensors and steps, all of which are used.

    - ``producers``: the step that writes a tensor; the ensemble's inputs have none.
    - ``consumers``: the steps that read a tensor.
    - ``max_inflight``: limit of concurrent requests of one step for one ensemble request; 0: none.
    """

    name: str
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    producers: dict[str, int]
    consumers: dict[str, tuple[int, ...]]
    max_inflight: int

    def leading_to(self, tensors: Iterable[str]) -> tuple[frozenset[int], frozenset[str]]:
        """Return the steps that these tensors depend on, and the tensors in between."""
        steps: set[int] = set()
        seen: set[str] = set()
        waiting = list(tensors)
        while waiting:
            tensor = waiting.pop()
            seen.add(tensor)
            index = self.producers.get(tensor)
            if index is not None and index not in steps:
                steps.add(index)
                waiting += self.steps[index].inputs.values()
        return frozenset(steps), frozenset(seen)


def is_ensemble(config: ModelConfig) -> bool:
    """Return whether a model is an ensemble."""
    return bool(config.message.platform == "ensemble")


def draw_graph(config: ModelConfig) -> EnsembleGraph:
    """Return the graph of a configuration, without looking at its members.

    Raises BridgeError: INVALID_ARG for a missing field, or a tensor that is written twice, never
    written or never used.
    """
    name = config.name
    scheduling = config.message.ensemble_scheduling
    steps = tuple(
        Step(
            index,
            step.model_name,
            None if step.model_version == _ANY_VERSION else step.model_version,
            dict(sorted(step.input_map.items())),
            dict(sorted(step.output_map.items())),
        )
        for index, step in enumerate(scheduling.step)
    )
    inputs = tuple(spec.name for spec in config.inputs)
    outputs = tuple(spec.name for spec in config.outputs)
    producers = _producers(name, steps, inputs)
    consumers: dict[str, tuple[int, ...]] = {}
    for step in steps:
        for tensor in dict.fromkeys(step.inputs.values()):
            consumers[tensor] = (*consumers.get(tensor, ()), step.index)
    graph = EnsembleGraph(
        name, steps, inputs, outputs, producers, consumers, scheduling.max_inflight_requests
    )
    _check_ends(graph)
    _check_flow(graph)
    return graph


def _producers(name: str, steps: Sequence[Step], inputs: Sequence[str]) -> dict[str, int]:
    producers: dict[str, int] = {}
    for step in steps:
        for field, value in (
            ("model_name", step.model),
            ("input_map", step.inputs),
            ("output_map", step.outputs),
        ):
            if not value:
                raise invalid(f"must specify '{field}' in step {step.index} of ensemble '{name}'")
        for tensor in step.outputs.values():
            if tensor in producers:
                raise invalid(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    f"'{name}' step {step.index}"
                )
            if tensor in inputs:
                raise invalid(
                    f"ensemble tensor '{tensor}' is an input of ensemble '{name}', so step "
                    f"{step.index} cannot write it: give the output of '{step.model}' another name"
                )
            producers[tensor] = step.index
    return producers


def _check_ends(graph: EnsembleGraph) -> None:
    """Refuse inputs and outputs of the ensemble that no step uses."""
    known = graph.consumers.keys() | graph.producers.keys()
    for end, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in tensors:
            if tensor not in known:
                raise invalid(f"ensemble {end} '{tensor}' for ensemble {graph.name}' is not used")


def _check_flow(graph: EnsembleGraph) -> None:
    """Refuse outputs that are never written, and tensors that no output depends on."""
    written = set(graph.inputs)
    left = set(range(len(graph.steps)))
    while True:
        ready = {i for i in left if written.issuperset(graph.steps[i].inputs.values())}
        if not ready:
            break
        left -= ready
        for index in ready:
            written.update(graph.steps[index].outputs.values())
    for output in graph.outputs:
        if output not in written:
            raise invalid(
                f"output '{output}' for ensemble '{graph.name}' is not written: at least one of its "
                f"depending tensors, '{_unwritten(graph, output, written)}', is not connected"
            )
    _, used = graph.leading_to(graph.outputs)
    for tensor in sorted(graph.consumers.keys() | graph.producers.keys()):
        if tensor not in used:
            raise invalid(f"ensemble tensor '{tensor}' is unused in ensemble '{graph.name}'")


def _unwritten(graph: EnsembleGraph, tensor: str, written: set[str]) -> str:
    """Follow unwritten inputs from a tensor; return where the path ends or enters a cycle."""
    seen: set[str] = set()
    while tensor in graph.producers and tensor not in seen:
        seen.add(tensor)
        inputs = graph.steps[graph.producers[tensor]].inputs.values()
        before = next(entry for entry in inputs if entry not in written)
        if before in seen:
            break
        tensor = before
    return tensor


def circular_dependency(name: str, needed: str) -> str:
    """Return the error text for an ensemble whose member requires the ensemble."""
    return f"circular dependency between ensembles: {needed} -> ... -> {name} -> {needed}"


def explain_missing(
    name: str, model: str, version: int | None, versions: Mapping[int, VersionStatus]
) -> str:
    """Return the error text for a missing member; ``versions``: its rows in the repository's index."""
    rows = [versions[number] for number in sorted(versions)]
    if not rows:
        return f"ensemble {name} contains models that are not available or ambiguous: {model}"
    if any(row.state == "READY" for row in rows):
        return f"ensemble '{name}' depends on '{model}' whose required version {version} is not loaded."
    if not rows[0].version:
        return (
            f"ensemble '{name}' depends on '{model}' which is not valid. Model '{model}' failed "
            f"with error: {rows[0].reason}"
        )
    reasons = "".join(
        f"version {row.version} is at {row.state} state: {row.reason};" for row in rows
    )
    return (
        f"ensemble '{name}' depends on '{model}' which has no loaded version. Model '{model}' "
        f"loading failed with error: {reasons}"
    )


@dataclass(frozen=True, slots=True)
class Wiring:
    """Properties of a graph that depend on its members.

    A step with a decoupled model sends any number of responses, and the steps after it run once for
    each. That step is the *origin* of all tensors up to the next such step.

    - ``fans_out``: the steps whose model is decoupled.
    - ``origins``: by step, the origin of its inputs.
    - ``output_origin``: the origin of the ensemble's outputs.
    """

    fans_out: frozenset[int]
    origins: tuple[int, ...]
    output_origin: int

    @property
    def decoupled(self) -> bool:
        """Return whether a request may have any number of responses."""
        return bool(self.fans_out)


@dataclass(frozen=True, slots=True)
class _Known:
    """Datatype and dims of a tensor, and the model that declared them first."""

    datatype: str
    dims: tuple[int, ...]
    batched: bool
    model: str


def wire(graph: EnsembleGraph, config: ModelConfig, members: Sequence[ModelConfig]) -> Wiring:
    """Check that the members' tensors fit together; raises BridgeError.

    ``members``: the configuration of each step's model.
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
    """Refuse a tensor with two datatypes or incompatible dims."""
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
        # One model may declare the batch dimension in dims, the other by max_batch_size.
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


def fit_shape(
    shape: tuple[int, ...], dims: Sequence[int], *, made_batched: bool, batched: bool
) -> tuple[int, ...]:
    """Return the shape of a tensor for a model with the configured ``dims``.

    Between a model with batch dimension and one without (``made_batched``: the producer, ``batched``:
    the consumer), a batch dimension of 1 is removed or added if the shape then fits. Other shapes are
    unchanged, as in Triton.
    """
    if made_batched == batched:
        return shape
    expected = (-1, *dims) if batched else tuple(dims)
    if _compatible(shape, expected):
        return shape
    if batched and _compatible(shape, dims):
        return (1, *shape)
    if not batched and shape[:1] == (1,) and _compatible(shape[1:], dims):
        return shape[1:]
    return shape
