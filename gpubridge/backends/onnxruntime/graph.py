"""Inputs and outputs of an ONNX graph, and their comparison with a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpubridge.backends.model_setup import ModelSetup, TensorSetup

_INTEGERS = tuple(f"{kind}int{bits}" for kind in ("u", "") for bits in (8, 16, 32, 64))
_TYPES = {name: f"TYPE_{name.upper()}" for name in ("bool", *_INTEGERS, "string")}
_TYPES |= {"float16": "TYPE_FP16", "float": "TYPE_FP32", "double": "TYPE_FP64"}
"""Data types by onnxruntime's names; its Python interface does not support bfloat16."""


class GraphTensor(NamedTuple):
    """An input or output of a graph; a type that tensors here cannot have keeps onnxruntime's name.

    In ``shape``, -1 is variable; it is empty if the graph does not say it. ``optional``: the graph has a
    default, or needs no value.
    """

    name: str
    data_type: str
    shape: tuple[int, ...]
    optional: bool = False

    @classmethod
    def from_node(cls, node: Any, optional: bool = False) -> GraphTensor:
        """Read onnxruntime's description."""
        inner = re.fullmatch(r"optional\((.*)\)", node.type)
        element = re.fullmatch(r"tensor\((\w+)\)", inner[1] if inner else node.type)
        return cls(
            node.name,
            _TYPES.get(element[1], element[0]) if element else node.type,
            tuple(dim if isinstance(dim, int) else -1 for dim in node.shape or ()),
            optional or inner is not None,
        )

    def require_carried(self, kind: str) -> None:
        """Raise ValueError for a type that requests and responses here cannot have."""
        if self.data_type.startswith("TYPE_"):
            return
        remedy = "convert it to tensors in the graph (of a classifier: export it with zipmap=False)"
        if self.data_type == "tensor(bfloat16)":
            remedy = "add a Cast to or from FLOAT or FLOAT16: onnxruntime gives Python no BF16"
        raise ValueError(
            f"{kind} '{self.name}': expected a tensor that requests can carry, got {self.data_type} in "
            f"the graph; {remedy}"
        )

    def __str__(self) -> str:
        return f"'{self.name}' {self.data_type} {list(self.shape)}"


class Graph:
    """The inputs and outputs of a session, by name."""

    def __init__(self, session: Any) -> None:
        inputs = [GraphTensor.from_node(node) for node in session.get_inputs()]
        inputs += [
            GraphTensor.from_node(node, optional=True)
            for node in session.get_overridable_initializers()
        ]
        self.inputs = {tensor.name: tensor for tensor in inputs}
        self.outputs = {
            tensor.name: tensor for tensor in map(GraphTensor.from_node, session.get_outputs())
        }

    def check(self, setup: ModelSetup) -> None:
        """Compare a configuration with the graph; a ValueError describes the difference."""
        for entry in setup.inputs:
            found = self._check_tensor(setup, "input", self.inputs, entry)
            if entry.optional and not found.optional:
                raise ValueError(
                    f"input '{entry.name}': optional in config.pbtxt, but the graph has no value "
                    "for it when a request leaves it out; remove optional: true"
                )
        for entry in (*setup.outputs, *setup.state_outputs):
            self._check_tensor(setup, "output", self.outputs, entry)
        configured = {*setup.control_inputs, *(entry.name for entry in setup.inputs)}
        missing = [
            tensor
            for tensor in self.inputs.values()
            if tensor.name not in configured and not tensor.optional
        ]
        if missing:
            raise ValueError(
                f"expected every input of the graph in config.pbtxt, got none for {_listed(missing)}"
            )
        unknown = sorted(set(setup.control_inputs) - set(self.inputs))
        if unknown:
            raise ValueError(
                f"sequence_batching: the graph has no input {', '.join(unknown)}; its inputs are "
                f"{_listed(self.inputs.values())}"
            )

    @staticmethod
    def _check_tensor(
        setup: ModelSetup, kind: str, tensors: Mapping[str, GraphTensor], entry: TensorSetup
    ) -> GraphTensor:
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise ValueError(
                f"{kind} '{entry.name}': the graph has none of that name; its {kind}s are "
                f"{_listed(tensors.values())}"
            )
        tensor.require_carried(kind)
        if tensor.data_type != entry.data_type:
            raise ValueError(
                f"{kind} '{entry.name}': expected {tensor.data_type}, as the graph has it, got "
                f"{entry.data_type} in config.pbtxt"
            )
        if not tensor.shape:
            return tensor
        batched = setup.max_batch_size > 0
        if batched and tensor.shape[0] != -1:
            raise ValueError(
                f"{kind} '{entry.name}': max_batch_size is {setup.max_batch_size}, but the graph's "
                f"first dimension is fixed: {list(tensor.shape)}; set max_batch_size: 0 and write "
                "all dimensions into dims"
            )
        configured = (-1, *entry.dims) if batched else entry.dims
        fits = len(configured) == len(tensor.shape) and all(
            graph in (-1, own) for graph, own in zip(tensor.shape, configured)
        )
        if not fits:
            note = " (the first is the batch's, since max_batch_size is not 0)" if batched else ""
            raise ValueError(
                f"{kind} '{entry.name}': expected the shape {list(tensor.shape)}, as the graph has "
                f"it, got {list(configured)} in config.pbtxt{note}"
            )
        return tensor

    def entries(self, setup: ModelSetup, kind: str) -> list[TensorSetup]:
        """Return the default tensors of a configuration, without optional inputs."""
        tensors = self.inputs if kind == "input" else self.outputs
        batched = setup.max_batch_size > 0
        found = []
        for tensor in tensors.values():
            if tensor.optional:
                continue
            tensor.require_carried(kind)
            dims = tensor.shape[1:] if batched else tensor.shape
            # Of a shape that the graph does not say, one element.
            found.append(TensorSetup(tensor.name, tensor.data_type, dims if tensor.shape else (1,)))
        return found


def _listed(tensors: Iterable[GraphTensor]) -> str:
    return ", ".join(map(str, tensors)) or "none"
