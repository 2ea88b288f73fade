"""A developer's inputs as a request: read, checked and laid out by what does it for clients."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.errors import invalid
from gpubridge.host_shm import HostArena
from gpubridge.protocol.body import check_strings, input_copy
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.json_tensor import data_from_json
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import InferRequest, Outcome
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import (
    datatype_from_numpy,
    element_count,
    item_size,
    numbers_to_bytes,
    numpy_dtype,
)


class GivenTensor(NamedTuple):
    """A tensor to send, of a datatype of KServe; its data is as it crosses the wire."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def read_input(text: str, config: ModelConfig) -> GivenTensor:
    """Make a tensor of ``NAME=VALUE``; INVALID_ARG for nothing of the kind.

    The value is JSON (``[[1, 2], [3, 4]]``, ``"text"``, ``5``), or text for an input of strings;
    ``@FILE.npy`` is an array; any other ``@FILE`` is its bytes: one string, or the elements as they
    lie in memory. A value without the batch dimension is a batch of one, and a single element fits
    any shape.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise invalid(f"--input expects NAME=VALUE or NAME=@FILE, got {text!r}")
    spec = next((spec for spec in config.inputs if spec.name == name), None)
    if spec is None:
        # Whatever it is: the check of the whole request says which inputs there are.
        return GivenTensor(name, "BYTES", (1,), bytes_codec.encode(np.array([b""], object)))
    if value.startswith("@"):
        tensor = _from_file(spec, Path(value[1:]))
    else:
        tensor = _from_text(spec, value)
    return tensor._replace(shape=_with_batch(tensor.shape, spec, config))


def _with_batch(shape: tuple[int, ...], spec: TensorSpec, config: ModelConfig) -> tuple[int, ...]:
    rank = len(spec.dims) + bool(config.max_batch_size)
    if not shape:
        return (1,) * rank
    if config.max_batch_size and len(shape) == len(spec.dims):
        return (1, *shape)
    return shape


def _from_text(spec: TensorSpec, text: str) -> GivenTensor:
    value: Any
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if spec.datatype != "BYTES":
            raise invalid(
                f"input '{spec.name}': expected JSON (a number, a list of them, lists of lists) or "
                f"@FILE, got {text!r}: {error}"
            ) from None
        value = text
    if spec.datatype == "BYTES" and not isinstance(value, (str, list)):
        value = text
    shape = _shape(value)
    if spec.datatype in ("FP16", "BF16"):
        return GivenTensor(spec.name, spec.datatype, shape, _halves(spec, value, shape))
    data = data_from_json(spec.name, spec.datatype, element_count(shape), [value])
    return GivenTensor(spec.name, spec.datatype, shape, data)


def _shape(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _halves(spec: TensorSpec, value: Any, shape: Sequence[int]) -> bytes:
    """Return the bytes of floats that JSON requests cannot carry."""
    if numpy_dtype(spec.datatype) is None:
        raise invalid(
            f"input '{spec.name}' is BF16: install ml-dtypes, or give the elements as @FILE"
        )
    try:
        numbers = np.array(value, np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise invalid(
            f"input '{spec.name}': expected numbers, all lists of one length: {error}"
        ) from None
    return numbers_to_bytes(spec.name, spec.datatype, numbers)


def _from_file(spec: TensorSpec, path: Path) -> GivenTensor:
    try:
        if path.suffix == ".npy":
            return _from_array(spec, np.load(path, allow_pickle=False), path)
        content = path.read_bytes()
    except OSError as error:
        raise invalid(f"input '{spec.name}': cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise invalid(f"input '{spec.name}': {path} is no array of NumPy: {error}") from None
    size = item_size(spec.datatype)
    if size is None:
        data = bytes_codec.encode(np.array([content], object))
        return GivenTensor(spec.name, spec.datatype, (), data)
    return GivenTensor(
        spec.name, spec.datatype, _shape_of_bytes(spec, len(content), size, path), content
    )


def _shape_of_bytes(spec: TensorSpec, nbytes: int, size: int, path: Path) -> tuple[int, ...]:
    """Return the shape that the configuration leaves to a file of so many bytes."""
    known = element_count([dim for dim in spec.dims if dim >= 0])
    unknown = sum(dim < 0 for dim in spec.dims)
    if unknown > 1 or (unknown and not known):
        raise invalid(
            f"input '{spec.name}': the bytes of {path} do not say which shape they have, the "
            f"configuration has {list(spec.dims)}; give an array (@FILE.npy)"
        )
    if not unknown:
        return tuple(spec.dims)
    return tuple(nbytes // (known * size) if dim < 0 else dim for dim in spec.dims)


def _from_array(spec: TensorSpec, array: np.ndarray[Any, Any], path: Path) -> GivenTensor:
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    datatype = datatype_from_numpy(array.dtype.newbyteorder("="))
    if datatype is None:
        raise invalid(
            f"input '{spec.name}': expected {spec.datatype}, got an array of {array.dtype} in {path}"
        )
    if datatype == "BYTES":
        data = bytes_codec.encode(array)
    else:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).tobytes()
    return GivenTensor(spec.name, datatype, array.shape, data)


class RequestMaker:
    """Makes requests of the same inputs, as often as wanted.

    ``parameters``: as in a v2 request's JSON. Raises BridgeError in Triton's words.
    """

    def __init__(
        self, inputs: Sequence[GivenTensor], parameters: Mapping[str, Any], config: ModelConfig
    ) -> None:
        header = {
            "inputs": [
                {
                    "name": entry.name,
                    "datatype": entry.datatype,
                    "shape": entry.shape,
                    "parameters": {"binary_data_size": len(entry.data)},
                }
                for entry in inputs
            ],
            "parameters": {"binary_data_output": True, **parameters},
        }
        self._model = config.name
        self._data = memoryview(b"".join(entry.data for entry in inputs))
        self.form: RequestForm = parse_request(json.dumps(header).encode(), config, len(self._data))

    def make(self, arena: HostArena) -> InferRequest:
        """Make a request; who submits it gives its slot away. Nobody hears of its outcome yet."""
        form = self.form
        packed = input_copy(form, self._data, arena).run()
        slot, places, copied = packed.slot, packed.places, packed.copied
        try:
            check_strings(form, self._model, [slot.memory[at : at + n] for at, n in places])
        except BaseException:
            packed.free()
            raise
        request = InferRequest(
            form.signature,
            slot,
            0,
            places,
            _unheard,
            form.identifier,
            form.context,
            copied,
            form.batch_size,
            form.options,
            form.dims,
        )
        request.arrived = time.monotonic_ns()
        return request


def _unheard(_: Outcome | None) -> None:
    """Take an outcome that nobody wants."""
