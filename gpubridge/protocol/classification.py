"""The classification extension: the highest values of an output as strings instead of its data.

A string is ``value:index`` or, if the index has a label, ``value:index:label``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod

import numpy as np
import numpy.typing as npt

from gpubridge.config import ModelConfig
from gpubridge.errors import invalid
from gpubridge.request import InferResponse
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.signatures import Signature, TensorSpec

_UNSUPPORTED = ("BOOL", "BYTES", "FP16", "BF16")
"""Datatypes that Triton does not rank either (it crashes for a BYTES output)."""

_PIECE = 4096


def classified(
    response: InferResponse, classes: Mapping[str, int], config: ModelConfig
) -> InferResponse:
    """Return a response with classes instead of values for some outputs.

    ``classes``: the number of classes by output, for each element of a batch.

    Raises BridgeError: INVALID_ARG, with Triton's text, for an output that cannot be ranked.
    """
    specs: list[TensorSpec] = []
    shapes: list[tuple[int, ...]] = []
    buffers: list[memoryview] = []
    tensors = zip(response.signature.tensors, response.shapes, response.buffers, strict=True)
    for spec, returned, buffer in tensors:
        count = classes.get(spec.name, 0)
        if count:
            rows, width = _rows(returned, batched=config.max_batch_size > 0)
            values = _values(spec, buffer).reshape(prod(rows), width)
            count = min(count, width)
            specs.append(TensorSpec(spec.name, "BYTES", len(rows) + 1, None))
            shapes.append((*rows, count))
            buffers.append(memoryview(_classes(values, count, _labels(spec.name, config))))
        else:
            specs.append(spec)
            shapes.append(returned)
            buffers.append(buffer)
    signature = Signature(tuple(specs), response.signature.requested)
    return InferResponse(signature, tuple(shapes), buffers, response.parameters)


def _labels(name: str, config: ModelConfig) -> tuple[bytes, ...]:
    output = config.outputs_by_name.get(name)
    return () if output is None else output.labels


def _rows(shape: tuple[int, ...], *, batched: bool) -> tuple[tuple[int, ...], int]:
    """Return the dims of the rows of an output, each of which is ranked, and the length of a row."""
    rows = shape[:1] if batched else ()
    return rows, prod(shape[len(rows) :])


def _values(spec: TensorSpec, buffer: memoryview) -> npt.NDArray[np.generic]:
    if spec.datatype in _UNSUPPORTED:
        raise invalid(
            f"class result not available for output due to unsupported type '{spec.datatype}'"
        )
    return np.frombuffer(buffer, numpy_dtype(spec.datatype))


def _classes(rows: npt.NDArray[np.generic], count: int, labels: Sequence[bytes]) -> bytearray:
    """Return the classes of all rows, encoded."""
    texts = (
        _text(row[i], i, labels)
        for row in rows
        for highest in (_highest(row, count),)
        for at in range(0, count, _PIECE)
        for i in highest[at : at + _PIECE].tolist()
    )
    # In pieces, so that other threads run between them.
    pieces = []
    while piece := list(islice(texts, _PIECE)):
        pieces.append(bytes_codec.encode(np.array(piece, dtype=object)))
    encoded = bytearray(sum(map(len, pieces)))
    at = 0
    for text in pieces:
        encoded[at : at + len(text)] = text
        at += len(text)
    return encoded


def _highest(row: npt.NDArray[np.generic], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the highest values, descending; of equal values the lower index first."""
    values = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    among = np.arange(len(values))
    if 0 < count * 8 < len(values):
        # For few of many, sort only values not below the lowest of them.
        least = np.partition(values, len(values) - count)[len(values) - count]
        among = np.flatnonzero(values >= least)
    backwards = values[among][::-1]
    order = len(among) - 1 - np.argsort(backwards, kind="stable")[::-1]
    return among[order[:count]]


def _text(value: np.generic, index: int, labels: Sequence[bytes]) -> bytes:
    number = f"{value.item():f}" if value.dtype.kind == "f" else str(value.item())
    label = labels[index] if index < len(labels) else b""
    return f"{number}:{index}".encode() + (b":" + label if label else b"")
