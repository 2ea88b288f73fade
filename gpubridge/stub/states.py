"""Implicit state: what one request of a sequence leaves to the next, kept where the model runs.

A sequence stays on one instance, and ends when that dies. So its states need never leave this
process: the server only says in which of the instance's slots the sequence lives, and when a new one
begins there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpubridge.errors import invalid
from gpubridge.pb_utils import Tensor
from gpubridge.tensor.dtypes import element_count, item_size
from gpubridge.transport.context import RequestContext

_SEQUENCE_END = 2


class _State(NamedTuple):
    """One state as it is configured; shapes with the batch dimension, -1 for any size."""

    input_name: str
    output_name: str
    datatype: str
    shape: tuple[int, ...]
    shares: bool
    initial: _Value


class _Value(NamedTuple):
    """A state's value, in memory of its own; `memory` holds the bytes as they cross the wire."""

    shape: tuple[int, ...]
    memory: np.ndarray[Any, Any]


class SequenceStates:
    """Adds the states of sequences to their requests, and takes what responses leave.

    A model gets a copy of a state, and what it leaves is copied, so that it may do with both what
    it likes. Where the configuration says ``use_same_buffer_for_input_output`` there is one buffer
    for a sequence: the model may change it in place, and nothing is copied when it answers with it.

    Raises BridgeError: INVALID_ARG: a file with an initial value cannot be read, or has another
    size.
    """

    def __init__(self, specs: Iterable[Mapping[str, Any]], batched: bool) -> None:
        self._states = [_state(spec, (1,) if batched else ()) for spec in specs]
        self._by_output = {state.output_name: state for state in self._states}
        self._slots: dict[int, dict[str, _Value]] = {}

    def inputs(self, place: tuple[int, bool] | None) -> list[Tensor]:
        """Return the state inputs of a request by its ``state``; initial ones for None."""
        if place is None:
            return [_tensor(state, _copy(state.initial)) for state in self._states]
        slot, starts = place
        if starts:
            self._slots.pop(slot, None)
        kept = self._slots.setdefault(slot, {})
        tensors = []
        for state in self._states:
            value = kept.get(state.output_name)
            if value is None or not state.shares:
                value = _copy(state.initial if value is None else value)
            if state.shares:
                kept[state.output_name] = value
            tensors.append(_tensor(state, value))
        return tensors

    def keep(self, context: RequestContext, tensors: Sequence[Tensor]) -> None:
        """Take the states out of a response's tensors; those that are not in it stay as they were.

        Raises BridgeError: INVALID_ARG: one is not of the configured form. None was taken.
        """
        slot = context.state_slot
        if slot is None:
            return
        left = {}
        for tensor in tensors:
            state = self._by_output.get(tensor._name)
            if state is not None:
                _check(state, tensor)
                left[tensor._name] = tensor
        if context.flags & _SEQUENCE_END:
            self._slots.pop(slot, None)
            return
        kept = self._slots.setdefault(slot, {})
        for name, tensor in left.items():
            kept[name] = _value(tensor, kept.get(name))


def _state(spec: Mapping[str, Any], batch: tuple[int, ...]) -> _State:
    dims = tuple(spec["initial_dims"] or (max(size, 1) for size in spec["dims"]))
    shape = batch + dims
    name, datatype = spec["input_name"], spec["datatype"]
    path = spec["initial_file"]
    count = element_count(shape)
    itemsize = item_size(datatype)
    # An empty string is four bytes that say so.
    nbytes = count * (4 if itemsize is None else itemsize)
    if not path:
        memory = np.zeros(nbytes, np.uint8)
    else:
        try:
            memory = np.fromfile(path, np.uint8)
        except OSError as error:
            raise invalid(
                f"initial state of '{name}': cannot read '{path}': "
                f"{os.strerror(error.errno or 0)}; put the file there or set zero_data: true"
            ) from error
        if itemsize is not None and memory.nbytes != nbytes:
            raise invalid(
                f"initial state of '{name}': expected {nbytes} bytes ({datatype} of shape "
                f"{list(shape)}), got {memory.nbytes} in '{path}'"
            )
    return _State(
        name,
        spec["output_name"],
        datatype,
        batch + tuple(spec["dims"]),
        bool(spec["same_buffer"]),
        _Value(shape, memory),
    )


def _tensor(state: _State, value: _Value) -> Tensor:
    return Tensor._received(state.input_name, state.datatype, value.shape, value.memory.data)


def _check(state: _State, tensor: Tensor) -> None:
    shape = tensor._shape
    fits = len(shape) == len(state.shape) and all(
        declared in (-1, size) for declared, size in zip(state.shape, shape)
    )
    if tensor._datatype != state.datatype or not fits:
        raise invalid(
            f"state '{tensor._name}': expected {state.datatype} of shape {list(state.shape)}, got "
            f"{tensor._datatype} of shape {list(shape)}; return it as the configuration has it"
        )


def _value(tensor: Tensor, before: _Value | None) -> _Value:
    """Take a tensor's bytes, without a copy if they are those that were kept already."""
    payload = tensor._payload()
    source = np.frombuffer(payload, np.uint8) if payload.nbytes else np.zeros(0, np.uint8)
    kept = None if before is None else before.memory
    if kept is None or (kept.nbytes, kept.ctypes.data) != (source.nbytes, source.ctypes.data):
        kept = source.copy()
    return _Value(tensor._shape, kept)


def _copy(value: _Value) -> _Value:
    return _Value(value.shape, value.memory.copy())
