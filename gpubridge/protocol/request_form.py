"""The parsed form of a request, without data: names, shapes, and places of the data."""

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
from gpubridge.tensor.datatypes import element_count
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import encode_tensors

REGION = "shared_memory_region"
REGION_SIZE = "shared_memory_byte_size"
REGION_OFFSET = "shared_memory_offset"
LENGTH_BYTES = 4
"""Size of the length before each element of a BYTES tensor."""


class SharedRegion(NamedTuple):
    """A range of a region that a client has registered."""

    name: str
    nbytes: int
    offset: int


CheckRegion = Callable[[SharedRegion], None]
"""Raises BridgeError for a region that is not registered; called once for each form."""


def nothing_registered(region: SharedRegion) -> None:
    """Refuse every region, as if none were registered."""
    raise not_found(f"Unable to find shared memory region: '{region.name}'")


def region_of(parameters: Mapping[str, Any]) -> SharedRegion | None:
    """Return the region named by JSON parameters of an input or output, if any.

    Raises BridgeError: INVALID_ARG, with Triton's text, for members of a wrong type.
    """
    if parameters.get(REGION) is None:
        return None
    members = dict(parameters)
    return SharedRegion(
        string(members, REGION),
        unsigned(members.get(REGION_SIZE, 0), REGION_SIZE),
        unsigned(members.get(REGION_OFFSET, 0), REGION_OFFSET),
    )


@dataclass(slots=True)
class OutputForm:
    """Requested form of an output: binary data after the header, or JSON values in it.

    - ``classes``: number of classes instead of its values; 0 for its values.
    - ``region``: client memory that it is written to instead of the response.
    """

    binary: bool
    classes: int = 0
    region: SharedRegion | None = None


def classes_of(outputs: dict[str, OutputForm] | None) -> dict[str, int]:
    """Return the number of classes of each output to be classified."""
    return {name: form.classes for name, form in (outputs or {}).items() if form.classes}


class RequestRegions(NamedTuple):
    """Regions of a request's inputs and outputs in client memory.

    - ``inputs``: one for each input; None for inputs sent with the request.
    - ``outputs``: by name.
    """

    inputs: Sequence[SharedRegion | None]
    outputs: Mapping[str, SharedRegion]


@dataclass(slots=True)
class RequestForm:
    """The parsed header of a request.

    - ``sent``: the inputs sent with the request, not in client memory.
    - ``binary_bytes``: bytes of data after the header.
    - ``signature``, ``dims``: as sent to the stub; the dims are those that the model sees.
    - ``outputs``: the requested outputs by name; None for all.
    - ``binary_default``: whether outputs that were not named are sent as binary data.
    - ``places``: offset from the end of the header, and size, of each sent input. The offset is
      negative for a string whose length is written before it, see `write_length`.
    - ``strings``: index in ``sent`` and element count of BYTES inputs, whose data must be checked.
    - ``aligned``: whether all sent inputs are aligned if the first is.
    - ``batch_size``: the first dim if the model batches, else 1.
    - ``encoding``: cached for the next response.
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
    batch_size: int = 1
    options: RequestOptions = NO_OPTIONS
    dims: bytes = b""
    encoding: Any = field(default=None, compare=False)

    @property
    def packed(self) -> bool:
        """Return whether some input was parsed from JSON, so that all are copied to a new slot."""
        return any(entry.data is not None for entry in self.inputs)

    @property
    def shared(self) -> bool:
        """Return whether some input or output is in client memory."""
        outputs = (self.outputs or {}).values()
        return len(self.sent) != len(self.inputs) or any(o.region is not None for o in outputs)

    def without_data(self) -> RequestForm:
        """Return the form without the bytes of inputs that came as JSON."""
        if not self.packed:
            return self
        inputs = [replace(entry, data=None) for entry in self.inputs]
        return replace(self, inputs=inputs, sent=sent_inputs(inputs))

    def output_region(self, name: str) -> SharedRegion | None:
        """Return the region of client memory for an output, if any."""
        output = None if self.outputs is None else self.outputs.get(name)
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
        """Return a request with inputs in a slot.

        - ``start``, ``places``: the base of the offsets; offset and size of each input.
        - ``copied``: bytes of the inputs that were copied.
        - ``identifier``: the request's id, if it differs from the form's.
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
        """Return the regions of inputs and outputs in client memory."""
        outputs = self.outputs or {}
        return RequestRegions(
            [entry.region for entry in self.inputs],
            {name: wanted.region for name, wanted in outputs.items() if wanted.region is not None},
        )


def sent_inputs(inputs: list[InputForm]) -> list[InputForm]:
    """Return the inputs sent with the request."""
    return [entry for entry in inputs if entry.region is None]


def placed_form(
    inputs: list[InputForm],
    outputs: dict[str, OutputForm] | None,
    places: tuple[tuple[int, int], ...],
    context: RequestContext,
    options: RequestOptions,
    config: ModelConfig,
) -> RequestForm:
    """Return the form of checked parts, without an identifier, aligned, with binary outputs.

    ``places``: of the sent inputs.
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
        options=replace(
            options, shapes=tuple(zip([entry.name for entry in inputs], shapes, strict=True))
        ),
        batch_size=inputs[0].shape[0] if config.max_batch_size and inputs else 1,
    )
