"""Templates of requests: what requests that differ in ids, shapes, sizes and values have in common.

The first request with some skeleton is parsed as any other (`gpubridge.protocol.infer_request`, its gRPC
twin). What it says, but for the values that may vary, is its template. The compiled module finds the
template of a later request, checks its values, and returns them; here they become what the engine needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.host_shm import Slot
from gpubridge.protocol.fields import json_parameters
from gpubridge.protocol.request_form import RequestForm, RequestRegions
from gpubridge.request import InferRequest, RequestOptions
from gpubridge.tensor.dtypes import item_size
from gpubridge.transport.context import RequestContext, correlated

__all__ = [
    "TEMPLATE_BYTES",
    "InputRule",
    "MatchedRequest",
    "RequestTemplate",
    "VaryingValue",
    "input_rules",
]

TEMPLATE_BYTES = 2 << 20
"""Limit of the templates of one model version, or of all models over gRPC."""

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

InputRule = tuple[Sequence[int], Sequence[int] | None, int, int]
"""Dims with the batch dim, dims of a reshape, item size or 0 for BYTES, bytes in a region or -1."""


class VaryingValue(NamedTuple):
    """A value of a template that differs between its requests, other than ids, dims and sizes.

    - ``role``: as the compiled module numbers it.
    - ``owner``: index of its input or output.
    - ``name``: that of a custom parameter.
    """

    role: int
    owner: int
    name: str


class MatchedRequest(NamedTuple):
    """One request that has a template.

    - ``form``: that of the first request; its own values are not those of this one.
    - ``identifier``: the client's id.
    - ``dims``: as they go to the stub.
    - ``places``: of the inputs that came with it.
    - ``context``: what else goes to the stub.
    - ``regions``: where its inputs and outputs lie in the client's memory, if any do.
    """

    form: RequestForm
    identifier: str
    dims: bytes
    places: Sequence[tuple[int, int]]
    batch_size: int
    context: RequestContext
    options: RequestOptions
    regions: RequestRegions | None

    def request(
        self, slot: Slot | None, start: int, on_done: Callable[[Any], None], copied: int
    ) -> InferRequest:
        """Make the request of inputs that lie in a slot, at their places from ``start`` on."""
        return InferRequest(
            self.form.signature,
            slot,
            start,
            self.places,
            on_done,
            self.identifier,
            self.context,
            copied,
            self.batch_size,
            self.options,
            self.dims,
        )


class _Shapes:
    """The shapes of inputs by their dims, for the schedulers that ask."""

    __slots__ = ("_dims", "_form")

    def __init__(self, form: RequestForm, dims: bytes) -> None:
        self._form = form
        self._dims = dims

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        dims = struct.unpack(f"<{len(self._dims) >> 3}q", self._dims)
        at = 0
        for name, shape in self._form.options.shapes:
            end = at + len(shape)
            yield name, dims[at:end]
            at = end


class RequestTemplate:
    """What requests with one skeleton have in common.

    - ``form``: the first request.
    - ``varying``: which other values than ids, dims and sizes differ.
    """

    __slots__ = ("_dims", "_options", "_parameters", "_varying", "form")

    def __init__(self, form: RequestForm, varying: Sequence[VaryingValue]) -> None:
        self.form = form
        self._varying = varying
        self._dims = form.dims
        self._options = form.options
        self._parameters: dict[str, Any] = {}
        if varying and form.context.parameters:
            self._parameters = json.loads(form.context.parameters)

    def matched(
        self,
        identifier: str,
        dims: bytes,
        places: Sequence[tuple[int, int]],
        batch_size: int,
        values: Sequence[Any] | None,
    ) -> MatchedRequest:
        """Return a request by its values, which have been checked."""
        form = self.form
        if values is not None:
            context, options = self._context(dims, values)
        else:
            context = form.context
            options = self._options
            if dims != self._dims:
                options = self._options = _with_shapes(options, _Shapes(form, dims))
                self._dims = dims
        regions = self._regions(values or ()) if form.shared else None
        return MatchedRequest(form, identifier, dims, places, batch_size, context, options, regions)

    def _context(self, dims: bytes, values: Sequence[Any]) -> tuple[RequestContext, RequestOptions]:
        """Return the context and the options of a request with other parameters than the first."""
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
        shapes = _Shapes(self.form, dims)
        options = RequestOptions(priority, timeout, correlation, first.start, first.end, shapes)
        return context, options

    def _regions(self, values: Sequence[Any]) -> RequestRegions:
        first = self.form.regions()
        inputs = list(first.inputs)
        outputs = dict(first.outputs)
        names = tuple(self.form.outputs or ())
        for (role, owner, _), value in zip(self._varying, values, strict=True):
            field = _REGION_FIELDS.get(role)
            if field is None:
                continue
            if role <= _INPUT_BYTES:
                region = inputs[owner]
                # Without a region its offset and size mean nothing.
                inputs[owner] = region and region._replace(**{field: value})
            elif names[owner] in outputs:
                outputs[names[owner]] = outputs[names[owner]]._replace(**{field: value})
        return RequestRegions(inputs, outputs)


def _with_shapes(options: RequestOptions, shapes: _Shapes) -> RequestOptions:
    return RequestOptions(
        options.priority,
        options.timeout_us,
        options.correlation_id,
        options.start,
        options.end,
        shapes,
    )


def input_rules(form: RequestForm, config: ModelConfig) -> list[InputRule] | None:
    """Return what the inputs of a template have to be; None for a request that can be no template."""
    if form.packed:
        return None
    batch = (-1,) if config.max_batch_size else ()
    rules: list[InputRule] = []
    for entry in form.inputs:
        spec = config.inputs_by_name[entry.name]
        there = -1 if entry.region is None else entry.region.nbytes
        if not -1 <= there < _SIZE_LIMIT:
            return None
        rules.append(((*batch, *spec.dims), spec.reshape, item_size(entry.datatype) or 0, there))
    return rules
