"""The generate extension: a flat JSON object for the request and for each response."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import orjson

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.dataplane import GeneratedTemplate, RequestTemplates
from gpubridge.errors import BridgeError, invalid
from gpubridge.model_io import InputForm, as_configured
from gpubridge.protocol.example_inputs import generate_example
from gpubridge.protocol.fields import (
    JsonObject,
    checked_id,
    json_parameters,
    parse_json,
    shown,
    wrong_type,
)
from gpubridge.protocol.infer_request import make_form
from gpubridge.protocol.infer_response import json_members
from gpubridge.protocol.json_tensor import data_to_json, input_from_json
from gpubridge.protocol.request_form import RequestForm
from gpubridge.protocol.request_templates import TEMPLATE_BYTES, RequestTemplate, input_rules
from gpubridge.protocol.response_encoding import reshapes
from gpubridge.request import NO_CONTEXT, NO_OPTIONS, InferResponse, LongParameters
from gpubridge.tensor.datatypes import element_count
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import Signature

_NESTED = "parameters"
_LONG_TEXT = 1 << 16
"""Bytes of a response above which its pieces are not joined."""
_SHOWN_INPUTS = 4
"""Inputs of a model that an example in an error has."""
_FEW_NAMES = 32
"""Names up to which each is searched for in the whole body; the cost is quadratic."""


class GenerateForms:
    """Bounded cache of generate requests of one model version, as `FormCache` for inference.

    ``templates``: makes requests from bodies that match a template, without `parse`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.templates = RequestTemplates(TEMPLATE_BYTES, 1, tuple(config.inputs_by_name))

    def parse(self, body: bytes) -> RequestForm:
        """Parse a body, and keep it as a template; raises BridgeError as `parse_generate` does."""
        form = parse_generate(body, self._config)
        rules = input_rules(form, self._config)
        if rules is not None:
            template = RequestTemplate(form.without_data())
            self.templates.add_json(body, self._config.max_batch_size, rules, template)
        return form


def parse_generate(body: bytes, config: ModelConfig) -> RequestForm:
    """Parse a generate request: its members are inputs by name, the ``id``, and parameters.

    Members of ``parameters`` count like members of the object itself. An input is a value or a flat
    list with the configured shape, whose last variable dim follows from the number of elements.

    Raises BridgeError: with Triton's text.
    """
    try:
        document = parse_json(body)
    except BridgeError as error:
        raise invalid(f"{error.message}. {_expected(config)}") from error
    if type(document) is not dict:
        text = f"attempt to get members for non-object: got {shown(document)}"
        raise invalid(f"{text}. {_expected(config)}")
    _check_unique(body, document, config.inputs_by_name)
    return generate_form(document, config)


def _expected(config: ModelConfig) -> str:
    """Say what a request of a model looks like."""
    example = generate_example(config, _SHOWN_INPUTS)
    return f"Expected a JSON object of inputs and parameters, such as {json.dumps(example)}"


def generate_form(document: JsonObject, config: ModelConfig, identifier: str = "") -> RequestForm:
    """Return the form of a generate request's members; raises BridgeError as `parse_generate` does."""
    specs = config.inputs_by_name
    inputs: list[InputForm] = []
    parameters: JsonObject = {}
    for name, value, nested in _members(document):
        if name in specs:
            inputs.append(value_input(specs[name], value, config))
        elif name == "id" and not nested:
            if type(value) is not str:
                raise wrong_type(value, "string", "Unable to parse 'id': ")
            # Models get it among the parameters, too, as in Triton.
            identifier = parameters[name] = checked_id(value)
        elif type(value) in (bool, int, str, float):
            parameters[name] = value
        else:
            where = f"Converting keyword: '{_NESTED}': " if nested else ""
            raise invalid(
                f"{where}parameter '{name}' has invalid type. It should be either 'int', 'bool', or "
                "'string'."
            )
    context = NO_CONTEXT
    if parameters:
        context = RequestContext(parameters=json_parameters(parameters))
    try:
        return make_form(identifier, inputs, None, False, context, NO_OPTIONS, config)
    except BridgeError as error:
        given = {entry.name for entry in inputs}
        if not parameters or given.issuperset(config.required_inputs):
            raise
        # A parameter may be a misspelt input.
        taken = [name for name in parameters if name != "id" or name not in document]
        if not taken:
            raise
        names = ", ".join(f"'{name}'" for name in taken[:_FEW_NAMES])
        raise invalid(f"{error.message} Taken as parameters: {names}.") from error


def _check_unique(body: bytes, document: JsonObject, inputs: Collection[str]) -> None:
    """Refuse a body with a repeated member, which is ambiguous."""
    nested = document.get(_NESTED)
    names = [*document, *(nested if type(nested) is dict else ())]
    few = len(names) <= _FEW_NAMES and b"\\u" not in body
    if few and all(body.count(orjson.dumps(name)) == 1 for name in names):
        return
    try:
        # Python callbacks, so that other threads run between their calls.
        pairs = json.loads(body, object_pairs_hook=_Pairs, parse_int=_nothing, parse_float=_nothing)
    except (ValueError, RecursionError):
        # Not strict JSON, although Triton accepts it: the last member of a name counts.
        return
    for name, value in pairs:
        repeated = _repeated(value) if name == _NESTED and type(value) is _Pairs else ""
        _refuse_repeated(repeated, inputs)
    _refuse_repeated(_repeated(pairs), inputs)


def _nothing(_: str) -> None:
    """Return nothing for a number: only names are needed."""


class _Pairs(list[tuple[str, Any]]):
    """The members of an object with repeated names."""


def _repeated(pairs: _Pairs) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _refuse_repeated(name: str, inputs: Collection[str]) -> None:
    if name in inputs:
        raise invalid(f"[request id: <id_unknown>] input '{name}' already exists in request")
    if name:
        raise invalid(f"member '{name}' of the request: expected it once, got it twice")


def _members(document: JsonObject) -> Iterator[tuple[str, Any, bool]]:
    """Yield names, values, and whether they are in the nested object."""
    for name, value in document.items():
        if name != _NESTED:
            yield name, value, False
        elif type(value) is dict:
            yield from ((inner, each, True) for inner, each in value.items())
        else:
            raise wrong_type(value, "object", f"Expected JSON object for keyword: '{_NESTED}': ")


def value_input(spec: TensorSpec, value: Any, config: ModelConfig) -> InputForm:
    """Return an input of a JSON value or a list of them; raises BridgeError."""
    values = value if type(value) is list else [value]
    shape = deduced_shape(spec, len(values), config)
    if shape is None:
        raise invalid(f"The schema can not convert input '{spec.name}' to tensor with proper shape")
    return input_from_json(spec.name, spec.datatype, shape, values)


def deduced_shape(spec: TensorSpec, count: int, config: ModelConfig) -> tuple[int, ...] | None:
    """Return the shape of ``count`` elements: the last variable dim gets the remaining factor."""
    dims = [-1, *spec.dims] if config.max_batch_size else list(spec.dims)
    for dim in dims:
        if dim > 0:
            if count % dim:
                return None
            count //= dim
    for i in reversed(range(len(dims))):
        if dims[i] < 0:
            dims[i] = count
            count = 1
    return tuple(dims) if count == 1 else None


def generated_template(
    signature: Signature, config: ModelConfig, version: int
) -> GeneratedTemplate | None:
    """Return the template of responses without parameters; None if outputs may be reshaped."""
    if reshapes(config):
        return None
    members: dict[str, bytes | tuple[int, str] | None] = {**_model_members(config, version)}
    members["id"] = None
    for index, spec in enumerate(signature.tensors):
        members[spec.name] = index, spec.datatype
    # Triton's order.
    return GeneratedTemplate([(orjson.dumps(name), members[name]) for name in sorted(members)])


def _model_members(config: ModelConfig, version: int) -> dict[str, bytes]:
    return {"model_name": orjson.dumps(config.name), "model_version": b'"%d"' % version}


def encode_generated(
    identifier: str, response: InferResponse, config: ModelConfig, version: int
) -> list[bytes | memoryview]:
    """Encode a response as one JSON object: outputs of one element as a value, others as flat lists.

    Returns the text in pieces. Raises BridgeError for an output that JSON cannot represent.
    """
    members: dict[str, bytes | memoryview] = {**_model_members(config, version)}
    if identifier:
        members["id"] = orjson.dumps(identifier)
    parameters = response.parameters or {}
    if not isinstance(parameters, LongParameters):
        for name, value in parameters.items():
            members[name] = _value(value)
    tensors = zip(response.signature.tensors, response.shapes, response.buffers, strict=True)
    for spec, returned, buffer in tensors:
        count = element_count(as_configured(spec.name, returned, config))
        data = data_to_json(spec.name, spec.datatype, count, buffer)
        members[spec.name] = memoryview(data)[1:-1] if count == 1 else data
    pieces: list[bytes | memoryview] = []
    if isinstance(parameters, LongParameters):
        # Long parameters stay encoded. Of equal names the last one counts.
        pieces = [b"{", *json_members(parameters)]
    # Triton's order.
    for name in sorted(members):
        pieces += (b"," if pieces else b"{", orjson.dumps(name), b":", members[name])
    pieces.append(b"}")
    return pieces if sum(map(len, pieces)) > _LONG_TEXT else [b"".join(pieces)]


def _value(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # Models may set integers beyond 64 bits, and strings with lone surrogates.
        return json.dumps(value, ensure_ascii=False).encode(errors="replace")
