"""A model's call as a request for the model that it calls."""

from __future__ import annotations

from typing import Any

import orjson

from gpubridge.engine.model import Model
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.protocol.infer_request import make_form
from gpubridge.protocol.request_form import InputForm, OutputForm, RequestForm
from gpubridge.request import RequestOptions
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature

__all__ = ["CallForms"]

_KEPT = 512
_START, _END = 1, 2
_SHARED = b'{"shared":true}'
"""The extras of calls with tensors that the caller looks at, too: others were copied for the call."""


class CallForms:
    """What signatures of calls mean to the models that are called; bounded."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Signature, list[int], RequestForm]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._known.clear()

    def read(self, record: Record, model: Model) -> tuple[RequestForm, bytes, RequestOptions]:
        """Return what a call asks for, the extras for the called stub, and the scheduler's options.

        Raises
        ------
        BridgeError
            In Triton's words, when it is no valid request for the model.
        """
        extras = record.extras or {}
        plain = "flags" not in extras and "correlation_id" not in extras and "timeout" not in extras
        form = self._form(record, model)
        options = form.options if plain else _options(extras, form)
        shared = "handed_on" in extras
        if plain and "parameters" not in extras:
            return form, _SHARED if shared else b"", options
        passed_on = {name: extras[name] for name in _PASSED_ON if name in extras}
        if shared:
            passed_on["shared"] = True
        return form, _encoded(passed_on), options

    def _form(self, record: Record, model: Model) -> RequestForm:
        signature = record.signature
        key = id(signature), record.shapes, model
        known = self._known.get(key)
        sizes = [ref[2] for ref in record.refs]
        if known is not None and known[1] == sizes:
            return known[2]
        names = {spec.name for spec in model.config.outputs}
        for name in signature.requested:
            if name not in names:
                raise BridgeError(
                    f"unexpected inference output '{name}' for model '{model.name}'",
                    ErrorCode.INVALID_ARG,
                )
        inputs = [
            InputForm(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(signature.tensors, record.shapes, sizes, strict=True)
        ]
        outputs = {name: OutputForm(True) for name in signature.requested} or None
        form = make_form(
            record.identifier, inputs, outputs, True, b"", RequestOptions(), model.config
        )
        if not record.identifier:
            if len(self._known) >= _KEPT:
                self._known.clear()
            # The signature is held, so that nothing else gets its address.
            self._known[key] = signature, sizes, form
        return form


def _encoded(extras: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(extras)
    except orjson.JSONEncodeError as error:
        raise BridgeError(
            "the request's correlation id, flags, timeout or parameters cannot be passed on: "
            f"{error}",
            ErrorCode.INVALID_ARG,
        ) from None


_PASSED_ON = ("correlation_id", "flags", "timeout", "parameters")


def _options(extras: dict[str, Any], form: RequestForm) -> RequestOptions:
    flags = extras.get("flags", 0)
    correlation_id = extras.get("correlation_id", 0)
    if isinstance(correlation_id, str):
        text_of_sequence(correlation_id)
    return RequestOptions(
        0,
        extras.get("timeout", 0),
        correlation_id,
        bool(flags & _START),
        bool(flags & _END),
        form.options.shapes,
    )
