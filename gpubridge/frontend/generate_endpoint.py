"""Endpoints of generate requests: what the plane takes by itself, and what it leaves to handlers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpubridge.config import ModelConfig
from gpubridge.dataplane import GeneratedTemplate, HttpExchange, HttpInferEndpoint
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import trace_context
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError
from gpubridge.frontend.answer_texts import charged
from gpubridge.frontend.control import JSON
from gpubridge.frontend.forwarded_headers import ForwardedHeaders
from gpubridge.frontend.generate import GenerateHandler, GenerateStreamHandler, Parse
from gpubridge.host_shm import LARGE_BYTES, Budget, Slot
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.protocol.generate import GenerateForms, generated_template, parse_generate
from gpubridge.protocol.multipart import CONTENT_TYPE, form_boundary, parse_form
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import InferRequest, InferResponse
from gpubridge.transport.signatures import Signature

_ONE, _EVENTS = 1, 2
"""Kinds of `HttpInferEndpoint`."""


class ServedGeneration:
    """One version of a model that an endpoint serves, as `gpubridge.frontend.infer.ServedModel`."""

    def __init__(self, model: Model, budget: Budget, headers: ForwardedHeaders) -> None:
        self.model = model
        self._budget = budget
        self.forms = GenerateForms(model.config)
        self.templates = self.forms.templates
        self.sampling = headers.sampling if headers.active else model.traces.sampling
        self.submit = model.submit
        self.statistics = model.statistics
        self.inputs = len(model.config.inputs)

    def plain_template(self, signature: Signature) -> GeneratedTemplate | None:
        """Return the template of responses that the plane can encode."""
        return generated_template(signature, self.model.config, self.model.version)

    def respond_text(self, exchange: HttpExchange, text: bytes) -> None:
        """Send a long response, which is charged until the client has read it."""
        texts = charged(self._budget, [text])
        if isinstance(texts, BridgeError):
            exchange.fail(texts)
        else:
            exchange.respond(200, JSON, b"", texts, plain=True)


class GenerateEndpoint(HttpInferEndpoint):
    """Generate endpoint of one model, or one version of it, with one response or with events.

    - ``find``: returns the model once a body is complete that did not come through the plane.
    - ``arena_of``: returns the arena of a model's requests.
    """

    def __init__(
        self,
        model: Model,
        find: Callable[[], Model],
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
        headers: ForwardedHeaders,
        *,
        events: bool,
    ) -> None:
        self._arena = arena_of(model.name)
        super().__init__(self._arena, _EVENTS if events else _ONE)
        self._headers = headers
        self._handler = partial(
            GenerateStreamHandler if events else GenerateHandler, find, arena_of, workers
        )
        self.serve(model)

    def serve(self, model: Model) -> None:
        """Serve another model from now on, also requests whose body is still being received."""
        self._served = ServedGeneration(model, self._arena.budget, self._headers)
        self.set_model(self._served)

    def request(self, head: HttpExchange) -> GenerateHandler | GenerateStreamHandler:
        """Return the handler of one request."""
        parameters = self._headers.of(head.fields()) if self._headers.active else {}
        context = trace_context(self._served.model.traces, head.field)
        boundary = form_boundary(head.field(CONTENT_TYPE))
        parse: Parse = self._parse
        if boundary is not None:
            parse = partial(parse_form, boundary=boundary)
        return self._handler(parameters, context, parse)

    def take_over(
        self, exchange: HttpExchange, slot: Slot, start: int, length: int, copied: int
    ) -> None:
        """Handle a complete request in a slot that matches no template, or is invalid."""
        body = memoryview(bytes(slot.memory[start : start + length]))
        self._arena.free(slot)
        try:
            handler = self.request(exchange)
            handler.body = body
            exchange.handler = handler
            handler.complete(exchange, copied)
        except Exception as error:
            exchange.give_up(error)

    def follow(
        self,
        served: ServedGeneration,
        exchange: HttpExchange,
        request: InferRequest,
        unsent: int,
        only: InferResponse | None,
    ) -> GenerateHandler | GenerateStreamHandler:
        """Return a handler that goes on to answer a request that the plane has submitted.

        - ``unsent``: events that are not passed on.
        - ``only``: the response that has come, if there is to be one.
        """
        handler = self._handler({}, None)
        handler.follow(exchange, request, served.model)
        if isinstance(handler, GenerateHandler):
            handler.keep(only)
        else:
            handler.go_on(unsent)
        return handler

    def _parse(self, body: bytes, config: ModelConfig) -> RequestForm:
        served = self._served
        if len(body) > LARGE_BYTES or config is not served.model.config:
            return parse_generate(body, config)
        return served.forms.parse(body)
