"""Checks of a request's inputs against the model's configuration, with Triton's texts; reshapes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.errors import BridgeError, invalid, listed
from gpubridge.tensor.datatypes import element_count, item_size

_logger = logging.getLogger(__name__)
_warned: WeakSet[ModelConfig] = WeakSet()
"""Those of models which got requests without a required input, as the log says."""

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


_NO_INPUTS = "it declares none, in config.pbtxt or by auto_complete_config"
_ELEMENT_LIMIT = 1 << 63
"""Stubs and responses count elements in 63 bits."""


@dataclass(slots=True)
class InputForm:
    """One input of a request, and the source of its bytes.

    - ``shape``: with the batch dimension if the model has one.
    - ``nbytes``: size of the tensor as sent.
    - ``data``: the bytes, if they were parsed from the request's form.
    - ``region``: their region of client memory (`SharedRegion`), if any.
    - ``miscounted``: whether ``data`` has another number of strings than ``shape`` of elements.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int
    data: bytes | None = None
    region: Any = None
    miscounted: bool = False


def check_inputs(
    identifier: str, inputs: Sequence[InputForm], config: ModelConfig, *, raw: bool = False
) -> None:
    """Check names, datatypes, shapes and sizes against the configuration; raises BridgeError."""
    check = _Check(identifier, config, raw)
    check.names([entry.name for entry in inputs])
    batch: int | None = None
    for entry in inputs:
        spec = config.inputs_by_name[entry.name]
        check.tensor(entry, spec)
        if config.max_batch_size:
            size = entry.shape[0]
            if batch is not None and size != batch:
                raise check.error(
                    f"input '{entry.name}' batch size does not match other inputs for "
                    f"'{config.name}'"
                )
            batch = size
    if config.max_batch_size and batch is None:
        raise check.error("out of bounds index 0: request has 0 inputs")
    if batch is not None and batch > config.max_batch_size:
        raise check.error(
            f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'"
        )


class _Check:
    def __init__(self, identifier: str, config: ModelConfig, raw: bool) -> None:
        self._config = config
        self._prefix = f"[request id: {identifier or '<id_unknown>'}] "
        self._raw = raw

    def error(self, text: str) -> BridgeError:
        return invalid(self._prefix + text)

    def names(self, given: Sequence[str]) -> None:
        name = self._config.name
        specs = self._config.inputs_by_name
        required = self._config.required_inputs
        most = len(specs)
        names = set(given)
        if len(names) != len(given):
            counts = Counter(given)
            twice = next(entry for entry in given if counts[entry] > 1)
            raise self.error(f"input '{twice}' already exists in request")
        missing = [entry for entry in required if entry not in names]
        if not len(required) <= len(given) <= most:
            if len(required) == most:
                expected = f"expected {most} inputs but got {len(given)} inputs"
            else:
                expected = (
                    f"expected number of inputs between {len(required)} and {most} but got "
                    f"{len(given)} inputs"
                )
            raise self.error(
                f"{expected} for model '{name}'. Got input(s) {_listed(given)}, but missing required "
                f"input(s) {_listed(missing)}. Please provide all required input(s)."
                f"{_unknown(given, specs)}"
            )
        for entry in given:
            if entry not in specs:
                raise unexpected_input(entry, self._config)
        if missing and not self._config.backend:
            raise self.error(
                f"expected {len(required)} required inputs for ensemble '{name}'. Got input(s) "
                f"{_listed(given)}, but missing required input(s) {_listed(missing)}. Please provide "
                "all required input(s)."
            )
        if missing and self._config not in _warned:
            # As in Triton, which counts the inputs, the model gets the request.
            _warned.add(self._config)
            _logger.warning(
                "model '%s' gets requests without the required input(s) %s: these had input(s) %s, as many "
                "as are required",
                name,
                _listed(missing),
                _listed(given),
            )

    def tensor(self, entry: InputForm, spec: TensorSpec) -> None:
        name = self._config.name
        if entry.datatype != spec.datatype:
            raise self.error(
                f"inference input '{entry.name}' data-type is '{entry.datatype}', but model "
                f"'{name}' expects '{spec.datatype}'"
            )
        batched = self._config.max_batch_size > 0
        if batched and not entry.shape:
            raise self.error(
                f"input '{entry.name}' has no shape but model requires batch dimension for '{name}'"
            )
        expected = (-1, *spec.dims) if batched else spec.dims
        shape = entry.shape
        fits = len(shape) == len(expected) and all(
            want in (-1, got) for want, got in zip(expected, shape, strict=True)
        )
        if not fits:
            raise self.error(
                f"unexpected shape for input '{entry.name}' for model '{name}'. Expected "
                f"{_dims(expected)}, got {_dims(shape)}. {_BATCH_NOTE if batched else ''}"
            )
        if batched and shape[0] == 0:
            raise self.error(
                f"input '{entry.name}' of model '{name}' has batch size 0, expected 1 to "
                f"{self._config.max_batch_size}: leave the request out or send at least one element"
            )
        count = element_count(shape)
        if count >= _ELEMENT_LIMIT:
            raise self.error(
                f"input '{entry.name}' of model '{name}' has {count} elements, more than any tensor can"
            )
        size = item_size(entry.datatype)
        if size is None:
            return
        needed = size * count
        if entry.nbytes != needed:
            shown = "raw_input" if self._raw else entry.name
            raise self.error(
                f"input byte size mismatch for input '{shown}' for model '{name}'. Expected "
                f"{needed}, got {entry.nbytes}"
            )


def unexpected_input(name: str, config: ModelConfig) -> BridgeError:
    """Return the error for an input of a request that the model does not have."""
    there = _there_are(config.inputs_by_name)
    return invalid(f"unexpected inference input '{name}' for model '{config.name}': {there}")


def unexpected_output(name: str, config: ModelConfig) -> BridgeError:
    """Return the error for an output that a request asks for and the model does not have."""
    there = f"its outputs are {listed(list(config.outputs_by_name))}"
    if not config.outputs_by_name:
        there = "it declares no outputs"
    return invalid(f"unexpected inference output '{name}' for model '{config.name}': {there}")


def _unknown(given: Sequence[str], inputs: Mapping[str, TensorSpec]) -> str:
    names = [entry for entry in given if entry not in inputs]
    return f" It has no input(s) {listed(names)}: {_there_are(inputs)}." if names else ""


def _there_are(inputs: Mapping[str, TensorSpec]) -> str:
    return f"its inputs are {listed(list(inputs))}" if inputs else _NO_INPUTS


def _dims(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _listed(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def model_shape(entry: InputForm, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape that the model sees, after the configured reshape."""
    spec = config.inputs_by_name[entry.name]
    if spec.reshape is None:
        return entry.shape
    batch = entry.shape[:1] if config.max_batch_size else ()
    variable = [
        dim for dim, wanted in zip(entry.shape[len(batch) :], spec.dims, strict=True) if wanted < 0
    ]
    return batch + tuple(variable.pop(0) if dim < 0 else dim for dim in spec.reshape)


def as_configured(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Return the shape that clients see, before the configured reshape of an output.

    Raises BridgeError: INTERNAL, with Triton's text, for a shape that cannot be that of the configured
    output, which clients know from the model's metadata.
    """
    output = config.outputs_by_name.get(name)
    if output is None or output.reshape is None:
        return shape
    batched = 1 if config.max_batch_size else 0
    batch, returned = shape[:batched], shape[batched:]
    variable: list[int] = []
    if len(returned) == len(output.reshape):
        variable = [dim for dim, known in zip(returned, output.reshape, strict=True) if known < 0]
    if len(variable) == sum(dim < 0 for dim in output.dims):
        configured = batch + tuple(variable.pop(0) if dim < 0 else dim for dim in output.dims)
        if element_count(configured) == element_count(shape):
            return configured
    raise BridgeError(
        f"output tensor shape does not match size of output for '{name}': expected the dims of its "
        f"reshape {_dims(output.reshape)}, got {_dims(returned)}"
    )
