"""The methods that gRPC clients can call, and who answers each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from gpubridge.dataplane import GrpcMethods, RequestHeaders
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.call import Call, CallOwner, DeferredCall, UnaryCall
from gpubridge.frontend.grpc.health import Health, HealthWatch
from gpubridge.frontend.grpc.infer import InferCall, InferEndpoint
from gpubridge.frontend.grpc.memory import Deferred, cuda_calls, memory_calls
from gpubridge.frontend.grpc.packing import MessageCoder
from gpubridge.frontend.grpc.stream import StreamCall
from gpubridge.frontend.model_readiness import tell_ready
from gpubridge.frontend.repository_control import ControlTasks
from gpubridge.frontend.settings_routes import SettingsService
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.frontend.small_body import CONTROL_BYTES
from gpubridge.protocol import metadata as documents
from gpubridge.protocol.fields import JsonObject
from gpubridge.protocol.grpc import metadata, repository_control, settings
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.protocol.grpc.messages import encode_message, parse_message

__all__ = ["GrpcService"]

_Answer = Callable[[bytes | BridgeError], None]

_SERVICE = b"/inference.GRPCInferenceService/"
_HEALTH = b"/grpc.health.v1.Health/"
_LOAD = _SERVICE + b"RepositoryModelLoad"

# How the messages of a method come, as the compiled module counts.
_UNARY, _INFER, _STREAM = range(3)


class _Method(NamedTuple):
    """A method: where, how its messages come, how long they may be, and what opens a call."""

    path: bytes
    kind: int
    limit: int
    open: Callable[[CallOwner, int, RequestHeaders, int], Call]


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
    message_limit : int
        Bytes of a message of inference, or with the files of a model, after decompression too.
    workers : Workers
        For what takes long.

    Attributes
    ----------
    health : Health
        Who is told of its state.
    methods : GrpcMethods
        What connections have to know of the methods.
    coder : MessageCoder
        Unpacks messages and packs answers.
    """

    def __init__(
        self,
        repository: ModelRepository,
        ready: Callable[[], bool],
        regions: ClientRegions,
        message_limit: int,
        workers: Workers,
    ) -> None:
        self._repository = repository
        self._ready = ready
        self._traces = repository.telemetry.traces
        self.health = Health(ready)
        self._memory = RequestMemory(repository.regions, regions)
        self.coder = MessageCoder(workers, self._memory.budget)
        memory = self._memory
        self._forms: FormCache[Model] = FormCache(self._find, memory.arena, memory.check)
        unary: dict[bytes, Callable[[bytes], bytes]] = {
            _SERVICE + b"ServerLive": partial(_state, "ServerLive", lambda: {"live": True}),
            _SERVICE + b"ServerReady": partial(
                _state, "ServerReady", lambda: {"ready": self._ready()}
            ),
            _SERVICE + b"ServerMetadata": partial(
                _state, "ServerMetadata", documents.server_metadata
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
        deferred: dict[bytes, Deferred] = {
            _SERVICE + b"ModelReady": self._model_ready,
            _LOAD: self._load,
            _SERVICE + b"RepositoryModelUnload": self._unload,
        }
        for method, answer in memory_calls(regions).items():
            unary[_SERVICE + method.encode()] = answer
        for method, begin in cuda_calls(regions, self._control).items():
            deferred[_SERVICE + method.encode()] = begin
        self._methods = self._table(unary, deferred, message_limit)
        self.methods = GrpcMethods([(m.path, m.kind, m.limit) for m in self._methods])
        self.infer = InferEndpoint(0, self._forms, self._memory, self._traces)

    def _table(
        self,
        unary: dict[bytes, Callable[[bytes], bytes]],
        deferred: dict[bytes, Deferred],
        message_limit: int,
    ) -> list[_Method]:
        """List the methods, ModelInfer first; the compiled module knows each by its place."""
        small = min(CONTROL_BYTES, message_limit)
        table = [
            _Method(_SERVICE + b"ModelInfer", _INFER, message_limit, self._open_infer),
            _Method(_SERVICE + b"ModelStreamInfer", _STREAM, message_limit, self._open_stream),
            _Method(_HEALTH + b"Watch", _UNARY, small, self._open_watch),
        ]
        for path, answer in unary.items():
            table.append(_Method(path, _UNARY, small, partial(_open_unary, answer)))
        for path, begin in deferred.items():
            # A model may be loaded with its files in the message.
            limit = message_limit if path == _LOAD else small
            table.append(_Method(path, _UNARY, limit, partial(_open_deferred, begin)))
        return table

    def model_changed(self, name: str) -> None:
        """What is served of a model has changed: look it up again."""
        self._forms.forget(lambda model: model.name == name)

    def open(
        self, connection: CallOwner, stream_id: int, method: int, headers: RequestHeaders
    ) -> Call | None:
        """Return the call that a stream is; None for a method that there is not."""
        if method < 0:
            return None
        entry = self._methods[method]
        return entry.open(connection, stream_id, headers, entry.limit)

    def _open_infer(
        self, connection: CallOwner, stream_id: int, headers: RequestHeaders, limit: int
    ) -> Call:
        return InferCall(connection, stream_id, headers, limit, self._forms, self._memory)

    def _open_stream(
        self, connection: CallOwner, stream_id: int, headers: RequestHeaders, limit: int
    ) -> Call:
        return StreamCall(connection, stream_id, headers, limit, self._forms, self._memory)

    def _open_watch(
        self, connection: CallOwner, stream_id: int, headers: RequestHeaders, limit: int
    ) -> Call:
        return HealthWatch(connection, stream_id, headers, limit, self.health)

    # -- methods ---------------------------------------------------------------------------------

    def _find(self, name: str, version: str) -> Model:
        return self._repository.find(name, metadata.model_version(version))

    def _model_ready(self, message: bytes, answer: _Answer) -> None:
        name, version = metadata.model_name("ModelReadyRequest", message)
        try:
            model = self._find(name, version)
        except BridgeError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            answer(_model_ready(False))
        else:
            tell_ready(model, lambda ready: answer(_model_ready(ready)))

    def _model_metadata(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelMetadataRequest", message)
        model = self._find(name, version)
        versions = [model.version] if version else self._repository.versions(name)
        return encode_message(
            "ModelMetadataResponse", **documents.model_metadata(model.config, versions)
        )

    def _model_config(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelConfigRequest", message)
        return encode_message(
            "ModelConfigResponse", config=self._find(name, version).config.message
        )

    def _model_statistics(self, message: bytes) -> bytes:
        name, version = metadata.model_name("ModelStatisticsRequest", message)
        if name:
            models = self._repository.selected(name, metadata.model_version(version))
        else:
            models = list(self._repository.loaded())
        statistics = documents.model_statistics(model.statistics for model in models)
        return encode_message("ModelStatisticsResponse", **statistics)

    def _index(self, message: bytes) -> bytes:
        rows = self._repository.index()
        if metadata.ready_models_only(message):
            rows = [row for row in rows if row.state == "READY"]
        return encode_message("RepositoryIndexResponse", models=documents.repository_index(rows))

    def _log_settings(self, message: bytes) -> bytes:
        return settings.log_answer(self._settings.log(settings.log_changes(message)))

    def _trace_setting(self, message: bytes) -> bytes:
        return settings.trace_answer(self._settings.trace(*settings.trace_changes(message)))

    def _load(self, message: bytes, answer: _Answer) -> None:
        self._repository.check_control()
        name, (config, files) = repository_control.read_load(message)
        loaded = encode_message("RepositoryModelLoadResponse")
        work = self._repository.load(name, config, files)
        self._control.start(work, lambda error: answer(error or loaded))

    def _unload(self, message: bytes, answer: _Answer) -> None:
        self._repository.check_control()
        name, dependents = repository_control.read_unload(message)
        unloaded = encode_message("RepositoryModelUnloadResponse")
        work = self._repository.unload(name, dependents=dependents)
        self._control.start(work, lambda error: answer(error or unloaded))


def _state(method: str, fields: Callable[[], JsonObject], message: bytes) -> bytes:
    """Answer a request that says nothing with the fields of its response."""
    parse_message(f"{method}Request", message)
    return encode_message(f"{method}Response", **fields())


def _model_ready(ready: bool) -> bytes:
    return encode_message("ModelReadyResponse", ready=ready)


def _open_unary(
    answer: Callable[[bytes], bytes],
    connection: CallOwner,
    stream_id: int,
    headers: RequestHeaders,
    limit: int,
) -> Call:
    return UnaryCall(connection, stream_id, headers, limit, answer)


def _open_deferred(
    begin: Deferred, connection: CallOwner, stream_id: int, headers: RequestHeaders, limit: int
) -> Call:
    return DeferredCall(connection, stream_id, headers, limit, begin)
