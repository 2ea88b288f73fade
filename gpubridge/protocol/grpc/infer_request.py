"""A ModelInferRequest: from the top level of its message to what the engine needs.

As over HTTP, requests mostly differ in an id, dims, sizes and the values of parameters: protobuf parses
the first one of a kind, which becomes a template (`gpubridge.protocol.request_templates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from gpubridge import dataplane
from gpubridge.config import ModelConfig
from gpubridge.config.schema import ProtoMessage
from gpubridge.dataplane import RequestTemplates
from gpubridge.errors import invalid
from gpubridge.host_shm import Slot
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.model_io import InputForm, check_inputs
from gpubridge.protocol.body import ALIGNMENT, check_strings, packed_places
from gpubridge.protocol.grpc.contents import data_from_contents
from gpubridge.protocol.grpc.fields import RequestHead
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
from gpubridge.tensor.dtypes import DATATYPES

LONG_FORM_BYTES = 1 << 20
"""Longer forms are a worker's to read."""
_INVALID = "<invalid>"


class ServedModel(Protocol):
    """A model, as far as requests have to know it."""

    name: str
    version: int
    config: ModelConfig

    def submit(self, request: InferRequest, origin: Any = None, /) -> None:
        """Take a request over."""


class KnownRequest(RequestTemplate):
    """A parsed request and its model; all requests with its skeleton share it.

    - ``model``: as found by name and version.
    - ``empty_final_response``: see `read_parameters`.
    - ``submit``: gives the model a request that gets one response; None where there may be others.
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
"""A request for the engine, and where its inputs and outputs lie in the client's memory, if any do."""


class FormCache:
    """Remembers templates of requests, to all models; bounded.

    - ``find``: gets a model's name and version, as the request spells them, and returns the model.
    - ``templates``: makes requests of all messages that `read` does not have to look at.
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
        """Forget the templates of requests to some models: they are looked up again."""
        self.templates.remove_if(lambda known: is_gone(known.model))

    def read(self, head: RequestHead) -> KnownRequest:
        """Return what a request says; it becomes a template; raises BridgeError."""
        read = self.read_once(head)
        form, model = read.form, read.model
        known = self._known(read)
        rules = input_rules(form, model.config)
        if rules is not None:
            batch = model.config.max_batch_size
            self.templates.add_fields(head.form, head.sizes, batch, rules, known)
        return known

    def read_once(self, head: RequestHead) -> ReadRequest:
        """Do the same for a form that may be too long to be remembered; any thread may."""
        message, long = parse_form(head.form)
        name, version = message.model_name, message.model_version
        model = self._find(name, version)
        form, empty_final = build_form(message, head, model.config, self._check_region, long)
        return ReadRequest(name, version, model, form, empty_final)

    def known(self, read: ReadRequest) -> KnownRequest | None:
        """Return what a request says that was read earlier; None if its model was loaded anew since.

        Raises BridgeError if it is gone.
        """
        current = self._find(read.name, read.version) is read.model
        return self._known(read) if current else None

    def _known(self, read: ReadRequest) -> KnownRequest:
        arena = self._arena_of(read.model.config.name)
        return KnownRequest(read.form, read.model, arena, read.empty_final_response)


class ReadRequest(NamedTuple):
    """A parsed request: the model's name and version as it spells them; the rest as `KnownRequest`."""

    name: str
    version: str
    model: ServedModel
    form: RequestForm
    empty_final_response: bool


class LongParts(NamedTuple):
    """Parts taken out of a long form.

    - ``parameters``: those of the request, JSON in UTF-8; None where the message has them.
    - ``contents``: likewise the typed contents of each input, serialised.
    """

    parameters: memoryview | None = None
    contents: Sequence[memoryview | None] = ()


def parse_form(form: bytes) -> tuple[ProtoMessage, LongParts]:
    """Parse all but the long parts of a form; raises BridgeError."""
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
    """Check a request, all but its strings, in Triton's order; raises BridgeError.

    It returns:

    - ``form``: with ``places`` from the beginning of a slot, each aligned, and without an
      identifier.
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
    """Say what one input is and where its data are."""
    typed = entry.HasField("contents")
    datatype = entry.datatype if entry.datatype in DATATYPES else _INVALID
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


def _outputs(
    message: ProtoMessage, config: ModelConfig, check_region: CheckRegion
) -> dict[str, OutputForm] | None:
    """Read the outputs asked for; ``binary_data`` means nothing here, all of them are raw."""
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
            raise invalid(f"unexpected inference output '{entry.name}' for model '{config.name}'")
        outputs[entry.name] = OutputForm(binary=True, classes=classes, region=region)
    return outputs or None


def _check_dims(identifier: str, inputs: list[InputForm], config: ModelConfig) -> None:
    """Refuse negative dims, which only protobuf can carry, where nothing before them is wrong."""
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
    """Return the data of a request's inputs: typed contents, or what has ``offsets`` in ``memory``."""
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
    """Raise BridgeError: INVALID_ARG for BYTES inputs that are not what their shapes say."""
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
    """Make the request of inputs that lie in a slot, each at its place in the form.

    ``copied``: bytes of them that were copied on the way there.

    Raises BridgeError: INVALID_ARG for BYTES inputs that are not what their shapes say; the slot is
    the caller's still.
    """
    form = known.form
    if form.strings:
        memory = slot.memory
        views = [memory[at : at + nbytes] for at, nbytes in form.places]
        check_input_strings(form, head.identifier, known.model.config.name, views)
    request = form.request(slot, 0, form.places, on_done, copied, head.identifier)
    return known, request, form.regions() if form.shared else None
