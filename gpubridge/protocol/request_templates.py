"""Templates of requests that differ only in ids, shapes, sizes and parameter values.

The first request of a template is parsed in Python (`gpubridge.protocol.infer_request` and the module of
that name for gRPC). The compiled module finds the template of a later request, checks its values, and
makes the engine's request; it calls Python for contexts, options and regions that vary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.dataplane import RequestShapes
from gpubridge.protocol.fields import json_parameters
from gpubridge.protocol.request_form import RequestForm, RequestRegions
from gpubridge.request import RequestOptions
from gpubridge.tensor.datatypes import item_size
from gpubridge.transport.context import RequestContext, correlated

TEMPLATE_BYTES = 2 << 20
"""Maximum bytes of the templates of one model version, or of all models over gRPC."""

_SIZE_LIMIT = 1 << 62

# Roles of values, as csrc/request/scan.h numbers them.
_PRIORITY = 3
_TIMEOUT = 4
_SEQUENCE = (5, 6)
_CUSTOM = (7, 8)
_INPUT_REGION, _INPUT_OFFSET, _INPUT_BYTES = 14, 15, 16
_OUTPUT_REGION, _OUTPUT_OFFSET, _OUTPUT_BYTES = 17, 18, 19
_REGION_FIELDS = {
    _INPUT_REGION: "name",
    _INPUT_OFFSET: "offset",
    _INPUT_BYTES: "nbytes",
    _OUTPUT_REGION: "name",
    _OUTPUT_OFFSET: "offset",
    _OUTPUT_BYTES: "nbytes",
}

InputRule = tuple[Sequence[int], Sequence[int] | None, int, int, str | None]
"""Dims with the batch dim, dims of a reshape, item size or 0 for BYTES, bytes in a region or -1, and the
datatype of values that are JSON."""


class _VaryingValue(NamedTuple):
    """A value other than ids, dims and sizes that differs between requests of a template.

    - ``role``: numbered as in the compiled module.
    - ``owner``: index of its input or output.
    - ``name``: of a custom parameter.
    """

    role: int
    owner: int
    name: str


VaryingValues = Sequence[tuple[int, int, str]]
"""The fields of each `_VaryingValue` of a template, from the compiled module."""


class RequestTemplate:
    """State shared by requests of one template.

    ``form``: of the first request; others differ in ids, dims, sizes, and the values set by `vary`.
    """

    __slots__ = ("_parameters", "_varying", "form")

    def __init__(self, form: RequestForm) -> None:
        self.form = form
        self._varying: list[_VaryingValue] = []
        self._parameters: dict[str, Any] = {}

    def vary(self, varying: VaryingValues, outputs: int) -> bool:
        """Set the values other than ids, dims and sizes that differ between requests.

        The texts of the first request, which may be long, are dropped: a template's size is that of its key.

        Returns False if this cannot be a template because an output is requested twice: an index of
        ``outputs`` would then not identify the output of a region.
        """
        if outputs != len(self.form.outputs or ()):
            return False
        self._varying = [_VaryingValue(*value) for value in varying]
        self.form = replace(self.form, identifier="")
        if varying and (given := self.form.context.parameters):
            parameters = json.loads(given if isinstance(given, str) else bytes(given))
            vary = {name: None for role, _, name in self._varying if role in _CUSTOM}
            self._parameters = {**parameters, **vary}
            self.form.context = self.form.context.changed(parameters="")
        return True

    def varied(self, dims: bytes, values: Sequence[Any]) -> tuple[RequestContext, RequestOptions]:
        """Return the context and the options of a request with these checked values."""
        first = self.form.options
        priority, timeout, correlation = first.priority, first.timeout_us, first.correlation_id
        parameters = self._parameters
        given: dict[str, Any] = {}
        for (role, _, name), value in zip(self._varying, values, strict=True):
            if role == _PRIORITY:
                priority = value
            elif role == _TIMEOUT:
                timeout = value
            elif role in _SEQUENCE:
                correlation = value
            elif role in _CUSTOM:
                given[name] = value
        if given:
            parameters = {**parameters, **given}
        context = RequestContext(
            **correlated(correlation),
            flags=self.form.context.flags,
            timeout=timeout,
            parameters=json_parameters(parameters) if parameters else "",
        )
        shapes = RequestShapes(first.shapes, dims)
        options = RequestOptions(priority, timeout, correlation, first.start, first.end, shapes)
        return context, options

    def regions(self, values: Sequence[Any] | None) -> RequestRegions:
        """Return the regions of a request's inputs and outputs in client memory."""
        first = self.form.regions()
        inputs = list(first.inputs)
        outputs = dict(first.outputs)
        names = tuple(self.form.outputs or ())
        for (role, owner, _), value in zip(self._varying, values or (), strict=True):
            field = _REGION_FIELDS.get(role)
            if field is None:
                continue
            if role <= _INPUT_BYTES:
                region = inputs[owner]
                # Without a region, offset and size are ignored.
                inputs[owner] = region and region._replace(**{field: value})
            elif names[owner] in outputs:
                outputs[names[owner]] = outputs[names[owner]]._replace(**{field: value})
        return RequestRegions(inputs, outputs)


def input_rules(form: RequestForm, config: ModelConfig) -> list[InputRule] | None:
    """Return the rules for the inputs of a template; None if the request cannot be a template."""
    batch = (-1,) if config.max_batch_size else ()
    rules: list[InputRule] = []
    for entry in form.inputs:
        spec = config.inputs_by_name[entry.name]
        there = -1 if entry.region is None else entry.region.nbytes
        if not -1 <= there < _SIZE_LIMIT:
            return None
        size = item_size(entry.datatype) or 0
        json = None if entry.data is None else entry.datatype
        rules.append(((*batch, *spec.dims), spec.reshape, size, there, json))
    return rules
