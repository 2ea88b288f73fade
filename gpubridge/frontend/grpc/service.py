"""The methods that gRPC clients can call, and who answers each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.call import Call, CallOwner, DeferredCall, UnaryCall
from gpubridge.frontend.grpc.health import Health, HealthWatch
from gpubridge.frontend.grpc.infer import InferCall, TracedInferCall
from gpubridge.frontend.grpc.memory import Deferred, cuda_calls, memory_calls
from gpubridge.frontend.grpc.stream import StreamCall
from gpubridge.frontend.http2.headers import RequestHeaders
from gpubridge.frontend.model_readiness import tell_ready
from gpubridge.frontend.repository_control import ControlTasks
from gpubridge.frontend.settings_service import SettingsService
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol.grpc import metadata, repository_control, settings
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.protocol.grpc.messages import parse_message

__all__ = ["GrpcService"]

_Answer = Callable[[bytes | BridgeError], None]

_SERVICE = b"/inference.GRPCInferenceService/"
_HEALTH = b"/grpc.health.v1.Health/"


class GrpcService:
    """GRPCInferenceService and the health service.

    Parameters
    ----------
    repository : ModelRepository
        The models.
    ready : callable
        Whether the server takes requests.
    regions : ClientRegions
        The clients' own memory.

    Attributes
    ----------
    health : Health
        Who is told of its state.
    """

    def __init__(
        self, repository: ModelRepository, ready: Callable[[], bool], regions: ClientRegions
    ) -> None:
        self._repository = repository
        self._ready = ready
        self._traces = repository.telemetry.traces
        self.health = Health(ready)
        self._memory = RequestMemory(repository.regions, regions)
        self._forms: FormCache[Model] = FormCache(self._find, self._memory.check)
        unary: dict[bytes, Callable[[bytes], bytes]] = {
            _SERVICE + b"ServerLive": partial(_constant, "ServerLiveRequest", _live),
            _SERVICE + b"ServerReady": partial(_constant, "ServerReadyRequest", self._server_ready),
            _SERVICE + b"ServerMetadata": partial(
                _constant, "ServerMetadataRequest", metadata.server_metadata
            ),
            _SERVICE + b"ModelMetadata": self._model_metadata,
            _SERVICE + b"ModelConfig": self._model_config,
            _SERVICE + b"ModelStatistics": self._model_statistics,
            _SERVICE + b"RepositoryIndex": self._index,
            _HEALTH + b"Check": self.health.answer,
        }
        self._settings = SettingsService(repository)
        unary[_SERVICE + b"LogSettings"] = self._log_settings
        unary[_SERVICE + b"TraceSetting"] = self._trace_setting
        self._control = ControlTasks()
        self._deferred: dict[bytes, Deferred] = {
            _SERVICE + b"ModelReady": self._model_ready,
            _SERVICE + b"RepositoryModelLoad": self._load,
            _SERVICE + b"RepositoryModelUnload": self._unload,
        }
        for method, answer in memory_calls(regions).items():
            unary[_SERVICE + method.encode()] = answer
        for method, begin in cuda_calls(regions, self._control).items():
            self._deferred[_SERVICE + method.encode()] = begin
        self._unary = unary

    def model_changed(self, name: str) -> None:
        """What is served of a model has changed: look it up again."""
        self._forms.forget(lambda model: model.name == name)

    def open(
        self, connection: CallOwner, stream_id: int, headers: RequestHeaders, coding: bytes
    ) -> Call | None:
        """Return the call that a stream is; None for a method that there is not."""
        path = headers.path
        memory = self._memory
        if path == _SERVICE + b"ModelInfer":
            infer = TracedInferCall if self._traces.active else InferCall
            return infer(connection, stream_id, coding, self._forms, memory)
        answer = self._unary.get(path)
        if answer is not None:
            return UnaryCall(connection, stream_id, coding, answer)
        if path == _HEALTH + b"Watch":
            return HealthWatch(connection, stream_id, coding, self.health)
        begin = self._deferred.get(path)
        if begin is not None:
            return DeferredCall(connection, stream_id, coding, begin)
        if path == _SERVICE + b"ModelStreamInfer":
            errors_end = (b"triton_grpc_error", b"true") in headers.fields
            return StreamCall(
                connection, stream_id, coding, self._forms, memory, errors_end=errors_end
            )
        return None

    # -- methods ---------------------------------------------------------------------------------

    def _find(self, name: str, version: str) -> Model:
        return self._repository.find(name, metadata.model_version(version))

    def _server_ready(self) -> bytes:
        return metadata.server_ready(self._ready())

    def _model_ready(self, message: bytes, answer: _Answer) -> None:
        name, version = metadata.model_name("ModelReadyRequest", message)
        try:
            model = self._find(name, version)
        except BridgeError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            answer(metadata.model_ready(False))
        else:
            tell_ready(model, lambda ready: answer(metadata.model_ready(ready)))

    def _model_metadata(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelMetadataRequest", message)
        model = self._find(name, version)
        versions = [model.version] if version else self._repository.versions(name)
        return metadata.model_metadata(model.config, versions)

    def _model_config(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelConfigRequest", message)
        return metadata.model_config(self._find(name, version).config)

    def _model_statistics(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelStatisticsRequest", message)
        if name:
            models = self._repository.selected(name, metadata.model_version(version))
        else:
            models = list(self._repository.loaded())
        return metadata.model_statistics(model.statistics for model in models)

    def _index(self, message: bytes) -> bytes:
        rows = self._repository.index()
        if metadata.ready_models_only(message):
            rows = [row for row in rows if row.state == "READY"]
        return metadata.repository_index(rows)

    def _log_settings(self, message: bytes) -> bytes:
        return settings.log_answer(self._settings.log(settings.log_changes(message)))

    def _trace_setting(self, message: bytes) -> bytes:
        return settings.trace_answer(self._settings.trace(*settings.trace_changes(message)))

    def _load(self, message: bytes, answer: _Answer) -> None:
        self._repository.check_control()
        name, (config, files) = repository_control.read_load(message)
        work = self._repository.load(name, config, files)
        self._control.start(work, lambda error: answer(error or repository_control.load_answer()))

    def _unload(self, message: bytes, answer: _Answer) -> None:
        self._repository.check_control()
        name, dependents = repository_control.read_unload(message)
        work = self._repository.unload(name, dependents=dependents)
        self._control.start(work, lambda error: answer(error or repository_control.unload_answer()))


def _constant(request: str, answer: Callable[[], bytes], message: bytes) -> bytes:
    """Answer a request that says nothing."""
    parse_message(request, message)
    return answer()


def _live() -> bytes:
    return metadata.server_live(True)
