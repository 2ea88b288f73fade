"""The v2 protocol's paths, and who takes each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import orjson

from gpubridge.dataplane import InferTargets
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode, invalid, not_found, unsupported
from gpubridge.frontend.generate import GenerateHandler, GenerateStreamHandler
from gpubridge.frontend.http.message import Exchange, RequestHandler, RequestHead
from gpubridge.frontend.infer import InferEndpoint
from gpubridge.frontend.memory_routes import MEMORY_PATH, MemoryCall
from gpubridge.frontend.model_readiness import ModelReadyHandler
from gpubridge.frontend.repository_control import CONTROL_PATH, ControlHandler, ControlTasks
from gpubridge.frontend.settings_routes import SettingsRoutes, SettingsService
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.frontend.small_body import SmallBody
from gpubridge.protocol import metadata
from gpubridge.protocol.fields import JsonObject
from gpubridge.protocol.status import error_body, http_status
from gpubridge.telemetry.exposition import CONTENT_TYPE
from gpubridge.telemetry.metrics import ModelState, metrics_page
from gpubridge.telemetry.statistics import DeviceWork

_JSON = b"Content-Type: application/json\r\n"
_PLAIN = b"Content-Type: text/plain\r\n"

_MODEL = re.compile(
    rb"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?(?P<rest>|/infer|/generate|/generate_stream|/ready|/config|/stats)",
    re.ASCII,
)
_GENERATIONS = {b"/generate": GenerateHandler, b"/generate_stream": GenerateStreamHandler}
_POSTED = (b"/infer", *_GENERATIONS)
_ROUTES_KEPT = 1024

Answer = Callable[[Exchange], None]


class _Simple(SmallBody):
    """Takes a request whose body does not matter; ``answer`` responds."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def answer(self, exchange: Exchange) -> None:
        """Answer."""
        self._answer(exchange)


class _Index(SmallBody):
    """Takes a request for the repository index, whose body may ask for ready models only."""

    __slots__ = ("_repository",)

    def __init__(self, repository: ModelRepository) -> None:
        super().__init__()
        self._repository = repository

    def answer(self, exchange: Exchange) -> None:
        """Answer."""
        rows = self._repository.index()
        if metadata.ready_models_only(bytes(self.body)):
            rows = [row for row in rows if row.state == "READY"]
        exchange.respond(200, _JSON, orjson.dumps(metadata.repository_index(rows)), plain=True)


class _Failures:
    """How a router's errors look."""

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, bytes]:
        """Return status and JSON body of an error."""
        return status or http_status(error.code), error_body(error)


class V2Router(_Failures):
    """Routes of the inference door.

    - ``repository``: the models.
    - ``regions``: the clients' own memory.
    - ``workers``: for what takes long.
    - ``strict_readiness``: whether the server is ready only when every model is.
    """

    def __init__(
        self,
        repository: ModelRepository,
        regions: ClientRegions,
        workers: Workers,
        *,
        strict_readiness: bool,
    ) -> None:
        self._workers = workers
        self._repository = repository
        self._memory = RequestMemory(repository.regions, regions)
        self._strict = strict_readiness
        self._settings = SettingsRoutes(SettingsService(repository))
        self.targets = InferTargets()
        self._endpoints: dict[tuple[str, int | None], InferEndpoint] = {}
        self._control = ControlTasks()
        self.serving = False
        self._fixed: dict[bytes, tuple[bytes, Answer]] = {
            b"/v2": (b"GET", _document(metadata.server_metadata())),
            b"/v2/health/live": (b"GET", _healthy(lambda: True)),
            b"/v2/health/ready": (b"GET", _healthy(self.ready)),
            b"/v2/models/stats": (b"GET", self._statistics),
        }

    def ready(self) -> bool:
        """Whether the server takes requests and, if that is asked for, every model is up."""
        if not self.serving:
            return False
        if not self._strict:
            return True
        return not self._repository.failures and all(
            model.ready for model in self._repository.loaded()
        )

    def model_changed(self, name: str) -> None:
        """What is served of a model has changed: its endpoints lead to what is served now."""
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

    def route(self, head: RequestHead) -> RequestHandler:
        """Return who takes a request.

        Raises BridgeError for a path, method or model that is not there.
        """
        target = head.target
        endpoint: InferEndpoint | None = self.targets.find(target)
        if endpoint is not None and head.method == b"POST":
            return endpoint.request(head)
        path = target.partition(b"?")[0]
        if not path.startswith(b"/"):
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        fixed = self._fixed.get(path)
        if fixed is not None:
            method, answer = fixed
            if head.method != method:
                raise _MethodNotAllowed
            return _Simple(answer)
        match = _MODEL.fullmatch(path)
        if match is not None:
            return self._model_route(head, match)
        if self._settings.takes(path):
            if head.method not in (b"GET", b"POST"):
                raise _MethodNotAllowed
            return self._settings.route(path, changes=head.method == b"POST")
        match = MEMORY_PATH.fullmatch(path)
        if match is None:
            return self._repository_route(head, path)
        if head.method != (b"GET" if match["action"] == b"status" else b"POST"):
            raise _MethodNotAllowed
        return MemoryCall(match, self._memory.regions, self._control)

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, bytes]:
        """Return status and JSON body of an error."""
        if isinstance(error, _MethodNotAllowed):
            status = 405
        return super().failure(error, status)

    def _model_route(self, head: RequestHead, match: re.Match[bytes]) -> RequestHandler:
        name = match["model"].decode("utf-8", "surrogateescape")
        rest = match["rest"]
        if head.method != (b"POST" if rest in _POSTED else b"GET"):
            raise _MethodNotAllowed
        version = _version(match["version"])
        if rest == b"/ready":
            return ModelReadyHandler(partial(self._repository.find, name, version))
        if rest == b"/stats":
            return _Simple(_statistics(self._repository.selected(name, version)))
        model = self._repository.find(name, version)
        generation = _GENERATIONS.get(rest)
        if generation is not None:
            find = partial(self._repository.find, name, version)
            return generation(find, self._memory.arena, self._workers)
        if rest == b"/infer":
            _check_coupled(model)
            # One endpoint for all the ways to write a path: what it remembers is bounded for each.
            endpoint = self._endpoints.get((name, version))
            if endpoint is None:
                endpoint = InferEndpoint(model, self._memory, self._workers)
                self._endpoints[name, version] = endpoint
            if len(self.targets) >= _ROUTES_KEPT:
                self.targets.clear()
            self.targets.add(head.target, endpoint)
            return endpoint.request(head)
        if rest == b"/config":
            document = model.config.to_dict()
        else:
            versions = self._repository.versions(name) if version is None else [version]
            document = metadata.model_metadata(model.config, versions)
        return _Simple(_document(document))

    def _repository_route(self, head: RequestHead, path: bytes) -> RequestHandler:
        control = CONTROL_PATH.fullmatch(path)
        if path != b"/v2/repository/index" and control is None:
            raise not_found("Not Found")
        if head.method != b"POST":
            raise _MethodNotAllowed
        if control is None:
            return _Index(self._repository)
        name = control["model"].decode("utf-8", "surrogateescape")
        return ControlHandler(self._repository, self._control, name, control["action"])

    def _statistics(self, exchange: Exchange) -> None:
        _statistics(self._repository.loaded())(exchange)


class MetricsRouter(_Failures):
    """The one route of the metrics door."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._telemetry = repository.telemetry

    def route(self, head: RequestHead) -> RequestHandler:
        """Return who takes a request.

        Raises BridgeError for anything but GET /metrics.
        """
        if head.target.partition(b"?")[0] != b"/metrics" or head.method != b"GET":
            raise not_found("Not Found: the metrics are at /metrics")
        return _Simple(self._page)

    def _page(self, exchange: Exchange) -> None:
        fields = b"Content-Type: %b\r\n" % CONTENT_TYPE.encode()
        exchange.respond(
            200,
            fields,
            metrics_page(
                self._states(),
                self._telemetry.machine,
                self._telemetry.metrics,
                [*self._repository.devices.families(), *self._repository.metrics.families()],
            ),
        )

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


class _MethodNotAllowed(BridgeError):
    def __init__(self) -> None:
        super().__init__("Method Not Allowed", ErrorCode.INVALID_ARG)


def _document(document: JsonObject) -> Answer:
    """Answer with a document; like Triton, only answers to infer are compressed."""
    body = orjson.dumps(document)

    def answer(exchange: Exchange) -> None:
        exchange.respond(200, _JSON, body, plain=True)

    return answer


def _check_coupled(model: Model) -> None:
    if model.config.decoupled:
        raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")


def _statistics(models: Iterable[Model]) -> Answer:
    return _document(metadata.model_statistics(model.statistics for model in models))


def _healthy(check: Callable[[], bool]) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200 if check() else 400, _PLAIN, b"")

    return answer


def _version(text: bytes | None) -> int | None:
    if text is None:
        return None
    version = int(text) if len(text) < 25 else 1 << 64
    if version >= 1 << 63:
        raise invalid(
            f"failed to get model version from specified version string '{text.decode()}' (details: "
            "stol), version should be an integral value > 0"
        )
    return version
