"""The generate routes: a flat JSON object in, one out, or a stream of server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.model import Model
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, ErrorCode, InternalError, Pieces, invalid
from gpubridge.frontend.control import JSON, PrivateBody
from gpubridge.frontend.forwarded_headers import add_parameters
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.protocol.body import InputCopy, input_copy
from gpubridge.protocol.generate import encode_generated, parse_generate
from gpubridge.protocol.request_form import RequestForm
from gpubridge.protocol.status import error_body, http_status
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\n"
_COMMENT = b":\n\n"
"""A line that readers of server-sent events ignore."""


class _Generation(PrivateBody, ABC):
    """A generate request; owns its body, and its slot until the model takes that over.

    - ``find``: returns the model that is served when the body is there: it may be another by then.
    - ``parameters``: its headers that reach the model.
    """

    def __init__(
        self,
        find: Callable[[], Model],
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
        parameters: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._workers = workers
        self._parameters = parameters
        self._aborted = False
        self._find = find
        self._model: Model
        self._arena_of = arena_of
        self._request: InferRequest | None = None
        self._exchange: HttpExchange
        self._form: RequestForm

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Read the body and give the request to the model; raises BridgeError."""
        self._exchange = exchange
        self._model = self._find()
        body, config = self.whole_body(), self._model.config
        if len(body) > HEAVY_BYTES:
            self._workers.tasks.start(self._parse_beside(body))
        else:
            form = parse_generate(bytes(body), config)
            self._submit(form, self._input_copy(form).run())

    async def _parse_beside(self, body: memoryview) -> None:
        """Have a worker parse a body that takes long, then give the request to the model."""
        config = self._model.config
        form = await self._workers.outcome(lambda: parse_generate(bytes(body), config))
        if isinstance(form, BridgeError):
            self._refuse(form)
            return
        try:
            inputs = await self._input_copy(form).run_in_turns()
            if self._aborted:
                inputs.free()
            else:
                self._submit(form, inputs)
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Answer that the body is no request."""
        if not self._aborted:
            self.release()
            self._exchange.fail(error)

    def _input_copy(self, form: RequestForm) -> InputCopy:
        return input_copy(form, memoryview(b""), self._arena_of(self._model.name))

    def _submit(self, form: RequestForm, inputs: InputCopy) -> None:
        """Give the request to the model."""
        self._form = form
        self.release()
        request = self._request = form.request(
            inputs.slot, 0, inputs.places, self._done, inputs.copied
        )
        add_parameters(request, self._parameters)
        request.on_partial = self._respond
        self._model.submit(request)

    def abort(self) -> None:
        """Tell the model that nobody waits."""
        self._aborted = True
        super().abort()
        if self._request is not None:
            self._request.cancel()

    def _encoded(self, outcome: Outcome) -> Pieces:
        """Encode a response, in pieces; raises BridgeError."""
        if not isinstance(outcome, InferResponse):
            raise outcome.copy()
        return encode_generated(self._form, outcome, self._model.config, self._model.version)

    @abstractmethod
    def _respond(self, outcome: Outcome) -> None: ...

    @abstractmethod
    def _done(self, outcome: Outcome | None) -> None: ...


class GenerateHandler(_Generation):
    """Answers with the one response that there is."""

    _only: InferResponse | None = None

    def _respond(self, outcome: Outcome) -> None:
        assert self._request is not None
        try:
            if self._only is not None:
                raise _not_one()
            if not isinstance(outcome, InferResponse):
                raise outcome.copy()
            self._only = outcome
        except Exception as error:
            # What else the model sends changes nothing.
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
                self._workers.run(partial(self._encoded, only), self._answer)
                return
            assert only is not None
            self._answer(self._encoded(only))
        except Exception as error:
            self._fail(error)

    def _answer(self, body: Pieces | BridgeError) -> None:
        if isinstance(body, BridgeError):
            self._fail(body)
        else:
            self._exchange.respond(200, JSON, b"", body, plain=True)

    def _fail(self, failed: Exception) -> None:
        error = request_error(failed)
        self._exchange.respond(_status(error), JSON, b"", error_body(error), plain=True)


class GenerateStreamHandler(_Generation):
    """Answers with an event for each response; an error is one of them."""

    _begun = False
    _unsent = 0
    # A worker encodes a response.
    _encoding = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Responses behind that one, in their order; None for the end.
        self._waiting: deque[Outcome | None] = deque()

    def _respond(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        self._advance()

    def _done(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._waiting.append(outcome)
        self._waiting.append(None)
        self._advance()

    def _advance(self) -> None:
        """Send what waits."""
        while self._waiting and not self._encoding:
            outcome = self._waiting.popleft()
            if outcome is None:
                self._begin(200)
                self._exchange.end()
            elif isinstance(outcome, InferResponse) and _is_long(outcome):
                self._encoding = True
                self._workers.run(partial(self._encoded, outcome), self._encoded_beside)
            else:
                try:
                    self._event(self._encoded(outcome))
                except Exception as error:
                    self._event(request_error(error))

    def _encoded_beside(self, body: Pieces | BridgeError) -> None:
        """Send what a worker has encoded."""
        self._encoding = False
        if not self._aborted:
            self._event(body)
            self._advance()

    def _event(self, body: Pieces | BridgeError) -> None:
        status = 200
        if isinstance(body, BridgeError):
            # The status is that of the first response; those of others stand in their events.
            status, body = _status(body), error_body(body)
        self._unsent += 1
        self._begin(status)
        self._exchange.send((b"data: ", *body, b"\n\n"))

    def _begin(self, status: int) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin(status, _EVENTS, self._sent, _COMMENT)

    def _sent(self) -> None:
        """The client reads: the model may send others."""
        unsent, self._unsent = self._unsent, 0
        if unsent and self._request is not None:
            self._request.passed_on(unsent)


def _is_long(response: InferResponse) -> bool:
    """Return whether a worker has to encode a response."""
    return sum(map(len, response.buffers)) > HEAVY_BYTES


def _status(error: BridgeError) -> int:
    """Return the status of a response that is an error: Triton's, but 503 and for bugs of our own 500."""
    own = error.code == ErrorCode.UNAVAILABLE or isinstance(error, InternalError)
    return http_status(error.code) if own else 400


def _not_one() -> BridgeError:
    return invalid(
        "generate expects model to produce exactly 1 response, use generate stream for model that "
        "generates various number of responses"
    )
