"""Parsed header of a request, without any data: names, shapes, and the location of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.errors import not_found
from gpubridge.host_shm import Slot
from gpubridge.model_io import InputForm, model_shape
from gpubridge.protocol.fields import string, unsigned
from gpubridge.request import NO_OPTIONS, InferRequest, RequestOptions
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import encode_tensors

_REGION = "shared_memory_region"
_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"
LENGTH_BYTES = 4
"""Each element of a BYTES tensor comes after its length, a number of so many bytes."""


class SharedRegion(NamedTuple):
    """A piece of memory that the client registered: bytes of it from an offset on."""

    name: str
    nbytes: int
    offset: int


CheckRegion = Callable[[SharedRegion], None]
"""Raises where a request names memory that there is not; asked once for each form of request."""


def nothing_registered(region: SharedRegion) -> None:
    """Refuse every region, as if nobody had registered any."""
    raise not_found(f"Unable to find shared memory region: '{region.name}'")


def region_of(parameters: Mapping[str, Any]) -> SharedRegion | None:
    """Return the region that the parameters of an input or output name in JSON, if any.

    Raises BridgeError: INTERNAL, in Triton's words, for members of another type.
    """
    if parameters.get(_REGION) is None:
        return None
    members = dict(parameters)
    return SharedRegion(
        string(members, _REGION),
        unsigned(members.get(_SIZE, 0), _SIZE),
        unsigned(members.get(_OFFSET, 0), _OFFSET),
    )


@dataclass(slots=True)
class OutputForm:
    """Requested form of an output: binary data after the header, or JSON values in it.

    - ``classes``: how many of its classes are wanted instead of its values; 0 for the values.
    - ``region``: the client's memory, if it is wanted there and in the response not at all.
    """

    binary: bool
    classes: int = 0
    region: SharedRegion | None = None


def classes_of(outputs: dict[str, OutputForm] | None) -> dict[str, int]:
    """Return how many classes are wanted of those outputs of which classes are wanted."""
    return {name: form.classes for name, form in (outputs or {}).items() if form.classes}


class RequestRegions(NamedTuple):
    """Location of a request's inputs and outputs in the client's memory.

    - ``inputs``: one for each input; None for those that come with the request.
    - ``outputs``: by name, of those that are wanted there.
    """

    inputs: Sequence[SharedRegion | None]
    outputs: Mapping[str, SharedRegion]


@dataclass(slots=True)
class RequestForm:
    """Everything that a request's header says.

    - ``sent``: the inputs that come with the request: all those that are not in the client's
      memory.
    - ``binary_bytes``: bytes that must follow the header.
    - ``signature``, ``dims``: as they go to the stub; the dims are those that the model sees.
    - ``outputs``: the outputs asked for, by name; None for all of them.
    - ``binary_default``: whether outputs that were not named go out as binary data.
    - ``places``: offset from the first byte after the header, and size, of each input that is sent.
      A negative one is that of a string whose length is written before it, see `write_length`.
    - ``strings``: index in ``sent`` and element count of the BYTES inputs that follow the header,
      whose layout only the data can prove.
    - ``aligned``: whether all of those are aligned when the first is.
    - ``packed``: whether some input came as JSON values, so that the inputs must be put together.
    - ``batch_size``: the first dim where the model batches, else 1.
    - ``answer_for``, ``answer``: the signature of the last response, and its template.
    """

    identifier: str
    inputs: list[InputForm]
    sent: list[InputForm]
    outputs: dict[str, OutputForm] | None
    binary_default: bool
    signature: bytes
    context: RequestContext
    binary_bytes: int
    places: tuple[tuple[int, int], ...]
    strings: tuple[tuple[int, int], ...]
    aligned: bool
    packed: bool
    shared: bool = False
    batch_size: int = 1
    options: RequestOptions = NO_OPTIONS
    dims: bytes = b""
    answer_for: Any = field(default=None, compare=False)
    answer: Any = field(default=None, compare=False)

    def output_region(self, name: str) -> SharedRegion | None:
        """Return where in the client's memory an output is wanted, if it is."""
        if not self.shared or self.outputs is None:
            return None
        output = self.outputs.get(name)
        return None if output is None else output.region

    def request(
        self,
        slot: Slot | None,
        start: int,
        places: Sequence[tuple[int, int]],
        on_done: Callable[[Any], None],
        copied: int,
        identifier: str | None = None,
    ) -> InferRequest:
        """Make a request of inputs that lie in a slot.

        - ``start``, ``places``: where they are counted from; offset and size of each.
        - ``copied``: bytes of them that were copied on the way there.
        - ``identifier``: the request's id, where it is not the form's.
        """
        return InferRequest(
            self.signature,
            slot,
            start,
            places,
            on_done,
            self.identifier if identifier is None else identifier,
            self.context,
            copied,
            self.batch_size,
            self.options,
            self.dims,
        )

    def regions(self) -> RequestRegions:
        """Return where inputs and outputs lie in the client's memory."""
        outputs = self.outputs or {}
        return RequestRegions(
            [entry.region for entry in self.inputs],
            {name: wanted.region for name, wanted in outputs.items() if wanted.region is not None},
        )


def sent_inputs(inputs: list[InputForm]) -> list[InputForm]:
    """Return the inputs that come with the request."""
    return [entry for entry in inputs if entry.region is None]


def placed_form(
    inputs: list[InputForm],
    outputs: dict[str, OutputForm] | None,
    places: tuple[tuple[int, int], ...],
    context: RequestContext,
    options: RequestOptions,
    config: ModelConfig,
) -> RequestForm:
    """Put together what a request says that was checked: without an identifier, aligned, binary.

    ``places``: of the inputs that are sent.
    """
    sent = sent_inputs(inputs)
    shapes = [model_shape(entry, config) for entry in inputs]
    named = zip(inputs, shapes, strict=True)
    signature, dims = encode_tensors(
        [(entry.name, entry.datatype, shape) for entry, shape in named], tuple(outputs or ())
    )
    return RequestForm(
        identifier="",
        inputs=inputs,
        sent=sent,
        outputs=outputs,
        binary_default=True,
        signature=signature,
        dims=dims,
        context=context,
        binary_bytes=sum(entry.nbytes for entry in sent if entry.data is None),
        places=places,
        strings=tuple(
            (i, element_count(entry.shape))
            for i, entry in enumerate(sent)
            if entry.datatype == "BYTES"
        ),
        aligned=True,
        packed=any(entry.data is not None for entry in inputs),
        shared=len(sent) != len(inputs)
        or any(output.region is not None for output in (outputs or {}).values()),
        options=replace(
            options, shapes=tuple(zip([entry.name for entry in inputs], shapes, strict=True))
        ),
        batch_size=inputs[0].shape[0] if config.max_batch_size and inputs else 1,
    )
