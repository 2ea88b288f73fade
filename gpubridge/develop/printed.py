"""Formats responses as text: each output with its datatype, shape and values, abbreviated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpubridge.config import ModelConfig
from gpubridge.develop.arrays import decode_array
from gpubridge.errors import invalid, unavailable
from gpubridge.model_io import as_configured
from gpubridge.request import InferResponse

_SHOWN = 100
"""Largest number of elements that are all printed."""
_LETTERS = 80
_ONE_LINE = 60


def output_arrays(response: InferResponse, config: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of a response's outputs by name, as clients see them; strings are ``bytes``."""
    arrays = {}
    tensors = zip(response.signature.tensors, response.shapes, response.buffers, strict=True)
    for (name, datatype, *_), returned, buffer in tensors:
        arrays[name] = decode_array(datatype, as_configured(name, returned, config), buffer)
    return arrays


def print_response(response: InferResponse, config: ModelConfig) -> str:
    """Return the text of a response, with notes on differences from the configuration."""
    arrays = output_arrays(response, config)
    lines = []
    datatypes = {spec.name: spec.datatype for spec in response.signature.tensors}
    for name, array in arrays.items():
        head = f"{name}: {datatypes[name]} {list(array.shape)}"
        body = _values(array)
        short = "\n" not in body and len(body) <= _ONE_LINE
        lines.append(f"{head} {body}" if short else f"{head}\n{_indented(body)}")
    if response.parameters:
        lines.append(f"parameters: {response.parameters}")
    lines += [f"note: {note}" for note in _notes(arrays, datatypes, config)]
    return "\n".join(lines) or "a response without outputs"


def save_outputs(
    arrays: Mapping[str, np.ndarray[Any, Any]], places: Mapping[str, Path], config: ModelConfig
) -> None:
    """Write outputs to NumPy files, strings as ``S`` of the longest; may raise BridgeError."""
    for name, path in places.items():
        if name not in arrays:
            raise invalid(
                f"--output {name}: expected an output of the response of '{config.name}', which "
                f"are {', '.join(arrays) or 'none'}"
            )
        array = arrays[name]
        try:
            with path.open("wb") as file:
                np.save(file, array.astype(np.bytes_) if array.dtype == object else array)
        except OSError as error:
            raise unavailable(f"--output {name}: cannot write {path}: {error.strerror}") from None


def _notes(
    arrays: Mapping[str, np.ndarray[Any, Any]], datatypes: Mapping[str, str], config: ModelConfig
) -> list[str]:
    """Return notes on outputs that surprise clients, though no server refuses them."""
    notes = []
    batch = (-1,) if config.max_batch_size else ()
    for spec in config.outputs:
        array = arrays.get(spec.name)
        if array is None:
            if arrays:
                notes.append(f"the response has no output '{spec.name}'")
            continue
        if datatypes[spec.name] != spec.datatype:
            notes.append(
                f"output '{spec.name}' is {datatypes[spec.name]}, the configuration says "
                f"{spec.datatype}"
            )
        wanted = batch + tuple(spec.dims)
        if len(wanted) != array.ndim or any(
            want not in (-1, got) for want, got in zip(wanted, array.shape, strict=True)
        ):
            notes.append(
                f"output '{spec.name}' has the shape {list(array.shape)}, the configuration says "
                f"{list(wanted)}"
            )
    return notes


def _values(array: np.ndarray[Any, Any]) -> str:
    formatter: Any = {"object": _string} if array.dtype == object else None
    # Each dimension multiplies the lines.
    edge = 3 if array.ndim < 3 else 2
    return np.array2string(
        array, threshold=_SHOWN, edgeitems=edge, separator=", ", formatter=formatter
    )


def _string(value: bytes) -> str:
    shown = repr(value[:_LETTERS])[1:]
    return shown if len(value) <= _LETTERS else f"{shown}... ({len(value)} bytes)"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
