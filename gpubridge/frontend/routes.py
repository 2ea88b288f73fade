"""HTTP routers of the inference endpoint and of the metrics endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache, partial
from types import MappingProxyType

from gpubridge.config import Restrictions
from gpubridge.dataplane import HttpExchange, InferTargets
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode, Pieces, not_found, unsupported
from gpubridge.frontend.answered import HTTP_NUMBERS, AnsweredRequests
from gpubridge.frontend.api.pages import ApiPages
from gpubridge.frontend.control_routes import MODEL, ControlRoutes, Route, named
from gpubridge.frontend.forwarded_headers import NO_HEADERS, ForwardedHeaders
from gpubridge.frontend.generate_endpoint import GenerateEndpoint
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.frontend.infer import InferEndpoint
from gpubridge.frontend.metrics_text import MetricsText
from gpubridge.frontend.openai import OpenAiRoutes, is_openai
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.frontend.status.document import STATUS_PATH, StatusDocument
from gpubridge.frontend.status.page import StatusPage
from gpubridge.frontend.status.rows import condition
from gpubridge.protocol.openai import openai_failure
from gpubridge.protocol.status import error_body, http_status
from gpubridge.telemetry.metrics import ModelState, metrics_page, model_states

_ROUTES_KEPT = 1024
_LONGEST_KEPT = 256
"""Of paths, in bytes."""
_OF_STATUS = (
    "health", "statistics", "metadata", "model-config", "model-repository", "shared-memory",
)  # fmt: skip
"""Groups whose answers are part of the status document."""
_AUTHORIZATION = b"authorization"
"""Header in which clients of OpenAI's API send their key."""
_ANY_TYPE = ("inference", "openai")
"""Groups whose requests may have a body of any type; all others are control requests."""

_METRICS_NUMBERS = {
    b"/metrics": HTTP_NUMBERS["metrics"],
    STATUS_PATH: HTTP_NUMBERS["status"],
    b"/": HTTP_NUMBERS["status"],
}
"""The numbers of the endpoints of the metrics port, by path."""

_EndpointKey = tuple[str, int | None, str]
"""Model, version, and the last part of the path."""


class _Refused(BridgeError):
    """A request refused for its method or its headers, with an HTTP status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, ErrorCode.INVALID_ARG)
        self.status = status


class _Restricted(_Refused):
    """A request without the header that its group of endpoints requires."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 403)


class _Router:
    """Restricted groups of endpoints, and the form of errors."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    def check(self, group: str, head: HttpExchange) -> None:
        """Refuse a request that lacks the header its group of endpoints requires."""
        restriction = self._restrictions.get(group)
        if restriction is None or restriction.admits(head.sole_field(restriction.name)):
            return
        scheme, _, key = (head.sole_field(_AUTHORIZATION) or b"").partition(b" ")
        if not (
            group.startswith("openai") and scheme.lower() == b"bearer" and restriction.admits(key)
        ):
            raise _Restricted(restriction.refusal)

    def check_status(self, head: HttpExchange) -> None:
        """Refuse a request for the status without the headers of all that the status tells."""
        for group in _OF_STATUS:
            self.check(group, head)

    def failure(
        self, error: BridgeError, status: int | None, head: HttpExchange
    ) -> tuple[int, Pieces]:
        """Return the status and the JSON body of an error, in the terms of the API asked for."""
        openai = is_openai(head.target)
        if isinstance(error, _Refused):
            status = error.status
        if isinstance(error, _Restricted) and openai:
            status = 401
        if openai:
            return openai_failure(error, status)
        return status or http_status(error.code), error_body(error)


class V2Router(_Router):
    """Router of the inference endpoint.

    - ``strict_readiness``: the server is ready only when every model is.
    - ``headers``: forwarded to models.
    - ``restrictions``: headers that groups of endpoints require.
    """

    def __init__(
        self,
        repository: ModelRepository,
        regions: ClientRegions,
        workers: Workers,
        *,
        strict_readiness: bool,
        headers: ForwardedHeaders = NO_HEADERS,
        restrictions: Restrictions = MappingProxyType({}),
    ) -> None:
        super().__init__(restrictions)
        self._workers = workers
        self._headers = headers
        self._repository = repository
        self._memory = RequestMemory(repository.regions, regions)
        self._strict = strict_readiness
        inference = restrictions.get("inference")
        for_openai = headers.without(_AUTHORIZATION) if "openai" in restrictions else headers
        self.targets = InferTargets(None if inference is None else inference.required)
        self._endpoints: dict[_EndpointKey, InferEndpoint | GenerateEndpoint] = {}
        self.serving = False
        pages = self.pages = ApiPages(repository)
        self._known = lru_cache(_ROUTES_KEPT)(self._matches)
        self._routes: list[Route] = [
            Route("inference", re.compile(MODEL + rb"/infer"), b"POST", self._open_infer, "infer"),
            *(
                Route("inference", re.compile(MODEL + rb"/" + name.encode()), b"POST", open_, name)
                for name, open_ in (
                    ("generate", partial(self._open_generate, events=False)),
                    ("generate_stream", partial(self._open_generate, events=True)),
                )
            ),
            *ControlRoutes(repository, regions, self.ready).routes,
            *pages.routes,
            *OpenAiRoutes(repository, self._memory.arenas.arena, workers, for_openai).routes,
        ]

    def serve_status(self, document: StatusDocument) -> None:
        """Serve the status document over HTTP; the route's group is checked besides those of the document."""

        def open_status(_: re.Match[bytes], head: HttpExchange) -> RequestHandler:
            self.check_status(head)
            return document.open(head)

        route = Route("metrics", re.compile(STATUS_PATH), b"GET", open_status, "status")
        self._routes.append(route)
        self._known.cache_clear()

    def failure(
        self, error: BridgeError, status: int | None, head: HttpExchange
    ) -> tuple[int, Pieces]:
        """Return the status and the JSON body of an error; note the endpoint if it came before that took it."""
        if not head.endpoint:
            for route, _ in self._routes_of(head.target)[:1]:
                head.endpoint = route.number
        return super().failure(error, status, head)

    def ready(self) -> bool:
        """Return whether the server is serving and, with strict readiness, every model is ready."""
        if not self.serving:
            return False
        if not self._strict:
            return True
        return not self._repository.failures and all(
            model.ready for model in self._repository.loaded()
        )

    def model_changed(self, name: str) -> None:
        """Update the endpoints of a model whose served versions have changed."""
        for key in [key for key in self._endpoints if key[0] == name]:
            endpoint = self._endpoints[key]
            try:
                model = self._repository.find(*key[:2])
                if isinstance(endpoint, InferEndpoint):
                    _check_coupled(model)
            except BridgeError:
                del self._endpoints[key]
                self.targets.remove(endpoint)
            else:
                endpoint.serve(model)

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return the handler of a request; raises BridgeError."""
        target = head.target
        endpoint: InferEndpoint | GenerateEndpoint | None = self.targets.find(target)
        if endpoint is not None and head.method == b"POST":
            head.endpoint = endpoint.number
            self.check("inference", head)
            return self._begin(endpoint, head)
        matches = self._routes_of(target)
        for route, match in matches:
            head.endpoint = route.number
            self.check(route.group, head)
            if head.method == route.method:
                _check_type(route, head)
                return route.open(match, head)
        raise _Refused("Method Not Allowed", 405) if matches else not_found("Not Found")

    def _routes_of(self, target: bytes) -> list[tuple[Route, re.Match[bytes]]]:
        """Return the routes of a request's target."""
        path = _path(target)
        return (self._known if len(path) <= _LONGEST_KEPT else self._matches)(path)

    def _matches(self, path: bytes) -> list[tuple[Route, re.Match[bytes]]]:
        found = ((route, route.paths.fullmatch(path)) for route in self._routes)
        return [(route, match) for route, match in found if match is not None]

    def _open_generate(
        self, path: re.Match[bytes], head: HttpExchange, *, events: bool
    ) -> RequestHandler:
        name, version = named(path)
        find = partial(self._repository.find, name, version)
        model = find()
        key = name, version, "generate_stream" if events else "generate"
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            arena_of = self._memory.arenas.arena
            endpoint = self._endpoints[key] = GenerateEndpoint(
                model, find, arena_of, self._workers, self._headers, events=events
            )
        return self._request(endpoint, head)

    def _open_infer(self, path: re.Match[bytes], head: HttpExchange) -> RequestHandler:
        name, version = named(path)
        model = self._repository.find(name, version)
        head.counters = model.statistics
        _check_coupled(model)
        key = name, version, "infer"
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            endpoint = InferEndpoint(model, self._memory, self._workers, self._headers)
            self._endpoints[key] = endpoint
        return self._request(endpoint, head)

    def _request(
        self, endpoint: InferEndpoint | GenerateEndpoint, head: HttpExchange
    ) -> RequestHandler:
        """Return the handler of a request; the plane takes further ones for its target.

        Different spellings of a path share one endpoint, and its bounded templates.
        """
        if len(self.targets) >= _ROUTES_KEPT:
            self.targets.clear()
        self.targets.add(head.target, endpoint)
        return self._begin(endpoint, head)

    @staticmethod
    def _begin(endpoint: InferEndpoint | GenerateEndpoint, head: HttpExchange) -> RequestHandler:
        """Return the handler of a request, which is counted at its model if it is refused."""
        head.counters = endpoint.statistics
        return endpoint.request(head)


class MetricsRouter(_Router):
    """Router of the metrics endpoint; ``status_page`` is None if it is switched off."""

    def __init__(
        self,
        repository: ModelRepository,
        restrictions: Restrictions,
        answered: AnsweredRequests,
        workers: Workers,
        status_page: StatusPage | None = None,
    ) -> None:
        super().__init__(restrictions)
        self._answered = answered
        self._repository = repository
        self._status_page = status_page
        self._text = MetricsText(self._metrics, workers)

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return the handler of a request; raises BridgeError."""
        path = head.target.partition(b"?")[0]
        head.endpoint = _METRICS_NUMBERS.get(path, 0)
        self.check("metrics", head)
        if path == STATUS_PATH:
            self.check_status(head)
        if head.method == b"GET" and path == b"/metrics":
            return self._text.open(head)
        handler = None if self._status_page is None else self._status_page.route(head)
        if handler is None:
            raise not_found("Not Found: the metrics are at /metrics")
        return handler

    def _metrics(self) -> bytes:
        repository = self._repository
        return metrics_page(
            self._states(),
            repository.telemetry.machine,
            repository.telemetry.metrics,
            [
                model_states(self._model_states()),
                *self._answered.families(),
                *repository.devices.families(),
                *repository.metrics.families(),
            ],
        )

    def _model_states(self) -> Iterator[tuple[str, int, str]]:
        """Yield name, version and state of each model version that is served or should be."""
        loaded = {(model.name, model.version): model for model in self._repository.loaded()}
        for row in self._repository.index():
            if row.state and (row.wanted or row.state != "UNAVAILABLE"):
                yield row.name, row.version, condition(row, loaded.get((row.name, row.version)))

    def _states(self) -> list[ModelState]:
        return [
            ModelState(
                model.statistics,
                model.pending,
                model.waiting,
                model.queued,
                model.restarts,
                model.fallbacks,
                model.device_work,
            )
            for model in self._repository.loaded()
        ]


def _path(target: bytes) -> bytes:
    """Return the path of a target, which may be a URL."""
    path = target.partition(b"?")[0]
    return path if path.startswith(b"/") else b"/" + path.partition(b"://")[2].partition(b"/")[2]


def _check_type(route: Route, head: HttpExchange) -> None:
    """Refuse a browser's control request of a type that pages may send to any server unasked."""
    if route.method != b"POST" or route.group in _ANY_TYPE or not head.from_page:
        return
    given = head.field(b"content-type") or b""
    if given.partition(b";")[0].strip().lower() != b"application/json":
        raise _Refused("expected Content-Type: application/json from a web page", 415)


def _check_coupled(model: Model) -> None:
    if model.config.decoupled:
        raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
