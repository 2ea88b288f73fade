"""Implicit state of sequences, kept in the process of the model instance.

A sequence stays on one instance, and ends if that dies, so its states never leave this process: the
server only assigns the sequence to one of the instance's slots, and marks its first request.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpubridge.errors import invalid
from gpubridge.pb_utils import Tensor
from gpubridge.tensor.datatypes import element_count, item_size
from gpubridge.transport.context import RequestContext
from gpubridge.transport.stub_settings import StateSettings

_SEQUENCE_END = 2


class _State(NamedTuple):
    """Configuration of one state; its shape includes the batch dimension, -1 is any size."""

    input_name: str
    output_name: str
    datatype: str
    shape: tuple[int, ...]
    shares: bool
    initial: _Value


class _Value(NamedTuple):
    """Value of a state in private memory; `memory` holds the bytes as in a tensor."""

    shape: tuple[int, ...]
    memory: np.ndarray[Any, Any]


class SequenceStates:
    """Adds state inputs to the requests of sequences, and stores the states of responses.

    Both are copied, so that the model may change them. With ``use_same_buffer_for_input_output``
    there is one buffer for each sequence: the model may change it in place, and a response with that
    buffer is not copied.

    Raises BridgeError: INVALID_ARG if the file of an initial value is unreadable or of another size.
    """

    def __init__(self, specs: Iterable[StateSettings], batched: bool) -> None:
        self._states = [_state(spec, (1,) if batched else ()) for spec in specs]
        self._by_output = {state.output_name: state for state in self._states}
        self._slots: dict[int, dict[str, _Value]] = {}

    def inputs(self, place: Sequence[int] | None) -> list[Tensor]:
        """Return the state inputs for a request's ``state`` (slot and start); initial ones for None."""
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
        """Store the states among a response's tensors; other states stay unchanged.

        Raises BridgeError: INVALID_ARG if one is not of the configured form; none is stored then.
        """
        if context.state is None:
            return
        slot, _ = context.state
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


def _state(spec: StateSettings, batch: tuple[int, ...]) -> _State:
    dims = tuple(spec.initial_dims or (max(size, 1) for size in spec.dims))
    shape = batch + dims
    name, datatype = spec.input_name, spec.datatype
    path = spec.initial_file
    count = element_count(shape)
    itemsize = item_size(datatype)
    # An empty string takes four bytes, its length.
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
        spec.output_name,
        datatype,
        batch + tuple(spec.dims),
        spec.same_buffer,
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
    """Return a tensor's bytes as a value; copied unless they are the stored ones already."""
    payload = tensor._payload()
    source = np.frombuffer(payload, np.uint8) if payload.nbytes else np.zeros(0, np.uint8)
    kept = None if before is None else before.memory
    if kept is None or (kept.nbytes, kept.ctypes.data) != (source.nbytes, source.ctypes.data):
        kept = source.copy()
    return _Value(tensor._shape, kept)


def _copy(value: _Value) -> _Value:
    return _Value(value.shape, value.memory.copy())
