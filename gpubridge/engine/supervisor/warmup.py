"""Warm-up: sample requests that every instance executes before it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpubridge.config import KSERVE_DATATYPES, ModelConfig
from gpubridge.config.files import read_regular
from gpubridge.errors import BridgeError, ErrorCode, invalid
from gpubridge.host_shm import HostArena
from gpubridge.model_io import InputForm, check_inputs, model_shape
from gpubridge.request import InferRequest, Outcome
from gpubridge.schema import ProtoMessage, enum_name
from gpubridge.tensor import strings
from gpubridge.tensor.datatypes import byte_size, element_count
from gpubridge.transport.control import LARGEST_BATCH
from gpubridge.transport.signatures import encode_tensors

_logger = logging.getLogger(__name__)

_FOLDER = "warmup"
_ALIGNMENT = 64
_WORD_BYTES = 4
_LONGEST_DATA = 1 << 30
_SMALL_NUMBERS = 128
"""Upper bound of random integers: many models use them as indices."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A batch that is executed ``count`` times.

    - ``batch_size``: number of requests in it, each of batch size 1.
    - ``signature``, ``dims``: encoded tensors of each request.
    - ``inputs``: inputs without ``data`` get random values.
    """

    name: str
    count: int
    batch_size: int
    signature: bytes
    dims: bytes
    inputs: tuple[InputForm, ...]

    def requests(
        self, arena: HostArena, on_done: Callable[[Outcome | None], None]
    ) -> list[InferRequest]:
        """Make the requests of one execution; raises BridgeError: UNAVAILABLE."""
        requests: list[InferRequest] = []
        try:
            while len(requests) < self.batch_size:
                requests.append(self._request(arena, on_done))
        except BridgeError:
            for request in requests:
                if request.slot is not None:
                    arena.free(request.slot)
            raise
        return requests

    def _request(self, arena: HostArena, on_done: Callable[[Outcome | None], None]) -> InferRequest:
        places = []
        end = 0
        for entry in self.inputs:
            places.append((end, entry.nbytes))
            end += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        slot = arena.allocate(end or 1)
        for entry, (at, nbytes) in zip(self.inputs, places, strict=True):
            content = _random(entry) if entry.data is None else entry.data
            slot.memory[at : at + nbytes] = content
        request = InferRequest(self.signature, slot, 0, places, on_done, dims=self.dims)
        request.arrived = time.monotonic_ns()
        return request


class _Round:
    """Waits for all requests of one execution."""

    def __init__(self, requests: int, done: asyncio.Future[None]) -> None:
        self._left = requests
        self._done = done
        self._errors: list[str] = []

    def respond(self, request: InferRequest, outcome: Outcome) -> None:
        """Handle a response that is not the last of its request."""
        request.passed_on(1)
        self._note(outcome)

    def finish(self, outcome: Outcome | None) -> None:
        """Handle the end of a request, with its last response if there is one."""
        self._note(outcome)
        self._left -= 1
        if self._left or self._done.done():
            return
        if self._errors:
            self._done.set_exception(invalid("; ".join(self._errors)))
        else:
            self._done.set_result(None)

    def _note(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, BridgeError) and outcome.message not in self._errors:
            self._errors.append(outcome.message)


async def warm_up(
    samples: Sequence[WarmupSample],
    arena: HostArena,
    execute: Callable[[list[InferRequest]], None],
    expect: Callable[[], asyncio.Future[None]],
) -> None:
    """Execute the samples on an instance, one after the other.

    - ``execute``: sends a batch to the instance.
    - ``expect``: returns a future that fails when the instance's process ends.

    Raises BridgeError: INVALID_ARG with the error of the first sample that fails.
    """
    for sample in samples:
        for _ in range(sample.count):
            done = expect()
            answers = _Round(sample.batch_size, done)
            try:
                requests = sample.requests(arena, answers.finish)
                for request in requests:
                    request.on_partial = _partial(answers, request)
                execute(requests)
                await done
            except BridgeError as error:
                text = f"failed to run warmup sample '{sample.name}': {error.message}; "
                raise invalid(text) from error


def _partial(answers: _Round, request: InferRequest) -> Callable[[Outcome], None]:
    return lambda outcome: answers.respond(request, outcome)


# -- from the configuration -----------------------------------------------------------------------


def warmup_samples(config: ModelConfig, directory: Path) -> list[WarmupSample]:
    """Return the samples of a model's configuration, except those with a batch size of 0.

    ``directory``: the model's directory, whose folder ``warmup`` has the data files.

    Raises BridgeError: INVALID_ARG for invalid samples, in Triton's words.
    """
    samples = []
    for setting in config.message.model_warmup:
        if not setting.batch_size:
            _logger.warning(
                "model '%s': warmup sample '%s' has batch_size 0, so it is not run",
                config.name,
                setting.name,
            )
            continue
        samples.append(_sample(setting, config, directory / _FOLDER))
    return samples


def _sample(setting: ProtoMessage, config: ModelConfig, folder: Path) -> WarmupSample:
    most = max(config.max_batch_size, 1)
    if setting.batch_size > most:
        raise invalid(
            f"failed to run warmup sample '{setting.name}': batch size {setting.batch_size} for "
            f"'{config.name}', max allowed is {config.max_batch_size}; "
        )
    if setting.batch_size > LARGEST_BATCH:
        raise invalid(
            f"warmup sample '{setting.name}' of model '{config.name}' has batch_size "
            f"{setting.batch_size}: an instance takes at most {LARGEST_BATCH} requests at once"
        )
    known = [spec.name for spec in config.inputs if spec.name in setting.inputs]
    # The scheduler, which adds them to clients' requests, sees no samples.
    of_sequence = [control.name for control in config.message.sequence_batching.control_input]
    controls = [name for name in of_sequence if name in setting.inputs]
    for name in sorted(setting.inputs.keys() - {*known, *controls}):
        _logger.warning(
            "model '%s': warmup sample '%s' has the input '%s', which the model has not: it is left out",
            config.name,
            setting.name,
            name,
        )
    batch = (1,) if config.max_batch_size else ()
    inputs = [_input(name, setting.inputs[name], batch, config, folder) for name in known]
    check_inputs("", inputs, config)
    forms = [(entry.name, entry.datatype, model_shape(entry, config)) for entry in inputs]
    added = [_input(name, setting.inputs[name], batch, config, folder) for name in controls]
    forms += [(entry.name, entry.datatype, entry.shape) for entry in added]
    signature, dims = encode_tensors(forms)
    return WarmupSample(
        setting.name,
        max(setting.count, 1),
        setting.batch_size,
        signature,
        dims,
        (*inputs, *added),
    )


def _input(
    name: str, setting: ProtoMessage, batch: tuple[int, ...], config: ModelConfig, folder: Path
) -> InputForm:
    if any(dim < 0 for dim in setting.dims):
        raise invalid(
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    datatype = KSERVE_DATATYPES.get(enum_name("DataType", setting.data_type), "")
    if not datatype:
        raise invalid(
            f"warmup setting of model '{config.name}' expects input '{name}' to have a data_type"
        )
    shape = (*batch, *setting.dims)
    kind: Literal["zero_data", "random_data", "input_data_file"] | None
    kind = setting.WhichOneof("input_data_type")
    if kind is None:
        raise invalid(
            f"[request id: <id_unknown>] warmup setting expects input '{name}' to have "
            "input_data_type set"
        )
    words = element_count(shape)
    nbytes = words * 2 * _WORD_BYTES if datatype == "BYTES" else byte_size(datatype, shape)
    if nbytes > _LONGEST_DATA:
        raise invalid(
            f"warmup input '{name}' of model '{config.name}': expected at most {_LONGEST_DATA} bytes, "
            f"got {nbytes}"
        )
    if kind == "random_data":
        return InputForm(name, datatype, shape, nbytes, None)
    if kind == "input_data_file":
        content = _read(folder, setting.input_data_file, config.name)
        if datatype != "BYTES":
            if len(content) < nbytes:
                raise invalid(
                    f"[request id: <id_unknown>] warmup setting expects {nbytes} bytes, but the data "
                    f"provided from {setting.input_data_file} only has {len(content)} bytes"
                )
            content = content[:nbytes]
        else:
            try:
                strings.validate(content, words)
            except BridgeError as error:
                raise invalid(
                    f"[request id: <id_unknown>] expected {words} string elements for inference "
                    f"input '{name}' for model '{config.name}' in the warmup data of "
                    f"{setting.input_data_file}: {error.message}"
                ) from error
        return InputForm(name, datatype, shape, len(content), content)
    # An empty string is encoded as its length, 0.
    content = bytes(words * _WORD_BYTES if datatype == "BYTES" else nbytes)
    return InputForm(name, datatype, shape, len(content), content)


def _read(folder: Path, name: str, model: str) -> bytes:
    """Read a data file, which must be inside the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise invalid(
            f"warmup data file '{name}' of model '{model}' leads out of {folder}: give a path "
            "inside that folder"
        )
    try:
        return read_regular(path, _LONGEST_DATA)
    except OSError as error:
        raise BridgeError(
            f"failed to open text file for read {path}: {error.strerror}", ErrorCode.INTERNAL
        ) from error


def _random(entry: InputForm) -> bytes:
    """Return random floats from 0 to 1, small integers, or short words."""
    import numpy as np  # noqa: PLC0415  (the server does without it until then)

    generator = np.random.default_rng()
    count = element_count(entry.shape)
    if entry.datatype == "BYTES":
        letters = generator.integers(97, 123, (count, _WORD_BYTES), np.uint8)
        lengths = np.full((count, 1), _WORD_BYTES, "<u4").view(np.uint8)
        return np.hstack([lengths, letters]).tobytes()
    if entry.datatype in ("FP16", "FP32", "FP64"):
        kind = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}[entry.datatype]
        return generator.random(count).astype(kind).tobytes()
    if entry.datatype == "BF16":
        # The upper half of a float32.
        return generator.random(count, np.float32).view("<u2")[1::2].tobytes()
    size = entry.nbytes // count if count else 1
    below = 2 if entry.datatype == "BOOL" else _SMALL_NUMBERS
    return generator.integers(0, below, count).astype(f"<u{size}").tobytes()
