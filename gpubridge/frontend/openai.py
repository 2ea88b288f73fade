"""Routes of OpenAI's API: models as text generators and embedders, and their list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

from gpubridge.config.model_config import ModelConfig
from gpubridge.dataplane import HttpExchange
from gpubridge.engine.memory.response_store import Charge, ModelCharge, ResponseStore
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import trace_context
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, Pieces
from gpubridge.frontend.control import JSON, Answer, ControlCall, ControlTasks
from gpubridge.frontend.control_routes import Route, document, text_of
from gpubridge.frontend.forwarded_headers import ForwardedHeaders
from gpubridge.frontend.generate import GenerateStreamHandler
from gpubridge.host_shm import Account
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.protocol.openai import (
    OpenAiAnswer,
    OpenAiModel,
    OpenAiRequest,
    model_entry,
    openai_failure,
    unix_seconds,
    unknown_model,
)
from gpubridge.protocol.request_form import LENGTH_BYTES, RequestForm
from gpubridge.request import InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

_GENERATING = (
    rb"/v1/(?:(?P<chat>chat/completions)|(?P<completions>completions)|(?P<embeddings>embeddings))"
)
_PIECE_BYTES = 128
"""Of the objects of a piece of text."""
_CHARGED_TOGETHER = 1 << 16
_MODEL = rb"/v1/models/(?P<model>[^/]+)"


def is_openai(target: bytes) -> bool:
    """Return whether a request's target belongs to this API, whose errors have a form of their own."""
    return target.startswith(b"/v1/")


class OpenAiRoutes:
    """The routes of models that serve an endpoint of this API."""

    def __init__(
        self,
        repository: ModelRepository,
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
        headers: ForwardedHeaders,
    ) -> None:
        self._repository = repository
        self._arena_of = arena_of
        self._workers = workers
        self._headers = headers
        self._tasks = ControlTasks()
        self._created = unix_seconds()
        self._served: WeakKeyDictionary[Model, OpenAiModel] = WeakKeyDictionary()
        self.routes = [
            Route("openai", re.compile(_GENERATING), b"POST", self._open),
            Route("openai-models", re.compile(rb"/v1/models"), b"GET", self._open_list),
            Route("openai-models", re.compile(_MODEL), b"GET", self._open_model),
        ]

    def _open(self, path: re.Match[bytes], head: HttpExchange) -> OpenAiHandler:
        assert path.lastgroup is not None
        parameters = self._headers.of(head.fields()) if self._headers.active else {}
        context = trace_context(self._repository.telemetry.traces, head.field)
        shared = self._find, self._arena_of, self._workers
        handler = OpenAiHandler(path.lastgroup, *shared, parameters, context)
        # An answer that is not streamed is charged as responses that wait.
        handler.store = self._repository.regions.responses
        return handler

    def _open_list(self, path: re.Match[bytes], head: HttpExchange) -> ControlCall:
        entries = [model_entry(name, self._created) for name in self._names()]
        return self._answered(document({"object": "list", "data": entries}))

    def _open_model(self, path: re.Match[bytes], head: HttpExchange) -> ControlCall:
        name = text_of(path["model"])
        self._find(name)
        return self._answered(document(model_entry(name, self._created)))

    def _answered(self, answer: Answer) -> ControlCall:
        return ControlCall(lambda _: answer, self._tasks)

    def _names(self) -> Iterator[str]:
        """Yield the models of this API, of each its newest version."""
        for name in dict.fromkeys(model.name for model in self._repository.loaded()):
            if self._about(self._repository.find(name, None)).endpoints:
                yield name

    def _find(self, name: str) -> tuple[Model, OpenAiModel]:
        try:
            model = self._repository.find(name, None)
        except BridgeError:
            if not self._repository.versions(name):
                raise unknown_model(name) from None
            raise
        about = self._about(model)
        if not about.endpoints:
            raise unknown_model(name)
        return model, about

    def _about(self, model: Model) -> OpenAiModel:
        known = self._served.get(model)
        if known is None or known.config is not model.config:
            known = self._served[model] = OpenAiModel(model.config)
        return known


class OpenAiHandler(GenerateStreamHandler):
    """A request for text or embeddings: answered by events, or as a whole at its end."""

    def __init__(
        self,
        endpoint: str,
        find: Callable[[str], tuple[Model, OpenAiModel]],
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
        parameters: Mapping[str, str],
        context: tuple[bytes, bytes] | None,
    ) -> None:
        super().__init__(find, arena_of, workers, parameters, context)
        self._about: OpenAiModel
        self._endpoint = endpoint
        self.store: ResponseStore
        # Of an answer that is not streamed.
        self._kept: _KeptAnswer | None = None
        self._pieces = 0
        self._asked: OpenAiRequest
        self._answer: OpenAiAnswer

    def _read(self, body: bytes) -> None:
        self._asked = OpenAiRequest(body, self._endpoint)
        self._answer = OpenAiAnswer(self._asked)

    def _found(self) -> Model:
        model: Model
        model, self._about = self._find(self._asked.model)
        return model

    def _submit_body(self, body: bytes) -> None:
        form = self._asked.body_form(self._about)
        if form is None:
            super()._submit_body(body)
            return
        # The only input is the body, one string.
        text = len(body).to_bytes(LENGTH_BYTES, "little") + body
        nbytes = len(text)
        slot = self._arena_of(self._model.name).allocate(nbytes)
        slot.memory[:nbytes] = text
        places = ((0, nbytes),)
        self._send(form.request(slot, 0, places, self._done, nbytes, self._answer.identifier))

    def _parse(self, body: bytes, config: ModelConfig) -> RequestForm:
        return self._asked.form(self._answer.identifier, self._about)

    def _encoded(self, outcome: Outcome) -> Pieces:
        if isinstance(outcome, InferResponse):
            return self._answer.add(outcome)
        return super()._encoded(outcome)

    def _event(self, body: Pieces | BridgeError) -> None:
        if isinstance(body, BridgeError):
            self._fail(body)
        elif body:
            self._begin(200)
            self._unsent += 1
            self._exchange.send(body)
        else:
            if not self._asked.stream:
                self._pieces += 1
                nbytes = self._answer.nbytes + _PIECE_BYTES * self._pieces
                if nbytes > _CHARGED_TOGETHER:
                    self._keep(nbytes)
            # Nothing waits for the client.
            if self._request is not None:
                self._request.passed_on(1)

    def _keep(self, nbytes: int) -> None:
        """Charge an answer that is not streamed and takes so many bytes by now."""
        if self._kept is None:
            model = self.store.of_model(self._model.name)
            self._kept = _KeptAnswer(self.store, model, self._exchange.account, self._fail)
        self._kept.grow(nbytes)

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def abort(self) -> None:
        """Cancel the request: its client is gone."""
        self._let_go()
        super().abort()

    def _end(self) -> None:
        if self._asked.stream:
            self._begin(200)
            self._exchange.send(self._answer.rest())
            self._exchange.end()
        elif self._answer.nbytes > HEAVY_BYTES:
            self._workers.run(self._answer.whole, self._respond_whole)
        else:
            try:
                self._respond_whole(self._answer.whole())
            except Exception as error:
                self._fail(request_error(error))

    def _respond_whole(self, body: Pieces | BridgeError) -> None:
        self._let_go()
        if isinstance(body, BridgeError):
            self._fail(body)
        else:
            self._exchange.respond(200, JSON, b"", body, plain=True)

    def _fail(self, error: BridgeError) -> None:
        """End the answer with an error, as its status or as the last event; cancel the request."""
        self._waiting.clear()
        self._let_go()
        self._aborted = True
        if self._request is not None:
            self._request.cancel()
        if self._begun:
            self._exchange.log_failure(error)
            _, body = openai_failure(error, None)
            self._exchange.send((b"data: ", *body, b"\n\n"))
            self._exchange.end()
        else:
            self._exchange.fail(error)


class _KeptAnswer(Charge):
    """Pieces of an answer that is not streamed; ``fail`` ends it with an error."""

    __slots__ = ("_fail",)

    def __init__(
        self,
        store: ResponseStore,
        model: ModelCharge,
        account: Account | None,
        fail: Callable[[BridgeError], None],
    ) -> None:
        super().__init__(store, model, account)
        self._fail = fail

    def grow(self, nbytes: int) -> None:
        """Charge an answer that takes so many bytes by now."""
        more = nbytes - self.held
        if more > _CHARGED_TOGETHER:
            self.charge(more)

    def refuse(self, error: BridgeError) -> None:
        """End the answer with an error."""
        self.close()
        self._fail(error)
