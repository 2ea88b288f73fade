"""Runs ``execute_batch``: requests in as arrays, stacked outputs out as responses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import numpy as np

from gpubridge.errors import invalid
from gpubridge.pb_utils import Batch, InferenceRequest, InferenceResponse, TritonModelException
from gpubridge.pb_utils.batch import rows_of
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.stub_settings import StubSettings

PADDING = "BATCH_PADDING"
_DATATYPES = {entry.config_name: entry.name for entry in DATATYPES.values()}


class Executes(Protocol):
    """A model, or what calls it. Its method is looked up for each batch: a model may replace it."""

    def execute(self, requests: list[InferenceRequest], /) -> Any:
        """Execute a batch."""


def executes_by(model: Any, settings: StubSettings) -> Executes | None:
    """Return what executes a model's requests: by `execute_batch` if it has that, else the model.

    None for a model without either. Raises BridgeError: INVALID_ARG where `execute_batch` cannot be
    used.
    """
    has_execute = callable(getattr(model, "execute", None))
    if not callable(getattr(model, "execute_batch", None)):
        return model if has_execute else None
    of = settings.model
    if of.batched and not of.decoupled and not of.iterative:
        config = json.loads(settings.arguments["model_config"])
        return ArrayBatches(model, _padding(config))
    if has_execute:
        return model  # type: ignore[no-any-return]
    raise invalid(
        f"Python model {of.path} implements `execute_batch`, which needs a max_batch_size of at least 1 "
        "and answers each request once: a decoupled model, one of iterative sequences, and one "
        "without a batch dimension need `execute`"
    )


def _padding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value that pads each ragged input; raises INVALID_ARG for a wrong parameter."""
    text = config.get("parameters", {}).get(PADDING, {}).get("string_value")
    if text is None:
        return {}
    datatypes = {each["name"]: _DATATYPES[each["data_type"]] for each in config["input"]}
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            given = {name: "" if of == "BYTES" else given for name, of in datatypes.items()}
        return {
            name: value.encode()
            if datatypes[name] == "BYTES"
            else np.array(value, numpy_dtype(datatypes[name])).reshape(())
            for name, value in given.items()
        }
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
        raise invalid(
            f"the parameter {PADDING} expects a number, or a JSON object of values by input (text for "
            f"strings), got {text!r}: {error!r}"
        ) from None


class ArrayBatches:
    """Calls a model's ``execute_batch`` like ``execute``."""

    def __init__(self, model: Any, padding: Mapping[str, Any]) -> None:
        self._model = model
        self._padding = padding

    def execute(
        self, requests: list[InferenceRequest]
    ) -> list[InferenceResponse] | Awaitable[list[InferenceResponse]]:
        """Execute requests; awaitable where the model's function is a coroutine."""
        batch = Batch(requests, self._padding)
        returned = self._model.execute_batch(batch)
        if inspect.isawaitable(returned):
            return self._later(batch, returned)
        return self._answers(batch, returned)

    async def _later(self, batch: Batch, returned: Awaitable[Any]) -> list[InferenceResponse]:
        return self._answers(batch, await returned)

    def _answers(self, batch: Batch, returned: Any) -> list[InferenceResponse]:
        if not isinstance(returned, Mapping):
            raise TritonModelException(
                "expected a dict of outputs by name in the execute_batch return, found type "
                f"'{type(returned)}'."
            )
        outputs = [rows_of(name, value, batch.sizes) for name, value in returned.items()]
        return [
            InferenceResponse(error=batch.errors[i])
            if i in batch.errors
            else InferenceResponse([tensors[i] for tensors in outputs])
            for i in range(len(batch.requests))
        ]
