"""Makes requests of a developer's inputs, with the parsing and checks that clients' requests pass."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.develop.arrays import encode_array
from gpubridge.engine.models.model import Model
from gpubridge.errors import invalid
from gpubridge.host_shm import HostArena
from gpubridge.protocol.body import check_strings, input_copy
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.json_tensor import input_from_json
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import InferRequest, Outcome
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import element_count, item_size
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.tensor.packed_numbers import numbers_to_bytes
from gpubridge.transport.control import LARGEST_BATCH


class InputTensor(NamedTuple):
    """A tensor to send, with a KServe datatype; its data is in wire format."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def read_input(text: str, config: ModelConfig) -> InputTensor:
    """Make a tensor of ``NAME=VALUE``; INVALID_ARG for a wrong form or value.

    The value is JSON (``[[1, 2], [3, 4]]``, ``"text"``, ``5``), or text for an input of strings;
    ``@FILE.npy`` is an array; any other ``@FILE`` stands for its bytes: one string, or the elements as
    in memory. A value without the batch dimension is a batch of one, and a single element fits any
    shape.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise invalid(f"--input expects NAME=VALUE or NAME=@FILE, got {text!r}")
    spec = next((spec for spec in config.inputs if spec.name == name), None)
    if spec is None:
        # The check of the whole request reports the name, with those of the model's inputs.
        return InputTensor(name, "BYTES", (1,), bytes_codec.encode(np.array([b""], object)))
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


def _from_text(spec: TensorSpec, text: str) -> InputTensor:
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
        return InputTensor(spec.name, spec.datatype, shape, _halves(spec, value, shape))
    entry = input_from_json(spec.name, spec.datatype, shape, [value])
    if entry.miscounted:
        raise invalid(
            f"input '{spec.name}': expected lists of one length in each list, got {text!r}"
        )
    return InputTensor(spec.name, spec.datatype, shape, entry.data or b"")


def _shape(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _halves(spec: TensorSpec, value: Any, shape: Sequence[int]) -> bytes:
    """Return the bytes of FP16 or BF16, which JSON requests cannot carry."""
    dtype = numpy_dtype(spec.datatype)
    if dtype is None:
        raise invalid(
            f"input '{spec.name}' is BF16: install ml-dtypes, or give the elements as @FILE"
        )
    try:
        numbers = np.array(value, np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise invalid(
            f"input '{spec.name}': expected numbers, all lists of one length: {error}"
        ) from None
    # BF16 is the upper half of a float32, rounded.
    form = "FP32" if spec.datatype == "BF16" else spec.datatype
    packed = numbers_to_bytes(spec.name, form, numbers.ravel().tolist())
    return np.frombuffer(packed, numpy_dtype(form)).astype(dtype).tobytes()


def _from_file(spec: TensorSpec, path: Path) -> InputTensor:
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            return InputTensor(spec.name, *encode_array(spec.name, array, spec.datatype))
        content = path.read_bytes()
    except OSError as error:
        raise invalid(f"input '{spec.name}': cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise invalid(f"input '{spec.name}': {path} is no array of NumPy: {error}") from None
    size = item_size(spec.datatype)
    if size is None:
        data = bytes_codec.encode(np.array([content], object))
        return InputTensor(spec.name, spec.datatype, (), data)
    return InputTensor(
        spec.name, spec.datatype, _shape_of_bytes(spec, len(content), size, path), content
    )


def _shape_of_bytes(spec: TensorSpec, nbytes: int, size: int, path: Path) -> tuple[int, ...]:
    """Return the shape of a file of ``nbytes``, as far as the configuration determines it."""
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


class RequestMaker:
    """Makes requests of the same inputs.

    ``parameters``: as in a v2 request's JSON. Raises BridgeError with Triton's texts.
    """

    def __init__(
        self, inputs: Sequence[InputTensor], parameters: Mapping[str, Any], config: ModelConfig
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
        """Make a request without callbacks; submitting it transfers its slot."""
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
            lambda _: None,
            form.identifier,
            form.context,
            copied,
            form.batch_size,
            form.options,
            form.dims,
        )
        request.arrived = time.monotonic_ns()
        return request


def follow(request: InferRequest, tell: Callable[[Outcome | None], None]) -> asyncio.Future[None]:
    """Pass each response of a request, and None at its end, to a function; done after the last one."""
    done = asyncio.get_running_loop().create_future()

    def respond(outcome: Outcome) -> None:
        tell(outcome)
        request.passed_on(1)

    def finish(outcome: Outcome | None) -> None:
        try:
            if outcome is not None:
                tell(outcome)
            tell(None)
        finally:
            if not done.done():
                done.set_result(None)

    request.on_partial = respond
    request.on_done = finish
    return done


def submit(model: Model, requests: Sequence[InferRequest]) -> None:
    """Submit requests, several ones as one batch; INVALID_ARG where no server would execute that."""
    if len(requests) == 1:
        model.submit(requests[0])
        return
    config = model.config
    if not model.instances:
        raise invalid(f"--batch: '{config.name}' is an ensemble, which executes nothing itself")
    if config.message.WhichOneof("scheduling_choice") == "sequence_batching":
        raise invalid(
            f"--batch: '{config.name}' has sequence batching, whose batches are of different "
            "sequences; send one request at a time"
        )
    rows = sum(request.batch_size for request in requests)
    if rows > min(config.max_batch_size, LARGEST_BATCH):
        raise invalid(
            f"--batch {len(requests)}: expected at most max_batch_size {config.max_batch_size} of "
            f"'{config.name}', got {len(requests)} requests of {rows // len(requests)}"
        )
    model.instances[0].feed.submit(list(requests))
