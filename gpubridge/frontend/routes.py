"""Routes over HTTP: those of inference, and that of the metrics."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from types import MappingProxyType

from gpubridge.config import Restrictions
from gpubridge.dataplane import HttpExchange, InferTargets
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode, Pieces, not_found, unsupported
from gpubridge.frontend.control import Answer, ControlCall, ControlTasks
from gpubridge.frontend.control_routes import MODEL, ControlRoutes, Route, named
from gpubridge.frontend.forwarded_headers import NO_HEADERS, ForwardedHeaders
from gpubridge.frontend.generate import GenerateHandler, GenerateStreamHandler
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.frontend.infer import InferEndpoint
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol.status import error_body, http_status
from gpubridge.telemetry.exposition import CONTENT_TYPE
from gpubridge.telemetry.metrics import ModelState, metrics_page
from gpubridge.telemetry.statistics import DeviceWork

_ROUTES_KEPT = 1024


class _Refused(BridgeError):
    """A request that its method or its headers keep out, with a status of HTTP's own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, ErrorCode.INVALID_ARG)
        self.status = status


class _Router:
    """The shared part of routers: who may use which endpoints, and how errors look."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    def check(self, group: str, head: HttpExchange) -> None:
        """Refuse a request that has not the header which its group of endpoints asks for."""
        restriction = self._restrictions.get(group)
        if restriction is not None and not restriction.admits(head.field(restriction.name)):
            raise _Refused(restriction.refusal, 403)

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, Pieces]:
        """Return status and JSON body of an error."""
        if isinstance(error, _Refused):
            status = error.status
        return status or http_status(error.code), error_body(error)


class V2Router(_Router):
    """Routes of the inference endpoint.

    - ``strict_readiness``: whether the server is ready only when every model is.
    - ``headers``: those of requests that reach models.
    - ``restrictions``: of groups of endpoints.
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
        self.targets = InferTargets(
            *((inference.name, inference.value) if inference is not None else ())
        )
        self._endpoints: dict[tuple[str, int | None], InferEndpoint] = {}
        self.serving = False
        self._routes: list[Route] = [
            Route("inference", re.compile(MODEL + rb"/infer"), b"POST", self._open_infer),
            Route(
                "inference",
                re.compile(MODEL + rb"/generate(_stream)?"),
                b"POST",
                self._open_generate,
            ),
            *ControlRoutes(repository, regions, self.ready).routes,
        ]

    def ready(self) -> bool:
        """Return whether the server takes requests and, if that is asked for, every model is up."""
        if not self.serving:
            return False
        if not self._strict:
            return True
        return not self._repository.failures and all(
            model.ready for model in self._repository.loaded()
        )

    def model_changed(self, name: str) -> None:
        """Point the endpoints of a model, whose served versions have changed, to these."""
        for key in [key for key in self._endpoints if key[0] == name]:
            endpoint = self._endpoints[key]
            try:
                model = self._repository.find(*key)
                _check_coupled(model)
            except BridgeError:
                del self._endpoints[key]
                self.targets.remove(endpoint)
            else:
                endpoint.serve(model)

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return who takes a request; raises BridgeError."""
        target = head.target
        endpoint: InferEndpoint | None = self.targets.find(target)
        if endpoint is not None and head.method == b"POST":
            self.check("inference", head)
            return endpoint.request(head)
        path = target.partition(b"?")[0]
        if not path.startswith(b"/"):
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        known = False
        for route in self._routes:
            match = route.paths.fullmatch(path)
            if match is not None:
                self.check(route.group, head)
                if head.method == route.method:
                    return route.open(match, head)
                known = True
        raise _Refused("Method Not Allowed", 405) if known else not_found("Not Found")

    def _open_generate(self, path: re.Match[bytes], head: HttpExchange) -> RequestHandler:
        find = partial(self._repository.find, *named(path))
        find()
        kind = GenerateStreamHandler if path[3] else GenerateHandler
        parameters = self._headers.of(head.fields()) if self._headers.active else {}
        return kind(find, self._memory.arenas.arena, self._workers, parameters)

    def _open_infer(self, path: re.Match[bytes], head: HttpExchange) -> RequestHandler:
        key = named(path)
        model = self._repository.find(*key)
        _check_coupled(model)
        # One endpoint for all the ways to write a path: what it remembers is bounded for each.
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            endpoint = InferEndpoint(model, self._memory, self._workers, self._headers)
            self._endpoints[key] = endpoint
        if len(self.targets) >= _ROUTES_KEPT:
            self.targets.clear()
        self.targets.add(head.target, endpoint)
        return endpoint.request(head)


class MetricsRouter(_Router):
    """The one route of the metrics endpoint."""

    def __init__(self, repository: ModelRepository, restrictions: Restrictions) -> None:
        super().__init__(restrictions)
        self._repository = repository
        self._tasks = ControlTasks()

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return who takes a request; raises BridgeError."""
        if head.target.partition(b"?")[0] != b"/metrics" or head.method != b"GET":
            raise not_found("Not Found: the metrics are at /metrics")
        self.check("metrics", head)
        return ControlCall(self._page, self._tasks)

    def _page(self, call: ControlCall) -> Answer:
        repository = self._repository
        page = metrics_page(
            self._states(),
            repository.telemetry.machine,
            repository.telemetry.metrics,
            [*repository.devices.families(), *repository.metrics.families()],
        )
        return Answer(page, b"Content-Type: %b\r\n" % CONTENT_TYPE.encode(), plain=False)

    def _states(self) -> list[ModelState]:
        return [
            ModelState(
                model.statistics,
                model.pending,
                model.queued,
                sum(instance.restarts for instance in model.instances),
                sum(
                    (instance.fallbacks for instance in model.instances),
                    Counter(model.config.fallbacks) + model.statistics.fallbacks,
                ),
                _device_work(model),
            )
            for model in self._repository.loaded()
        ]


def _device_work(model: Model) -> DeviceWork:
    work = DeviceWork()
    work.include(model.statistics.device_work)
    for instance in model.instances:
        work.include(instance.device_work)
    return work


def _check_coupled(model: Model) -> None:
    if model.config.decoupled:
        raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
