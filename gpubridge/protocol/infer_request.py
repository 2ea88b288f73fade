"""Parsing of v2 inference requests over HTTP.

The headers of a client's requests mostly differ in an id, dims, sizes and the values of parameters. The
first of them is parsed here into a :class:`RequestForm` and kept as a template; compiled code matches
later ones with it (`gpubridge.protocol.request_templates`).
"""

from __future__ import annotations

from math import prod
from typing import Any

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.dataplane import RequestTemplates
from gpubridge.errors import BridgeError, invalid
from gpubridge.model_io import InputForm, check_inputs, unexpected_output
from gpubridge.protocol.body import check_json_strings
from gpubridge.protocol.fields import (
    JsonObject,
    array,
    boolean,
    check_rank,
    checked_id,
    json_parameters,
    parse_json,
    shown,
    string,
    text_of_sequence,
    unsigned,
    wrong_type,
)
from gpubridge.protocol.json_tensor import (
    JSON_DATATYPES,
    JsonValues,
    NotPacked,
    input_from_json,
    parse_without_values,
)
from gpubridge.protocol.long_strings import NO_LONG_STRINGS, LongStrings
from gpubridge.protocol.request_form import (
    LENGTH_BYTES,
    CheckRegion,
    OutputForm,
    RequestForm,
    nothing_registered,
    placed_form,
    region_of,
    sent_inputs,
)
from gpubridge.protocol.request_templates import (
    TEMPLATE_BYTES,
    RequestTemplate,
    input_rules,
)
from gpubridge.request import NO_CONTEXT, NO_OPTIONS, RequestOptions
from gpubridge.tensor.datatypes import DATATYPES, element_count, item_size
from gpubridge.transport.context import RequestContext, correlated

_DIM_LIMIT = 1 << 63


class FormCache:
    """Bounded cache of request templates of one model version.

    ``templates``: makes requests from headers that match a template, without `parse`.
    """

    def __init__(self, config: ModelConfig, check_region: CheckRegion = nothing_registered) -> None:
        self._config = config
        self._check_region = check_region
        self.templates = RequestTemplates(TEMPLATE_BYTES, 1)

    def parse(self, header: bytes, following: int) -> RequestForm:
        """Parse a header that ``following`` bytes of data follow, and keep it as a template.

        Raises BridgeError if it is no valid request for the model.
        """
        form = parse_request(header, self._config, following, self._check_region)
        self.keep(header, form)
        return form

    def keep(self, header: bytes, form: RequestForm) -> None:
        """Keep a parsed header as a template."""
        rules = input_rules(form, self._config)
        if rules is not None:
            template = RequestTemplate(form.without_data())
            self.templates.add_json(header, self._config.max_batch_size, rules, template)


def parse_request(
    header: bytes,
    config: ModelConfig,
    following: int,
    check_region: CheckRegion = nothing_registered,
) -> RequestForm:
    """Parse the JSON header of a request, and check it against the model and the bytes after it.

    Raises BridgeError: with Triton's text.
    """
    try:
        document, long = parse_without_values(header)
        form = _read_request(document, config, following, check_region, long)
        if long.used:
            return form
    except (NotPacked, BridgeError):
        pass
    # Parsed as a whole, so that the first error in the document is reported.
    return _read_request(parse_json(header), config, following, check_region, NO_LONG_STRINGS)


def _read_request(
    document: Any,
    config: ModelConfig,
    following: int,
    check_region: CheckRegion,
    long: LongStrings,
) -> RequestForm:
    identifier = checked_id(string(document, "id")) if _has(document, "id") else ""
    context, binary_default, options = _parameters(document, long)
    inputs = [_input(entry, check_region) for entry in array(document, "inputs")]
    outputs = _outputs(document, config, check_region)
    _check_following(sent_inputs(inputs), following, config.name)
    return make_form(identifier, inputs, outputs, binary_default, context, options, config)


def make_form(  # noqa: PLR0913  (the parts of a request)
    identifier: str,
    inputs: list[InputForm],
    outputs: dict[str, OutputForm] | None,
    binary_default: bool,
    context: RequestContext,
    options: RequestOptions,
    config: ModelConfig,
) -> RequestForm:
    """Return the form of a request after checking it against the model; raises BridgeError."""
    check_inputs(identifier, inputs, config)
    check_json_strings(identifier, inputs, config.name)
    at = 0
    places = []
    for entry in sent_inputs(inputs):
        places.append((at, entry.nbytes))
        if entry.data is None:
            at += entry.nbytes
    form = placed_form(inputs, outputs, tuple(places), context, options, config)
    form.identifier = identifier
    form.binary_default = binary_default
    # Strings that came as JSON are well formed.
    form.strings = tuple(pair for pair in form.strings if form.sent[pair[0]].data is None)
    form.aligned = all(
        place[0] % (item_size(entry.datatype) or 1) == 0
        for entry, place in zip(form.sent, places, strict=True)
    )
    return form


def _check_following(inputs: list[InputForm], following: int, model: str) -> None:
    """Refuse a size of the binary data that differs from the header's."""
    at = 0
    for entry in inputs:
        if entry.data is None:
            at += entry.nbytes
            if at > following:
                raise invalid(
                    f"unexpected size for input '{entry.name}', expecting {at - following} "
                    f"additional bytes for model '{model}'"
                )
    if at != following:
        raise invalid(f"unexpected additional input data for model '{model}'")


def raw_request(config: ModelConfig, nbytes: int) -> RequestForm:
    """Return the form of a request without a header: the body is the model's only input.

    One variable dim follows from the size of the body. The body of a BYTES input is one string, whose
    length is written before it.

    Raises BridgeError for a model with several inputs, or with an input of several variable dims.
    """
    if len(config.inputs) != 1:
        raise invalid(
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced "
            f"but got {len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    text = spec.datatype == "BYTES"
    dims = _raw_dims(spec, nbytes)
    shape = [1, *dims] if config.max_batch_size else dims
    before = LENGTH_BYTES if text else 0
    entry = InputForm(spec.name, spec.datatype, tuple(shape), before + nbytes)
    if not nbytes:
        # Without a body there is no slot.
        entry.data = bytes(before)
    check_inputs("", [entry], config, raw=True)
    places = ((-before, entry.nbytes),)
    form = placed_form([entry], None, places, NO_CONTEXT, NO_OPTIONS, config)
    form.binary_bytes = nbytes
    return form


def _raw_dims(spec: TensorSpec, nbytes: int) -> list[int]:
    """Return the dims of an input whose bytes are the whole body; raises BridgeError."""
    if sum(dim < 0 for dim in spec.dims) > 1:
        raise invalid(
            f"[request id: <id_unknown>] The shape of the raw input '{spec.name}' can not be deduced "
            "because there are more than one variable-sized dimension; send a JSON header with its shape"
        )
    if spec.datatype == "BYTES" and spec.dims != (1,):
        raise invalid(
            f"[request id: <id_unknown>] For BYTE datatype raw input '{spec.name}', the model must have "
            "input shape [1]; send a JSON header with its shape"
        )
    known = (item_size(spec.datatype) or 1) * prod(dim for dim in spec.dims if dim > 0)
    return [nbytes // known if dim < 0 else dim for dim in spec.dims]


def _has(document: Any, name: str) -> bool:
    return type(document) is dict and name in document


def _input(entry: Any, check_region: CheckRegion) -> InputForm:
    if type(entry) is not dict:
        raise _no_data("But no field is set")
    name = string(entry, "name", " of an input")
    where = f" of input '{name}'"
    dims = array(entry, "shape", where)
    check_rank(dims, name)
    shape = tuple([unsigned(dim, "shape", where) for dim in dims])
    if max(shape, default=0) >= _DIM_LIMIT:
        # Not representable, even without elements.
        raise invalid(f"the shape {list(shape)} of input '{name}' has a dim beyond 63 bits")
    datatype = string(entry, "datatype", where)
    if datatype not in DATATYPES:
        raise invalid(f"invalid datatype for input {name}: expected one of {', '.join(DATATYPES)}")
    parameters = _members(entry.get("parameters", _NONE))
    size = parameters.get("binary_data_size")
    region = parameters.get("shared_memory_region")
    given = [
        word
        for word, there in (
            ("'data'", "data" in entry),
            ("'binary_data_size'", "binary_data_size" in parameters),
            ("'shared_memory_region'", region is not None),
        )
        if there
    ]
    if len(given) != 1:
        raise _no_data("But set " + " ".join(given) if given else "But no field is set")
    if region is not None:
        place = region_of(parameters)
        assert place is not None
        check_region(place)
        return InputForm(name, datatype, shape, place.nbytes, region=place)
    if "data" in entry:
        if not shape:
            # No model takes it, whatever its data.
            return InputForm(name, datatype, shape, 0, b"")
        values = entry["data"]
        if type(values) is JsonValues and datatype in JSON_DATATYPES:
            data = values.pack(datatype, _count(shape))
            return InputForm(name, datatype, shape, len(data), data)
        _count(shape)
        return input_from_json(name, datatype, shape, array(entry, "data", where))
    return InputForm(name, datatype, shape, unsigned(size, "binary_data_size", where))


_NONE: JsonObject = {}


def _members(parameters: Any) -> JsonObject:
    """Return the parameters of an input or output; as in Triton, anything but members is none."""
    return parameters if type(parameters) is dict else _NONE


def _object(parameters: Any) -> JsonObject:
    if type(parameters) is not dict:
        raise invalid(
            "failed to get request params.: attempt to get members for non-object: expected an object "
            f"as 'parameters', got {shown(parameters)}"
        )
    return parameters


def _count(shape: tuple[int, ...]) -> int:
    count = element_count(shape)
    if count >= _DIM_LIMIT:
        raise invalid(f"the shape {list(shape)} has {count} elements, more than any tensor can")
    return count


def _no_data(found: str) -> BridgeError:
    return invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        f"'parameters', 'shared_memory_region' in 'parameters'. {found}"
    )


def _outputs(
    document: JsonObject, config: ModelConfig, check_region: CheckRegion
) -> dict[str, OutputForm] | None:
    if not _has(document, "outputs"):
        return None
    known = config.outputs_by_name
    outputs = {}
    for entry in array(document, "outputs"):
        name = string(entry, "name", " of an output")
        if name not in known:
            raise unexpected_output(name, config)
        parameters = _members(entry.get("parameters", _NONE))
        binary = False
        if "binary_data" in parameters:
            binary = boolean(parameters["binary_data"], "binary_data", f" of output '{name}'")
        classes = _classes(parameters)
        region = region_of(parameters)
        if region is not None:
            if binary or classes:
                other = "binary_data" if binary else "classification"
                raise invalid(f"Output can't set both 'shared_memory_region' and '{other}'")
            check_region(region)
        outputs[name] = OutputForm(binary, classes, region)
    return outputs or None


def _classes(parameters: JsonObject) -> int:
    """Return the number of classes requested of an output; 0 for its values."""
    if "classification" not in parameters:
        return 0
    classes = parameters["classification"]
    if type(classes) is not int or not 0 <= classes < 1 << 64:
        raise wrong_type(classes, "unsigned-integer", "Unable to set 'classification': ")
    if classes and "shared_memory_region" in parameters:
        raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
    return classes


def _parameters(
    document: JsonObject, long: LongStrings
) -> tuple[RequestContext, bool, RequestOptions]:
    """Return the context for the stub, whether outputs are binary by default, and the options."""
    if not _has(document, "parameters"):
        return NO_CONTEXT, False, NO_OPTIONS
    given = _object(document["parameters"])
    correlation: str | int = 0
    flags = timeout = 0
    parameters: JsonObject = {}
    texts: dict[str, bytes] = {}
    binary_default = False
    priority = 0
    for name, value in given.items():
        if name == "binary_data_output":
            binary_default = boolean(value, name)
        elif name == "sequence_id":
            correlation = _sequence_id(value)
        elif name in _SEQUENCE_FLAGS:
            flags |= boolean(value, name) * _SEQUENCE_FLAGS[name]
        elif name == "timeout":
            timeout = unsigned(value, name)
        elif name == "priority":
            priority = unsigned(value, name)
        else:
            parameters[name] = _parameter(name, value)
            text = _long_text(value, long)
            if text is not None:
                del parameters[name]
                texts[name] = text
    options = RequestOptions(
        priority,
        timeout,
        correlation,
        bool(flags & _SEQUENCE_FLAGS["sequence_start"]),
        bool(flags & _SEQUENCE_FLAGS["sequence_end"]),
    )
    context = RequestContext(
        **correlated(correlation),
        flags=flags,
        timeout=timeout,
        parameters=json_parameters(parameters, texts) if parameters or texts else "",
    )
    return context, binary_default, options


def _long_text(value: Any, long: LongStrings) -> bytes | None:
    try:
        return long.json(value)
    except ValueError:
        raise NotPacked from None


_SEQUENCE_FLAGS = {"sequence_start": 1, "sequence_end": 2}
"""The values of ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_...``."""


def _sequence_id(value: Any) -> str | int:
    if type(value) is str:
        return text_of_sequence(value)
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    raise wrong_type(
        value, "string", "Unable to parse 'sequence_id': ", " or an integer of 0 or more"
    )


def _parameter(name: str, value: Any) -> Any:
    if name.startswith("triton_"):
        raise invalid(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
            "specified."
        )
    if type(value) not in (bool, int, str, float):
        raise invalid(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    return value
