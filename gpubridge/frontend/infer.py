"""The inference route: a body into shared memory, a request to the model, its answer back."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from copy import copy

from gpubridge.engine.model import Model
from gpubridge.engine.tracing import Received
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.http.message import Exchange, RequestHead
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.frontend.workers import HEAVY_BYTES, Workers
from gpubridge.host_shm import Body, Slot
from gpubridge.protocol.body import (
    ALIGNMENT,
    align_inputs,
    body_room,
    check_strings,
    pack_inputs,
    write_length,
)
from gpubridge.protocol.infer_request import FormCache, raw_request
from gpubridge.protocol.infer_response import (
    EncodedResponse,
    encode_response,
    formats_more_than,
)
from gpubridge.protocol.request_form import RequestForm, RequestRegions
from gpubridge.request import InferRequest, InferResponse, Outcome

__all__ = ["InferDoor"]

_HEADER_LENGTH = b"inference-header-content-length"
_LEADING_NUMBER = re.compile(rb"[+-]?[0-9]{1,18}")
_JSON = b"Content-Type: application/json\r\n"


class InferDoor:
    """Makes inference requests for one model, or one version of it.

    Parameters
    ----------
    memory : RequestMemory
        Where requests lie.
    workers : Workers
        Parse and format JSON of more than `HEAVY_BYTES`.
    """

    def __init__(self, model: Model, memory: RequestMemory, workers: Workers) -> None:
        self.arena = memory.arena(model.name)
        self.memory = memory
        self.workers = workers
        self.lead_to(model)

    def lead_to(self, model: Model) -> None:
        """Another takes the model's place: also for requests whose body is still being received."""
        self.model = model
        self.forms = FormCache(model.config, self.memory.check)
        self._traces = model.traces
        self.inputs = len(model.config.inputs)

    def request(self, head: RequestHead) -> _InferHandler:
        """Return the handler of one request."""
        if self._traces.active:
            return _TracedInferHandler(self, head.field(_HEADER_LENGTH))
        return _InferHandler(self, head.field(_HEADER_LENGTH))


class _InferHandler:
    """One inference request; owns the slot of its body until the model takes it over."""

    __slots__ = (
        "_aborted",
        "_door",
        "_exchange",
        "_form",
        "_header_length",
        "_length",
        "_model",
        "_request",
        "_slot",
        "_start",
        "_working",
    )

    def __init__(self, door: InferDoor, header_length: bytes | None) -> None:
        self._door = door
        self._header_length = header_length
        self._slot: Slot | None = None
        self._start = 0
        self._length = 0
        self._request: InferRequest | None = None
        self._exchange: Exchange | None = None
        self._form: RequestForm | None = None
        # While a worker looks at the slot, that cannot go back.
        self._working = self._aborted = False
        # Its own: by the time of the answer, the door may lead to another.
        self._model: Model | None = None

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Return memory of the arena, placed so that the first tensor's data will be aligned."""
        header = _header_size(self._header_length, nbytes)
        self._length = nbytes
        arena, room = self._door.arena, body_room(nbytes, self._door.inputs)
        slot = self._slot = arena.allocate(room) if body is None else arena.reserve(room, body)
        # Never at the very beginning: a body that is a string gets its length before it.
        start = self._start = ALIGNMENT - header % ALIGNMENT
        return slot.memory[start : start + nbytes]

    def grow(self, arrived: int) -> int:
        """Return how much of a large body there is memory for."""
        slot, door = self._slot, self._door
        assert slot is not None
        room = body_room(self._length, door.inputs)
        return door.arena.grow(slot, self._start + arrived, room) - self._start

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Read the header and give the request to the model.

        Raises
        ------
        BridgeError
            When it is no valid request.
        """
        self._exchange = exchange
        if self._slot is not None:
            self._door.arena.complete(self._slot)
        header_size = _header_size(self._header_length, self._length)
        copied = max(0, copied - header_size)
        if header_size > HEAVY_BYTES:
            self._parse_beside(header_size, copied)
        else:
            self._submit_small(header_size, copied)

    def _parse_beside(self, header_size: int, copied: int) -> None:
        """Have a worker parse a large header; the request goes on when that is done."""
        slot, forms = self._slot, self._door.forms
        assert slot is not None
        header = slot.memory[self._start : self._start + header_size]
        following = self._length - header_size
        self._working = True

        def parsed(form: RequestForm | BridgeError) -> None:
            self._working = False
            exchange = self._exchange
            assert exchange is not None
            try:
                if self._aborted:
                    self.abort()
                elif forms is not self._door.forms:
                    # The model was loaded anew meanwhile.
                    self._parse_beside(header_size, copied)
                elif isinstance(form, BridgeError):
                    raise form
                else:
                    self._submit(form, header_size, copied)
            except BridgeError as error:
                self.abort()
                exchange.fail(error)

        self._door.workers.run(lambda: forms.parse_once(bytes(header), following), parsed)

    def _submit_small(self, header_size: int, copied: int) -> None:
        """Give the model the request, whose header is short or absent."""
        door = self._door
        slot = self._slot
        begin = self._start
        following = self._length - header_size
        if slot is None or not header_size:
            form = raw_request(door.model.config, self._length)
            if slot is not None and form.strings:
                write_length(slot.memory, begin, self._length)
            self._submit(form, header_size, copied)
            return
        matched = door.forms.match(slot.memory, begin, header_size, following)
        if matched is None:
            header = bytes(slot.memory[begin : begin + header_size])
            self._submit(door.forms.parse(header, following), header_size, copied)
            return
        known, moved = matched
        self._slot = None
        self._form = known.form
        request = known.request(slot, begin + header_size, self._done, copied + moved)
        self._give(request, known.regions)

    def _submit(self, form: RequestForm, header_size: int, copied: int) -> None:
        """Give the model the request whose header says so."""
        data = self._start + header_size
        self._form = form
        make = self._packed if form.packed else self._in_place
        self._give(make(form, data, copied), form.regions() if form.shared else None)

    def _give(self, request: InferRequest, regions: RequestRegions | None) -> None:
        door = self._door
        if regions is not None:
            door.memory.share(request, regions, door.model.name)
        self._request = request
        model = self._model = door.model
        model.submit(request, self._received())

    def _received(self) -> Received | None:
        """When the request came, should it be traced."""
        return None

    def abort(self) -> None:
        """Give the memory back, or tell the model that nobody waits."""
        self._aborted = True
        if self._request is not None:
            self._request.cancel()
        elif self._working:
            # The slot goes back when the worker has done with it.
            return
        elif self._slot is not None:
            self._door.arena.free(self._slot)
            self._slot = None

    def _in_place(self, form: RequestForm, data: int, copied: int) -> InferRequest:
        """Make the request of inputs that stay where they arrived."""
        slot = self._slot
        places: Sequence[tuple[int, int]] = form.places
        if slot is not None:
            if form.strings:
                views = [slot.memory[data + at : data + at + n] for at, n in form.places]
                check_strings(form, self._door.model.name, views)
            places, moved = align_inputs(form, slot.memory, data)
            copied += moved
        self._slot = None
        return InferRequest(
            form.signature,
            slot,
            data,
            places,
            self._done,
            form.identifier,
            form.context,
            copied,
            form.batch_size,
            form.options,
            form.dims,
        )

    def _packed(self, form: RequestForm, data: int, copied: int) -> InferRequest:
        """Make the request of inputs of which some came as JSON."""
        door = self._door
        body = self._slot
        binary = memoryview(b"")
        if body is not None:
            binary = body.memory[data : data + form.binary_bytes]
        slot, places, packed = pack_inputs(form, binary, door.arena)
        try:
            if form.strings:
                check_strings(form, door.model.name, [slot.memory[at : at + n] for at, n in places])
        except BridgeError:
            door.arena.free(slot)
            raise
        if body is not None:
            charged = body.body
            door.arena.free(body)
            slot.charge(charged)
            self._slot = None
        return InferRequest(
            form.signature,
            slot,
            0,
            places,
            self._done,
            form.identifier,
            form.context,
            copied + packed,
            form.batch_size,
            form.options,
            form.dims,
        )

    def _done(self, outcome: Outcome) -> None:
        """Send what the model answered."""
        exchange, form, model, request = self._exchange, self._form, self._model, self._request
        assert exchange is not None
        assert form is not None
        assert model is not None
        assert request is not None
        if not isinstance(outcome, InferResponse):
            # Not raised: its traceback would hold frames that hold it, and all that they see.
            exchange.fail(outcome)
            return
        if formats_more_than(HEAVY_BYTES, form, outcome):
            # A copy: what a form remembers of answers is the event loop's.
            own = copy(form)
            self._door.workers.run(
                lambda: encode_response(
                    own, request.identifier, outcome, model.config, model.version
                ),
                self._respond,
            )
            return
        try:
            encoded = encode_response(
                form, request.identifier, outcome, model.config, model.version
            )
        except BridgeError as error:
            exchange.fail(error)
            return
        self._respond(encoded)

    def _respond(self, encoded: EncodedResponse | BridgeError) -> None:
        """Send an encoded answer."""
        exchange = self._exchange
        assert exchange is not None
        if self._aborted:
            return
        if isinstance(encoded, BridgeError):
            exchange.fail(encoded)
            return
        if encoded.nbytes < 0:
            exchange.respond(200, _JSON, encoded.header)
            return
        fields = (
            b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
            % len(encoded.header)
        )
        exchange.respond(200, fields, encoded.header, encoded.buffers)


class _TracedInferHandler(_InferHandler):
    """A request that may be traced: it remembers when it began to come."""

    __slots__ = ("_began",)

    def __init__(self, door: InferDoor, header_length: bytes | None) -> None:
        super().__init__(door, header_length)
        self._began = time.monotonic_ns()

    def _received(self) -> Received:
        return Received("HTTP", self._began, time.monotonic_ns())


def _header_size(value: bytes | None, body: int) -> int:
    """Return how many bytes of the body are its JSON header.

    Raises
    ------
    BridgeError
        When the client's number lies outside the body.
    """
    if value is None:
        return body
    try:
        size = int(value)
    except ValueError:
        # Triton reads as far as there are digits.
        number = _LEADING_NUMBER.match(value)
        size = int(number[0]) if number else 0
    if not 0 <= size <= body:
        raise invalid(f"inference header size should be in range (0, {body}), got: {size}")
    return size
