"""Parsing of ModelInferRequest messages.

As over HTTP, requests mostly differ in an id, dims, sizes and the values of parameters: protobuf parses
the first of them, which becomes a template (`gpubridge.protocol.request_templates`). The top level of a
message is read without protobuf, because raw contents may be large and should stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from gpubridge import dataplane
from gpubridge.config import ModelConfig
from gpubridge.dataplane import RequestTemplates, read_fields
from gpubridge.errors import invalid
from gpubridge.host_shm import Slot
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.model_io import InputForm, check_inputs, unexpected_output
from gpubridge.protocol.body import ALIGNMENT, check_strings, packed_places
from gpubridge.protocol.fields import check_rank
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.protocol.grpc.parameters import (
    classes_wanted,
    read_parameters,
    shared_region,
)
from gpubridge.protocol.request_form import (
    CheckRegion,
    OutputForm,
    RequestForm,
    RequestRegions,
    nothing_registered,
    placed_form,
    sent_inputs,
)
from gpubridge.protocol.request_templates import (
    TEMPLATE_BYTES,
    RequestTemplate,
    input_rules,
)
from gpubridge.request import InferRequest, Outcome
from gpubridge.schema import ProtoMessage
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.tensor.datatypes import DATATYPES, item_size
from gpubridge.tensor.packed_numbers import numbers_to_bytes

LONG_FORM_BYTES = 1 << 20
"""Bytes of a form above which a worker parses it."""
_INVALID = "<invalid>"

# Fields of InferTensorContents: name, number, wire format, Triton's name, allowed datatypes.
_CONTENTS = (
    ("bool_contents", 1, "varint", "BOOL", ("BOOL",)),
    ("int_contents", 2, "varint", "INT32", ("INT8", "INT16", "INT32")),
    ("int64_contents", 3, "varint", "INT64", ("INT64",)),
    ("uint_contents", 4, "varint", "UINT32", ("UINT8", "UINT16", "UINT32")),
    ("uint64_contents", 5, "varint", "UINT64", ("UINT64",)),
    ("fp32_contents", 6, "fixed", "FP32", ("FP32",)),
    ("fp64_contents", 7, "fixed", "FP64", ("FP64",)),
    ("bytes_contents", 8, "bytes", "BYTES", ("BYTES",)),
)
_FIELD_BYTES = 4
"""Size of the elements of 32-bit fields, which also carry narrower datatypes."""


@dataclass(slots=True)
class RequestHead:
    """Top level of a message.

    - ``form``: the message without its id and raw contents, itself a valid message.
    - ``sizes``: size of each raw content.
    - ``offsets``: its offset in the message, or in the slot that it was received into.
    """

    form: bytes | memoryview
    identifier: str
    sizes: Sequence[int]
    offsets: Sequence[int]


def read_request(message: bytes) -> RequestHead:
    """Parse the top level of a complete message; raises BridgeError."""
    return RequestHead(*read_fields(message))


class ServedModel(Protocol):
    """The interface of models that parsing needs."""

    name: str
    version: int
    config: ModelConfig
    statistics: ModelStatistics

    def submit(self, request: InferRequest, origin: Any = None, /) -> None:
        """Submit a request."""


class KnownRequest(RequestTemplate):
    """A request template and its model.

    - ``empty_final_response``: see `read_parameters`.
    - ``submit``: submits a request for one response; None for a decoupled model.
    """

    __slots__ = ("arena", "empty_final_response", "model", "submit")

    def __init__(
        self,
        form: RequestForm,
        model: ServedModel,
        arena: RequestArena,
        empty_final_response: bool,
    ) -> None:
        super().__init__(form)
        self.model = model
        self.arena = arena
        self.empty_final_response = empty_final_response
        self.submit = None if model.config.decoupled else model.submit


MadeRequest = tuple[KnownRequest, InferRequest, RequestRegions | None]
"""A request with its template, and its regions of client memory, if any."""


class FormCache:
    """Bounded cache of request templates of all models.

    - ``find``: returns the model of a name and version, as spelt in the request.
    - ``templates``: makes requests from messages that match a template, without `read`.
    """

    def __init__(
        self,
        find: Callable[[str, str], ServedModel],
        arena_of: Callable[[str], RequestArena],
        check_region: CheckRegion = nothing_registered,
    ) -> None:
        self._find = find
        self._arena_of = arena_of
        self._check_region = check_region
        self.templates = RequestTemplates(TEMPLATE_BYTES, ALIGNMENT)

    def forget(self, is_gone: Callable[[ServedModel], bool]) -> None:
        """Remove the templates of some models."""
        self.templates.remove_if(lambda known: is_gone(known.model))

    def read(self, head: RequestHead) -> KnownRequest:
        """Parse a request and keep it as a template; raises BridgeError."""
        read = self.read_once(head)
        form, model = read.form, read.model
        rules = input_rules(form, model.config)
        if rules is not None:
            batch = model.config.max_batch_size
            template = self._known(read)
            self.templates.add_fields(bytes(head.form), head.sizes, batch, rules, template)
        return self._known(read)

    def read_once(self, head: RequestHead) -> ReadRequest:
        """Parse a request without keeping it; thread-safe; raises BridgeError."""
        message, long = parse_form(head.form)
        name, version = message.model_name, message.model_version
        model = self._find(name, version)
        with model.statistics.refusing(head.identifier):
            form, empty_final = build_form(message, head, model.config, self._check_region, long)
        return ReadRequest(name, version, model, form, empty_final)

    def known(self, read: ReadRequest) -> KnownRequest | None:
        """Return the template of a request parsed earlier; None if its model was reloaded since.

        Raises BridgeError if the model is gone.
        """
        current = self._find(read.name, read.version) is read.model
        return self._known(read) if current else None

    def _known(self, read: ReadRequest) -> KnownRequest:
        arena = self._arena_of(read.model.config.name)
        return KnownRequest(read.form, read.model, arena, read.empty_final_response)


class ReadRequest(NamedTuple):
    """A parsed request with the name and version as spelt in it; see `KnownRequest`."""

    name: str
    version: str
    model: ServedModel
    form: RequestForm
    empty_final_response: bool


class LongParts(NamedTuple):
    """Parts removed from a long form.

    - ``parameters``: of the request, as JSON in UTF-8; None if the message has them.
    - ``contents``: the serialised typed contents of each input; None if the message has them.
    """

    parameters: memoryview | None = None
    contents: Sequence[memoryview | None] = ()


def parse_form(form: bytes | memoryview) -> tuple[ProtoMessage, LongParts]:
    """Parse a form without its long parts; raises BridgeError."""
    split = dataplane.split_form(form) if len(form) > LONG_FORM_BYTES else None
    if split is None:
        return parse_message("ModelInferRequest", form), LongParts()
    skeleton, parameters, places = split
    view = memoryview(form)
    contents = [None if place is None else view[place[0] : sum(place)] for place in places]
    message = parse_message("ModelInferRequest", skeleton)
    return message, LongParts(memoryview(parameters) if parameters else None, contents)


def build_form(
    message: ProtoMessage,
    head: RequestHead,
    config: ModelConfig,
    check_region: CheckRegion = nothing_registered,
    long: LongParts = LongParts(),  # noqa: B008  (it never changes)
) -> tuple[RequestForm, bool]:
    """Check a request except its strings, in Triton's order; raises BridgeError.

    Returns the form, without an identifier and with aligned ``places`` from the start of a slot, and
    whether an empty final response is requested.
    """
    context, options, empty_final = read_parameters(message.parameters, long.parameters)
    inputs = _inputs(message, head, config, check_region, long.contents)
    outputs = _outputs(message, config, check_region)
    _check_dims(head.identifier, inputs, config)
    check_inputs(head.identifier, inputs, config)
    raw = sum(entry.data is None and entry.region is None for entry in inputs)
    if len(head.sizes) != raw:
        raise invalid(
            f"[request id: {head.identifier or '<id_unknown>'}] expected {raw} raw_input_contents for "
            f"model '{config.name}', one for each input that is not in shared memory, got "
            f"{len(head.sizes)}"
        )
    places = packed_places([entry.nbytes for entry in sent_inputs(inputs)])
    return placed_form(inputs, outputs, places, context, options, config), empty_final


def _inputs(
    message: ProtoMessage,
    head: RequestHead,
    config: ModelConfig,
    check_region: CheckRegion,
    contents: Sequence[memoryview | None],
) -> list[InputForm]:
    names = set()
    for entry in message.inputs:
        if entry.name in names:
            raise invalid(
                f"[request id: {head.identifier or '<id_unknown>'}] input '{entry.name}' already "
                "exists in request"
            )
        names.add(entry.name)
    inputs = []
    raws = iter(head.sizes)
    for entry, long in zip_longest(message.inputs, contents):
        form = _input(entry, head, config.name, raws, long)
        if form.region is not None:
            check_region(form.region)
        inputs.append(form)
    return inputs


def _input(
    entry: ProtoMessage,
    head: RequestHead,
    model: str,
    raws: Iterator[int],
    contents: memoryview | None,
) -> InputForm:
    """Parse one input."""
    typed = entry.HasField("contents")
    datatype = entry.datatype if entry.datatype in DATATYPES else _INVALID
    check_rank(entry.shape, entry.name)
    shape = tuple(entry.shape)
    if typed and head.sizes:
        raise invalid(
            f"contents field must not be specified when using raw_input_contents for '{entry.name}' "
            f"for model '{model}'"
        )
    region = shared_region(entry)
    if region is not None:
        if typed:
            raise invalid(
                "unexpected 'content' provided when using shared memory for input tensor "
                f"'{entry.name}' for model '{model}'"
            )
        return InputForm(entry.name, datatype, shape, region.nbytes, region=region)
    if typed:
        data = data_from_contents(entry, datatype, model, contents)
        return InputForm(entry.name, datatype, shape, len(data), data)
    nbytes = next(raws, None)
    if nbytes is None:
        raise invalid(
            f"unable to find data for input tensor '{entry.name}' for model '{model}' in request."
        )
    return InputForm(entry.name, datatype, shape, nbytes)


def data_from_contents(
    entry: ProtoMessage, datatype: str, model: str, long: memoryview | None = None
) -> bytes:
    """Return the bytes of an input from its typed fields; raises BridgeError.

    ``long``: the serialised contents, if the entry has only one element of each field.
    """
    data: bytes | None = None
    for field, number, form, name, datatypes in _CONTENTS:
        if not getattr(entry.contents, field):
            continue
        prefix = (
            f"unexpected explicit tensor data for input tensor '{entry.name}' for model '{model}'"
        )
        if data is not None:
            raise invalid(f"{prefix}, binary data was already supplied.")
        if datatype not in datatypes:
            raise invalid(f"{prefix} of type '{name}', expected datatype '{datatype}'")
        contents = entry.contents.SerializeToString() if long is None else long
        size = item_size(datatype) or 0
        narrow = form == "varint" and datatype != "BOOL" and size < _FIELD_BYTES
        data = dataplane.pack_typed_contents(
            contents, number, form, _FIELD_BYTES if narrow else size
        )
        assert data is not None  # protobuf has parsed it
        if narrow:
            values = memoryview(data).cast("I" if name == "UINT32" else "i")
            data = numbers_to_bytes(entry.name, datatype, values)
    return data or b""


def _outputs(
    message: ProtoMessage, config: ModelConfig, check_region: CheckRegion
) -> dict[str, OutputForm] | None:
    """Parse the requested outputs; ``binary_data`` is ignored, because all outputs are raw."""
    known = config.outputs_by_name
    outputs = {}
    for entry in message.outputs:
        region = shared_region(entry)
        classes = classes_wanted(entry)
        if region is not None and classes:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        if region is not None:
            check_region(region)
        if entry.name not in known:
            raise unexpected_output(entry.name, config)
        outputs[entry.name] = OutputForm(binary=True, classes=classes, region=region)
    return outputs or None


def _check_dims(identifier: str, inputs: list[InputForm], config: ModelConfig) -> None:
    """Refuse negative dims, which only protobuf can represent, unless an earlier input is wrong."""
    for entry in inputs:
        spec = config.inputs_by_name.get(entry.name)
        if spec is None or spec.datatype != entry.datatype:
            return
        if any(dim < 0 for dim in entry.shape):
            raise invalid(
                f"[request id: {identifier or '<id_unknown>'}] All input dimensions should be "
                f"specified for input '{entry.name}' for model '{config.name}', got "
                f"[{','.join(map(str, entry.shape))}]"
            )


def input_data(
    form: RequestForm, offsets: Sequence[int], memory: bytes | memoryview
) -> list[bytes | memoryview]:
    """Return the data of a request's inputs: typed contents, or raw contents in ``memory``."""
    if form.packed:
        return [entry.data or b"" for entry in form.sent]
    view = memoryview(memory)
    return [
        view[begin : begin + nbytes]
        for (_, nbytes), begin in zip(form.places, offsets, strict=True)
    ]


def check_input_strings(
    form: RequestForm, identifier: str, model: str, data: Sequence[bytes | memoryview]
) -> None:
    """Raise BridgeError: INVALID_ARG for BYTES inputs that do not match their shapes."""
    if form.strings:
        named = replace(form, identifier=identifier) if identifier else form
        check_strings(named, model, [memoryview(each) for each in data])


def infer_request(
    known: KnownRequest,
    head: RequestHead,
    slot: Slot,
    on_done: Callable[[Outcome], None],
    copied: int,
) -> MadeRequest:
    """Return the request with inputs in a slot, at the places of the form.

    ``copied``: bytes of the inputs that were copied.

    Raises BridgeError: INVALID_ARG for BYTES inputs that do not match their shapes; the caller keeps
    the slot.
    """
    form = known.form
    if form.strings:
        memory = slot.memory
        views = [memory[at : at + nbytes] for at, nbytes in form.places]
        check_input_strings(form, head.identifier, known.model.config.name, views)
    request = form.request(slot, 0, form.places, on_done, copied, head.identifier)
    return known, request, form.regions() if form.shared else None
