"""A ModelInferRequest: from the top level of its message to what the engine needs.

As over HTTP, the form of a client's requests is mostly the same bytes again and again. What it means
is a :class:`RequestForm`, which is kept by those bytes: protobuf parses them the first time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from gpubridge.config import ModelConfig
from gpubridge.config.schema import ProtoMessage
from gpubridge.host_shm import HostArena, Slot
from gpubridge.model_io import check_inputs, model_shape
from gpubridge.protocol.body import ALIGNMENT, check_strings
from gpubridge.protocol.fields import invalid
from gpubridge.protocol.grpc.contents import data_from_contents
from gpubridge.protocol.grpc.fields import RequestHead
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.protocol.grpc.parameters import (
    RequestParameters,
    classes_wanted,
    shared_region,
)
from gpubridge.protocol.request_form import InputForm, OutputForm, RequestForm
from gpubridge.protocol.shared_memory import CheckRegion, nothing_registered
from gpubridge.request import InferRequest, Outcome
from gpubridge.tensor.dtypes import DATATYPES, element_count
from gpubridge.transport.signatures import encode_tensors

__all__ = [
    "FormCache",
    "HasConfig",
    "KnownRequest",
    "aligned_end",
    "build_form",
    "infer_request",
    "pack_inputs",
]

_FORM_KEPT = 8192
_FORMS_KEPT = 512
_INVALID = "<invalid>"


class HasConfig(Protocol):
    """A model, as far as requests have to know it."""

    @property
    def config(self) -> ModelConfig:
        """Its configuration."""


T = TypeVar("T", bound=HasConfig)


class KnownRequest(Generic[T]):
    """What a form means: the model it is for, and what it says.

    Attributes
    ----------
    model : T
        As found by name and version.
    form : RequestForm
        Its ``identifier`` is empty where the request is one of many of the same form.
    empty_final_response : bool
        See `RequestParameters`.
    """

    __slots__ = ("empty_final_response", "form", "model", "sizes")

    def __init__(
        self, model: T, form: RequestForm, empty_final_response: bool, sizes: tuple[int, ...]
    ) -> None:
        self.model = model
        self.form = form
        self.empty_final_response = empty_final_response
        self.sizes = sizes


class FormCache(Generic[T]):
    """Remembers what forms meant, of all models; bounded.

    Parameters
    ----------
    find : callable
        Gets a model's name and version, as the request spells them, and returns the model.
    check_region : callable
        Says which shared memory there is.
    """

    __slots__ = ("_check_region", "_find", "_known")

    def __init__(
        self, find: Callable[[str, str], T], check_region: CheckRegion = nothing_registered
    ) -> None:
        self._find = find
        self._check_region = check_region
        self._known: dict[bytes, KnownRequest[T]] = {}

    def forget(self, is_gone: Callable[[T], bool]) -> None:
        """Forget the forms of requests to some models: they are looked up again."""
        self._known = {f: known for f, known in self._known.items() if not is_gone(known.model)}

    def read(self, head: RequestHead) -> KnownRequest[T]:
        """Return what a request's form means.

        Raises
        ------
        BridgeError
            When it is no valid request for a model that is there.
        """
        known = self._known.get(head.form)
        if known is not None:
            if known.sizes == head.sizes:
                return known
            form = _resized(known.form, head.sizes)
            if form is not None:
                known = KnownRequest(known.model, form, known.empty_final_response, head.sizes)
                self._known[head.form] = known
                return known
        message = parse_message("ModelInferRequest", head.form)
        model = self._find(message.model_name, message.model_version)
        form, empty_final = build_form(message, head, model.config, self._check_region)
        known = KnownRequest(model, form, empty_final, head.sizes)
        if len(head.form) <= _FORM_KEPT and not form.packed:
            if len(self._known) >= _FORMS_KEPT:
                self._known.clear()
            self._known[head.form] = known
        return known


def build_form(
    message: ProtoMessage,
    head: RequestHead,
    config: ModelConfig,
    check_region: CheckRegion = nothing_registered,
) -> tuple[RequestForm, bool]:
    """Check a request, all but its strings, in Triton's order.

    Returns
    -------
    form : RequestForm
        With ``places`` from the beginning of a slot, each aligned, and without an identifier.
    empty_final_response : bool

    Raises
    ------
    BridgeError
        In Triton's words.
    """
    context, options, empty_final = RequestParameters.read(message.parameters)
    inputs = _inputs(message, head, config, check_region)
    outputs = _outputs(message, config, check_region)
    sent = [entry for entry in inputs if entry.region is None]
    _check_dims(head.identifier, inputs, config)
    check_inputs(head.identifier, inputs, config)
    signature, dims = encode_tensors(
        [(entry.name, entry.datatype, model_shape(entry, config)) for entry in inputs],
        tuple(outputs or ()),
    )
    form = RequestForm(
        identifier="",
        inputs=inputs,
        sent=sent,
        outputs=outputs,
        binary_default=True,
        signature=signature,
        dims=dims,
        context=context,
        binary_bytes=sum(entry.nbytes for entry in sent if entry.data is None),
        places=_places([entry.nbytes for entry in sent]),
        strings=tuple(
            (i, element_count(entry.shape))
            for i, entry in enumerate(sent)
            if entry.datatype == "BYTES"
        ),
        aligned=True,
        packed=any(entry.data is not None for entry in inputs),
        shared=len(sent) != len(inputs)
        or any(output.region is not None for output in (outputs or {}).values()),
        batch_size=inputs[0].shape[0] if config.max_batch_size and inputs else 1,
        options=replace(options, shapes=tuple((entry.name, entry.shape) for entry in inputs)),
    )
    return form, empty_final


def aligned_end(end: int) -> int:
    """Return where the next input begins when one ends at ``end``."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def _places(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    places = []
    end = 0
    for nbytes in sizes:
        end = aligned_end(end)
        places.append((end, nbytes))
        end += nbytes
    return tuple(places)


def _resized(form: RequestForm, sizes: tuple[int, ...]) -> RequestForm | None:
    """Return the form with other lengths of its strings; None where others must be checked anew."""
    if form.shared or len(sizes) != len(form.inputs):
        return None
    inputs = []
    for entry, nbytes in zip(form.inputs, sizes, strict=True):
        if nbytes == entry.nbytes:
            inputs.append(entry)
        elif entry.datatype == "BYTES":
            inputs.append(replace(entry, nbytes=nbytes))
        else:
            return None
    return replace(form, inputs=inputs, sent=inputs, places=_places(sizes), binary_bytes=sum(sizes))


def _inputs(
    message: ProtoMessage, head: RequestHead, config: ModelConfig, check_region: CheckRegion
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
    for entry in message.inputs:
        form = _input(entry, head, config.name, raws)
        if form.region is not None:
            check_region(form.region)
        inputs.append(form)
    return inputs


def _input(entry: ProtoMessage, head: RequestHead, model: str, raws: Iterator[int]) -> InputForm:
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
        data = data_from_contents(entry, datatype, model)
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


def pack_inputs(
    form: RequestForm, head: RequestHead, memory: bytes | memoryview, arena: HostArena
) -> Slot:
    """Copy a request's inputs into a new slot, each to its place in the form.

    Parameters
    ----------
    memory : bytes or memoryview
        What ``head.offsets`` are offsets of.

    Returns
    -------
    Slot
        The caller's to free, or to give away with the request.

    Raises
    ------
    BridgeError
        UNAVAILABLE when the arena is at its limit.
    """
    places = form.places
    slot = arena.allocate(sum(places[-1]) or 1 if places else 1)
    there = slot.memory
    if form.packed:
        for entry, (at, nbytes) in zip(form.sent, places, strict=True):
            assert entry.data is not None
            there[at : at + nbytes] = entry.data
        return slot
    # Raw contents beyond the inputs mean nothing.
    for (at, nbytes), begin in zip(places, head.offsets):  # noqa: B905
        there[at : at + nbytes] = memory[begin : begin + nbytes]
    return slot


def infer_request(
    known: KnownRequest[T],
    head: RequestHead,
    slot: Slot,
    on_done: Callable[[Outcome], None],
    copied: int,
) -> InferRequest:
    """Make the request of inputs that lie in a slot, each at its place in the form.

    Parameters
    ----------
    copied : int
        Bytes of them that were copied on the way there.

    Raises
    ------
    BridgeError
        INVALID_ARG for BYTES inputs that are not what their shapes say; the slot is the caller's
        still.
    """
    form = known.form
    if form.strings:
        memory = slot.memory
        named = replace(form, identifier=head.identifier) if head.identifier else form
        views = [memory[at : at + nbytes] for at, nbytes in form.places]
        check_strings(named, known.model.config.name, views)
    return InferRequest(
        form.signature,
        slot,
        0,
        form.places,
        on_done,
        head.identifier,
        form.context,
        copied,
        form.batch_size,
        form.options,
        form.dims,
    )
