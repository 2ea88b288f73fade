"""Generate routes: a flat JSON object as request; one as response, or server-sent events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from gpubridge.config import ModelConfig
from gpubridge.dataplane import HttpExchange
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import Received
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, ErrorCode, InternalError, Pieces, invalid
from gpubridge.frontend.answer_texts import charged
from gpubridge.frontend.control import JSON, PrivateBody
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.protocol.body import InputCopy, input_copy
from gpubridge.protocol.generate import encode_generated, parse_generate
from gpubridge.protocol.request_form import RequestForm
from gpubridge.protocol.status import error_body, http_status
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

_Result = TypeVar("_Result")
Parse = Callable[[bytes, ModelConfig], RequestForm]

_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\n"
_COMMENT = b":\n\n"
"""A comment line, ignored by readers of server-sent events."""


class _Generation(PrivateBody, ABC):
    """A generate request; owns its body, and its slot until it is submitted to the model.

    - ``find``: returns the served model once the body is complete; called by `_found`.
    - ``parameters``: forwarded headers.
    - ``context``: the headers of a trace context, if they matter.
    - ``parse``: returns the form of a body; thread-safe for bodies of more than `LARGE_BYTES`.
    """

    def __init__(
        self,
        find: Callable[..., Any],
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
        parameters: Mapping[str, str],
        context: tuple[bytes, bytes] | None,
        parse: Parse = parse_generate,
    ) -> None:
        self._began = time.monotonic_ns()
        self._context = context
        self._workers = workers
        self._parameters = parameters
        self._aborted = False
        self._find = find
        self._parse_body = parse
        self._model: Model
        self._arena_of = arena_of
        self._request: InferRequest | None = None
        self._exchange: HttpExchange

    def follow(self, exchange: HttpExchange, request: InferRequest, model: Model) -> None:
        """Answer a request that the plane has submitted, from the next outcome on."""
        self._exchange, self._request, self._model = exchange, request, model
        exchange.handler = self

    def take_outcome(self, outcome: Outcome | Exception | None, last: bool) -> None:
        """Send an outcome of a request that this follows; an exception is a bug of the plane."""
        if isinstance(outcome, Exception):
            outcome = request_error(outcome)
        if last:
            self._done(outcome)
        else:
            assert outcome is not None
            self._respond(outcome)

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Parse the body and submit the request; raises BridgeError."""
        self._exchange = exchange
        body = self.whole_body()
        if len(body) > HEAVY_BYTES:
            self._workers.tasks.start(self._parse_in_worker(body))
        else:
            given = bytes(body)
            self._read(given)
            self._use_model()
            self._submit_body(given)

    def _use_model(self) -> None:
        """Find the model that the request is for, which counts it if it is refused."""
        self._model = self._found()
        self._exchange.counters = self._model.statistics

    def _read(self, body: bytes) -> None:
        """Read what `_found` needs from the body; thread-safe; raises BridgeError."""

    def _found(self) -> Model:
        """Return the model of the request; raises BridgeError."""
        model: Model = self._find()
        return model

    def _submit_body(self, body: bytes) -> None:
        """Submit a request by its body; raises BridgeError."""
        form = self._parse(body, self._model.config)
        self._submit(form, self._input_copy(form).run())

    def _parse(self, body: bytes, config: ModelConfig) -> RequestForm:
        """Return the form of the request; thread-safe; raises BridgeError."""
        return self._parse_body(body, config)

    async def _parse_in_worker(self, body: memoryview) -> None:
        """Parse a long body in a worker, then submit the request."""
        try:
            _checked(await self._workers.outcome(lambda: self._read(bytes(body))))
            self._use_model()
            config = self._model.config
            form = _checked(await self._workers.outcome(lambda: self._parse(bytes(body), config)))
            inputs = await self._input_copy(form).run_in_turns()
            if self._aborted:
                inputs.free()
            else:
                self._submit(form, inputs)
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Respond that the request is invalid."""
        if not self._aborted:
            self.release()
            self._exchange.fail(error)

    def _input_copy(self, form: RequestForm) -> InputCopy:
        return input_copy(form, memoryview(b""), self._arena_of(self._model.name))

    def _submit(self, form: RequestForm, inputs: InputCopy) -> None:
        """Submit the request to the model."""
        self._send(form.request(inputs.slot, 0, inputs.places, self._done, inputs.copied))

    def _send(self, request: InferRequest) -> None:
        """Pass a request to the model, and drop the body."""
        self.release()
        self._request = request
        add_parameters(request, self._parameters)
        request.account = self._exchange.account
        request.on_partial = self._respond
        received = Received("HTTP", self._began, time.monotonic_ns(), self._context)
        self._exchange.submitted(request)
        self._model.submit(request, received)

    def abort(self) -> None:
        """Cancel the request: its client is gone."""
        self._aborted = True
        super().abort()
        if self._request is not None:
            self._request.cancel()

    def _encoded(self, outcome: Outcome) -> Pieces:
        """Encode a response in pieces; raises BridgeError."""
        if not isinstance(outcome, InferResponse):
            raise outcome.copy()
        assert self._request is not None
        identifier = self._request.identifier
        return encode_generated(identifier, outcome, self._model.config, self._model.version)

    @abstractmethod
    def _respond(self, outcome: Outcome) -> None: ...

    @abstractmethod
    def _done(self, outcome: Outcome | None) -> None: ...


class GenerateHandler(_Generation):
    """Responds with the single response of the model."""

    _only: InferResponse | None = None

    def keep(self, only: InferResponse | None) -> None:
        """Go on where the plane has the response already."""
        self._only = only

    def _respond(self, outcome: Outcome) -> None:
        assert self._request is not None
        try:
            if self._only is not None:
                raise _not_one()
            if not isinstance(outcome, InferResponse):
                raise outcome.copy()
            self._only = outcome
        except Exception as error:
            # Further responses of the model are ignored.
            self._request.cancel()
            self._fail(error)
            return
        self._request.passed_on(1)

    def _done(self, outcome: Outcome | None) -> None:
        try:
            if (outcome is None) == (self._only is None):
                raise _not_one()
            only = self._only if outcome is None else outcome
            if isinstance(only, InferResponse) and _is_long(only):
                self._workers.run(partial(self._encoded, only), self._answer_charged)
                return
            assert only is not None
            self._answer_charged(self._encoded(only))
        except Exception as error:
            self._fail(error)

    def _answer_charged(self, body: Pieces | BridgeError) -> None:
        if not isinstance(body, BridgeError):
            body = charged(self._arena_of(self._model.name).budget, body)
        self._answer(body)

    def _answer(self, body: Pieces | BridgeError) -> None:
        if isinstance(body, BridgeError):
            self._fail(body)
        else:
            self._exchange.respond(200, JSON, b"", body, plain=True)

    def _fail(self, failed: Exception) -> None:
        error = request_error(failed)
        self._exchange.log_failure(error)
        self._exchange.respond(_status(error), JSON, b"", error_body(error), plain=True)


class GenerateStreamHandler(_Generation):
    """Responds with one event for each response or error of the model."""

    _begun = False
    _unsent = 0
    # Whether a worker is encoding a response.
    _encoding = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Responses after that one, in order; None for the end.
        self._waiting: deque[Outcome | None] = deque()

    def go_on(self, unsent: int) -> None:
        """Go on where the plane has begun to answer, with so many events that are not passed on."""
        if self._exchange.lost:
            self._begun = True
            self._unsent = unsent
            self._exchange.go_on(self._sent)

    def _respond(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        self._advance()

    def _done(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._waiting.append(outcome)
        self._waiting.append(None)
        self._advance()

    def _advance(self) -> None:
        """Send queued responses, up to one that a worker has to encode."""
        while self._waiting and not self._encoding and not self._aborted:
            outcome = self._waiting.popleft()
            if outcome is None:
                self._end()
            elif isinstance(outcome, InferResponse) and _is_long(outcome):
                self._encoding = True
                self._workers.run(partial(self._encoded, outcome), self._encoded_in_worker)
            else:
                try:
                    self._event(self._encoded(outcome))
                except Exception as error:
                    self._event(request_error(error))

    def _encoded_in_worker(self, body: Pieces | BridgeError) -> None:
        """Send a response that a worker has encoded."""
        self._encoding = False
        if not self._aborted:
            self._event(body)
            self._advance()

    def _end(self) -> None:
        """End the answer: the model has sent its last response."""
        self._begin(200)
        self._exchange.end()

    def _event(self, body: Pieces | BridgeError) -> None:
        """Send a response or an error."""
        status = 200
        if isinstance(body, BridgeError):
            self._exchange.log_failure(body)
            # The HTTP status is that of the first response.
            status, body = _status(body), error_body(body)
        # First: what is sent by that is none of the responses.
        self._begin(status)
        self._unsent += 1
        self._exchange.send((b"data: ", *body, b"\n\n"))

    def _begin(self, status: int) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin(status, _EVENTS, self._sent, _COMMENT)

    def _sent(self) -> None:
        """Let the model send more responses: the client has read the previous ones."""
        unsent, self._unsent = self._unsent, 0
        if unsent and self._request is not None:
            self._request.passed_on(unsent)


def _checked(outcome: _Result | BridgeError) -> _Result:
    """Return the result of a worker; raises its error."""
    if isinstance(outcome, BridgeError):
        raise outcome
    return outcome


def _is_long(response: InferResponse) -> bool:
    """Return whether encoding a response takes long enough for a worker."""
    return sum(map(len, response.buffers)) > HEAVY_BYTES


def _status(error: BridgeError) -> int:
    """Return the HTTP status of an error: Triton's 400, but 503 if unavailable and 500 for our bugs."""
    own = error.code == ErrorCode.UNAVAILABLE or isinstance(error, InternalError)
    return http_status(error.code) if own else 400


def _not_one() -> BridgeError:
    return invalid(
        "generate expects model to produce exactly 1 response, use generate stream for model that "
        "generates various number of responses"
    )
