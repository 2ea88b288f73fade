"""The HTTP inference route: receives bodies into shared memory, submits requests, sends responses."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from copy import copy
from functools import partial

from gpubridge.dataplane import HttpExchange, HttpInferEndpoint, JsonResponseTemplate
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import Received, trace_context
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.answer_texts import charged
from gpubridge.frontend.control import JSON
from gpubridge.frontend.forwarded_headers import NO_HEADERS, ForwardedHeaders, add_parameters
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.host_shm import Body, Slot
from gpubridge.protocol.body import (
    ALIGNMENT,
    LONG_STRINGS,
    InputCopy,
    align_inputs,
    body_slot_size,
    check_strings,
    input_copy,
    write_length,
)
from gpubridge.protocol.infer_request import FormCache, parse_request, raw_request
from gpubridge.protocol.infer_response import (
    EncodedResponse,
    encode_response,
    formats_more_than,
    plain_template,
)
from gpubridge.protocol.multipart import CONTENT_TYPE, form_boundary, parse_form
from gpubridge.protocol.request_form import RequestForm, RequestRegions
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error
from gpubridge.transport.signatures import Signature

_PARSED_AT_ONCE = 128 << 10
"""Bytes of JSON that the event loop parses: Python takes up to 35 ms for so much, if it is wrong."""
_FORM_AT_ONCE = 16 << 10
"""Bytes of a form that the event loop parses: a part costs more than a number."""
_HEADER_LENGTH = b"inference-header-content-length"
_LEADING_NUMBER = re.compile(rb"[+-]?[0-9]{1,18}")


class ServedModel:
    """One version of a model that an endpoint serves.

    The compiled endpoint reads ``templates``, ``sampling``, ``submit``, ``statistics`` and ``inputs``; it
    leaves the requests that ``sampling`` chooses to Python.
    """

    def __init__(
        self, model: Model, memory: RequestMemory, workers: Workers, headers: ForwardedHeaders
    ) -> None:
        self.model = model
        self.forms = FormCache(model.config, memory.check)
        self.templates = self.forms.templates
        self.sampling = headers.sampling if headers.active else model.traces.sampling
        self.submit = model.submit
        self.statistics = model.statistics
        self.inputs = len(model.config.inputs)
        self._memory = memory
        self._workers = workers

    def parse_long(
        self, body: memoryview, header_size: int, boundary: bytes | None
    ) -> tuple[RequestForm, bytes]:
        """Parse a long request and check its strings; thread-safe; raises BridgeError.

        ``boundary``: of the parts of a form.

        Returns its form, and the header, which may become a template.
        """
        header = bytes(body[:header_size])
        if boundary is not None:
            return parse_form(header, self.model.config, boundary), b""
        form = parse_request(header, self.model.config, len(body) - header_size, self._memory.check)
        binary = body[header_size:]
        check_strings(form, self.model.name, [binary[at : at + n] for at, n in form.places])
        form.strings = ()
        return form, header

    def share(self, request: InferRequest, regions: RequestRegions) -> None:
        """Resolve a request's regions of client memory; see `RequestMemory.share`."""
        self._memory.share(request, regions, self.model.name)

    def plain_template(
        self, form: RequestForm, signature: Signature
    ) -> JsonResponseTemplate | None:
        """Return the template of responses that the plane can encode."""
        return plain_template(form, signature, self.model.config, self.model.version)

    def respond(
        self, exchange: HttpExchange, form: RequestForm, identifier: str, outcome: Outcome
    ) -> None:
        """Send an outcome that `plain_template` does not cover; a raised error is sent instead."""
        if not isinstance(outcome, InferResponse):
            # Not raised: its traceback would keep the frames and their variables alive.
            exchange.fail(outcome)
            return
        model = self.model
        if formats_more_than(HEAVY_BYTES, form, outcome):
            # A copy: only the event loop may change the cached template of a form.
            own = copy(form)
            self._workers.run(
                lambda: encode_response(own, identifier, outcome, model.config, model.version),
                partial(self._send, exchange),
            )
            return
        encoded = encode_response(form, identifier, outcome, model.config, model.version)
        self._send(exchange, encoded)

    def respond_text(
        self, exchange: HttpExchange, header: bytes, outputs: Sequence[bytes | memoryview]
    ) -> None:
        """Send a response whose JSON is long."""
        nbytes = sum(map(len, outputs)) or -1
        self._send(exchange, EncodedResponse(b"", [header], outputs, len(header), nbytes))

    def _send(self, exchange: HttpExchange, encoded: EncodedResponse | BridgeError) -> None:
        """Send a response, and charge the long texts of it until the client has read them."""
        if isinstance(encoded, EncodedResponse):
            texts = charged(self._memory.arenas.budget, encoded.texts)
            if isinstance(texts, BridgeError):
                encoded = texts
            else:
                encoded.texts = texts
        _send(exchange, encoded)


def _send(exchange: HttpExchange, encoded: EncodedResponse | BridgeError) -> None:
    """Send an encoded response."""
    if isinstance(encoded, BridgeError):
        exchange.fail(encoded)
        return
    fields = JSON
    if encoded.binary:
        fields = (
            b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
            % encoded.header_bytes
        )
    exchange.respond(200, fields, encoded.header, encoded.buffers)


class InferEndpoint(HttpInferEndpoint):
    """Inference endpoint of one model, or one version of it.

    The compiled base class handles requests that match a template without calling Python. It hands
    a request that it began but cannot handle to `take_over`; all others arrive by `request`.
    """

    def __init__(
        self,
        model: Model,
        memory: RequestMemory,
        workers: Workers,
        headers: ForwardedHeaders = NO_HEADERS,
    ) -> None:
        self.arena = memory.arenas.arena(model.name)
        super().__init__(self.arena)
        self._memory = memory
        self.workers = workers
        self.headers = headers
        self.serve(model)

    def serve(self, model: Model) -> None:
        """Serve another model from now on, also requests whose body is still being received."""
        self.served = ServedModel(model, self._memory, self.workers, self.headers)
        self.set_model(self.served)

    def request(self, head: HttpExchange) -> _InferHandler:
        """Return the handler of one request."""
        return _InferHandler(self, head)

    def take_over(
        self, exchange: HttpExchange, slot: Slot, start: int, length: int, copied: int
    ) -> None:
        """Handle a complete request in a slot that matches no template, or is invalid."""
        handler = _InferHandler(self, exchange)
        exchange.handler = handler
        handler.begin(slot, start, length)
        try:
            handler.parse(exchange, copied)
        except Exception as error:
            exchange.give_up(error)


class _InferHandler:
    """Handler of one inference request; owns the slot of its body until the request is submitted."""

    def __init__(self, endpoint: InferEndpoint, head: HttpExchange) -> None:
        self._endpoint = endpoint
        self._header_length = head.field(_HEADER_LENGTH)
        self._parameters = endpoint.headers.of(head.fields()) if endpoint.headers.active else {}
        self._began = time.monotonic_ns()
        self._context = trace_context(endpoint.served.model.traces, head.field)
        self._slot: Slot | None = None
        self._start = 0
        self._length = 0
        self._request: InferRequest | None = None
        self._exchange: HttpExchange | None = None
        self._form: RequestForm | None = None
        # Of a body that is a form.
        self._boundary: bytes | None = None
        # While a worker reads the slot, it must not be freed.
        self._working = self._aborted = False
        # The model of this request: the endpoint may serve another before the response.
        self._served: ServedModel | None = None

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Return memory of the arena in which the first tensor's data will be aligned."""
        header = _header_size(self._header_length, nbytes)
        endpoint = self._endpoint
        arena, size = endpoint.arena, body_slot_size(nbytes, endpoint.served.inputs)
        slot = arena.allocate(size) if body is None else arena.reserve(size, body)
        # Never 0: the length of a body that is one string is written before it.
        start = ALIGNMENT - header % ALIGNMENT
        self.begin(slot, start, nbytes)
        return slot.memory[start : start + nbytes]

    def begin(self, slot: Slot, start: int, length: int) -> None:
        """Take ownership of the slot that holds the body."""
        self._slot, self._start, self._length = slot, start, length

    def grow(self, arrived: int) -> int:
        """Return how many bytes of a large body there is memory for."""
        slot, endpoint = self._slot, self._endpoint
        assert slot is not None
        size = body_slot_size(self._length, endpoint.served.inputs)
        return endpoint.arena.grow(slot, self._start + arrived, size) - self._start

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Submit the request by its template, or else `parse` it."""
        slot = self._slot
        header_size = _header_size(self._header_length, self._length)
        if slot is not None:
            self._endpoint.arena.complete(slot)
        if slot is not None and not self._parameters:
            place = self._start, self._length, header_size
            # A submitted request owns the slot.
            self._slot = None
            if exchange.infer(self._endpoint, slot, place, copied, self._received()):
                return
            self._slot = slot
        self.parse(exchange, copied)

    def parse(self, exchange: HttpExchange, copied: int) -> None:
        """Parse the header and submit the request; raises BridgeError."""
        self._exchange = exchange
        header_size = _header_size(self._header_length, self._length)
        if self._header_length is None:
            self._boundary = form_boundary(exchange.field(CONTENT_TYPE))
        copied = max(0, copied - header_size)
        at_once = _PARSED_AT_ONCE if self._boundary is None else _FORM_AT_ONCE
        if header_size > at_once or (header_size and self._length > LONG_STRINGS):
            self._working = True
            work = self._parse_in_worker(exchange, header_size, copied)
            self._endpoint.workers.tasks.start(work)
        else:
            self._parse_here(header_size, copied)

    async def _parse_in_worker(self, exchange: HttpExchange, header_size: int, copied: int) -> None:
        """Parse a long request in a worker, then submit it."""
        error: BridgeError | None = None
        try:
            form, packed = await self._parsed(header_size)
            self._working = False
            if not self._aborted:
                self._submit(form, header_size, copied, packed)
                return
            if packed is not None:
                packed.free()
        except Exception as caught:
            # Without the traceback, which would hold the request until the next collection.
            error = request_error(caught).copy()
        self._working = False
        self.abort()
        if error is not None:
            exchange.fail(error)

    async def _parsed(self, header_size: int) -> tuple[RequestForm, InputCopy | None]:
        """Return the form of a request with checked strings, and its packed inputs if any is JSON.

        Raises BridgeError.
        """
        endpoint, slot = self._endpoint, self._slot
        assert slot is not None
        body = slot.memory[self._start : self._start + self._length]
        while True:
            served = endpoint.served
            parsed = await endpoint.workers.outcome(
                partial(served.parse_long, body, header_size, self._boundary)
            )
            if isinstance(parsed, BridgeError):
                raise parsed
            if served is not endpoint.served:
                # The model was reloaded meanwhile.
                continue
            form, header = parsed
            if header:
                served.forms.keep(header, form)
            del parsed, header
            if not form.packed or self._aborted:
                return form, None
            packed = input_copy(form, body[header_size:], endpoint.arena)
            await packed.run_in_turns()
            if served is endpoint.served:
                return form, packed
            packed.free()

    def _parse_here(self, header_size: int, copied: int) -> None:
        """Submit a request whose header is short or absent."""
        served = self._endpoint.served
        slot = self._slot
        begin = self._start
        header = b""
        if slot is not None:
            header = bytes(slot.memory[begin : begin + header_size])
        if self._boundary is not None:
            form = parse_form(header, served.model.config, self._boundary)
        elif header:
            form = served.forms.parse(header, self._length - header_size)
        else:
            form = raw_request(served.model.config, self._length)
            if slot is not None and form.strings:
                write_length(slot.memory, begin, self._length)
        self._submit(form, header_size, copied)

    def _submit(
        self, form: RequestForm, header_size: int, copied: int, packed: InputCopy | None = None
    ) -> None:
        """Submit the request of a parsed header.

        ``packed``: its inputs, if they have been packed already.
        """
        data = self._start + header_size
        self._form = form
        served = self._served = self._endpoint.served
        if form.packed:
            request = self._packed(form, data, copied, packed)
        else:
            request = self._in_place(form, data, copied)
        add_parameters(request, self._parameters)
        if form.shared:
            served.share(request, form.regions())
        self._request = request
        exchange = self._exchange
        assert exchange is not None
        exchange.submitted(request)
        served.submit(request, self._received())

    def _received(self) -> Received:
        """Return when the request was received, for its trace."""
        return Received("HTTP", self._began, time.monotonic_ns(), self._context)

    def abort(self) -> None:
        """Free the memory, or cancel the submitted request."""
        self._aborted = True
        if self._request is not None:
            self._request.cancel()
        elif self._working:
            # The slot is freed when the worker has finished.
            return
        elif self._slot is not None:
            self._endpoint.arena.free(self._slot)
            self._slot = None

    def _in_place(self, form: RequestForm, data: int, copied: int) -> InferRequest:
        """Return the request with inputs where they were received."""
        slot = self._slot
        places: Sequence[tuple[int, int]] = form.places
        if slot is not None:
            if form.strings:
                views = [slot.memory[data + at : data + at + n] for at, n in form.places]
                check_strings(form, self._endpoint.served.model.name, views)
            places, moved = align_inputs(form, slot.memory, data)
            copied += moved
        self._slot = None
        return form.request(slot, data, places, self._done, copied)

    def _packed(
        self, form: RequestForm, data: int, copied: int, packed: InputCopy | None
    ) -> InferRequest:
        """Return the request with inputs packed into a new slot, as some came as JSON."""
        endpoint = self._endpoint
        body = self._slot
        if packed is None:
            binary = memoryview(b"")
            if body is not None:
                binary = body.memory[data : data + form.binary_bytes]
            packed = input_copy(form, binary, endpoint.arena).run()
        slot, places = packed.slot, packed.places
        try:
            if form.strings:
                check_strings(
                    form, endpoint.served.model.name, [slot.memory[at : at + n] for at, n in places]
                )
        except Exception:
            packed.free()
            raise
        if body is not None:
            charged = body.body
            endpoint.arena.free(body)
            slot.charge(charged)
            self._slot = None
        return form.request(slot, 0, places, self._done, copied + packed.copied)

    def _done(self, outcome: Outcome) -> None:
        """Send the outcome of the request."""
        exchange, form, served, request = self._exchange, self._form, self._served, self._request
        assert exchange is not None
        assert form is not None
        assert served is not None
        assert request is not None
        try:
            served.respond(exchange, form, request.identifier, outcome)
        except Exception as error:
            exchange.fail(error)


def _header_size(value: bytes | None, body: int) -> int:
    """Return the size of the JSON header at the start of a body; raises BridgeError."""
    if value is None:
        return body
    try:
        size = int(value)
    except ValueError:
        # Triton reads leading digits.
        number = _LEADING_NUMBER.match(value)
        size = int(number[0]) if number else 0
    if not 0 <= size <= body:
        raise invalid(f"inference header size should be in range (0, {body}), got: {size}")
    return size
