"""The gRPC methods and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from gpubridge.config import ServerSettings
from gpubridge.config.restrictions import header_names
from gpubridge.dataplane import GrpcMethods, IdleConnections, RequestHeaders
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import trace_context
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.control import CONTROL_BYTES, ControlTasks, is_ready, trace_settings
from gpubridge.frontend.forwarded_headers import ForwardedHeaders
from gpubridge.frontend.grpc.call import Call, CallConnection, Opening, UnaryCall
from gpubridge.frontend.grpc.health import Health, HealthWatch
from gpubridge.frontend.grpc.infer import InferCall, InferEndpoint
from gpubridge.frontend.grpc.packing import MessageCoder
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.frontend.grpc.stream import StreamCall
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol import metadata as documents
from gpubridge.protocol.fields import JsonObject
from gpubridge.protocol.grpc import control
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.protocol.grpc.load_message import read_load_message
from gpubridge.protocol.grpc.messages import encode_message, parse_message
from gpubridge.schema import ProtoMessage
from gpubridge.telemetry.failed_requests import FailedRequests

_SERVICE = b"/inference.GRPCInferenceService/"
_Answer = JsonObject | Coroutine[Any, Any, JsonObject]
_HEALTH = b"/grpc.health.v1.Health/"

# Kinds of methods, numbered as in the compiled module.
_UNARY, _STREAM, _CONTROL = range(3)


class _Method(NamedTuple):
    """A method.

    - ``group``: the restricted protocol that it belongs to.
    - ``kind``: one of inference or of health that may stay open, a stream, or a control call; a message has at
      most ``limit`` bytes.
    - ``open``: returns a new call.
    """

    group: str
    path: bytes
    kind: int
    limit: int
    open: Callable[[Opening], Call]


class GrpcService:
    """GRPCInferenceService and the health service."""

    def __init__(
        self,
        repository: ModelRepository,
        ready: Callable[[], bool],
        regions: ClientRegions,
        workers: Workers,
        settings: ServerSettings,
    ) -> None:
        self._restrictions = settings.grpc.restrictions
        headers = ForwardedHeaders(
            settings.grpc.header_forward_pattern, header_names(self._restrictions)
        )
        self._repository = repository
        self._headers = headers
        self._regions = regions
        self._tasks = ControlTasks()
        self.health = Health(ready)
        self.idle = IdleConnections()
        self.failures = FailedRequests()
        memory = RequestMemory(repository.regions, regions)
        self.coder = MessageCoder(workers, memory.arenas.budget)
        forms = FormCache(self._find, memory.arenas.arena, memory.check)
        self._forms = forms
        self._methods = self._list_methods(ready, forms, memory, settings.grpc.max_message_size)
        self.methods = GrpcMethods([(m.path, m.kind, m.limit) for m in self._methods])
        self.names = [method.path.rpartition(b"/")[2].decode() for method in self._methods]
        for number, method in enumerate(self._methods):
            if (restriction := self._restrictions.get(method.group)) is not None:
                self.methods.require(number, restriction.required)
        traces = repository.telemetry.traces
        sampling = headers.sampling if headers.active else traces.sampling
        self.infer = InferEndpoint(0, forms, memory, sampling, self.coder)

    def _list_methods(
        self, ready: Callable[[], bool], forms: FormCache, memory: RequestMemory, message_limit: int
    ) -> list[_Method]:
        """Return all methods, which the compiled module knows by index; ModelInfer is the first."""
        small = min(CONTROL_BYTES, message_limit)
        methods = [
            _Method(
                "inference",
                _SERVICE + b"ModelInfer",
                _UNARY,
                message_limit,
                lambda opening: InferCall(opening, forms, memory),
            ),
            _Method(
                "inference",
                _SERVICE + b"ModelStreamInfer",
                _STREAM,
                message_limit,
                lambda opening: StreamCall(opening, forms, memory),
            ),
            _Method(
                "health",
                _HEALTH + b"Watch",
                _UNARY,
                small,
                lambda opening: HealthWatch(opening, self.health),
            ),
            self._unary("health", _HEALTH + b"Check", small, self.health.answer),
        ]
        for group, answers in self._control_answers(ready).items():
            for name, answer in answers.items():
                path, answered = _SERVICE + name.encode(), partial(_answered, name, answer)
                methods.append(self._unary(group, path, small, answered))
        # The message may contain the files of the model.
        load = _SERVICE + b"RepositoryModelLoad"
        return [*methods, self._unary("model-repository", load, message_limit, self._load)]

    def _control_answers(
        self, ready: Callable[[], bool]
    ) -> dict[str, dict[str, Callable[[ProtoMessage], _Answer]]]:
        """Return the functions that answer the control methods, by group and name."""
        return {
            "health": {
                "ServerLive": lambda _: {"live": True},
                "ServerReady": lambda _: {"ready": ready()},
                "ModelReady": self._model_ready,
            },
            "metadata": {
                "ServerMetadata": lambda _: documents.server_metadata(self._repository.server_id),
                "ModelMetadata": self._model_metadata,
            },
            "model-config": {"ModelConfig": self._model_config},
            "statistics": {"ModelStatistics": self._model_statistics},
            "model-repository": {
                "RepositoryIndex": self._index,
                "RepositoryModelUnload": self._unload,
            },
            "logging": {"LogSettings": self._log_settings},
            "trace": {"TraceSetting": self._trace_setting},
            "shared-memory": {
                "SystemSharedMemoryRegister": self._register,
                "SystemSharedMemoryUnregister": self._unregister,
                "SystemSharedMemoryStatus": partial(self._memory_status, on_device=False),
                "CudaSharedMemoryRegister": self._register_device,
                "CudaSharedMemoryUnregister": lambda m: _done(
                    self._regions.unregister_device(m.name)
                ),
                "CudaSharedMemoryStatus": partial(self._memory_status, on_device=True),
            },
        }

    def _unary(
        self,
        group: str,
        path: bytes,
        limit: int,
        answer: Callable[[Any], bytes | Coroutine[Any, Any, bytes]],
    ) -> _Method:
        return _Method(
            group, path, _CONTROL, limit, lambda opening: UnaryCall(opening, answer, self._tasks)
        )

    def model_changed(self, name: str) -> None:
        """Forget the templates of a model whose served versions have changed."""
        self._forms.forget(lambda model: model.name == name)

    def open(
        self, method: int, connection: CallConnection, stream_id: int, headers: RequestHeaders
    ) -> Call:
        """Return the call of a new stream; raises CallFailed."""
        if method < 0:
            raise CallFailed(Status.UNIMPLEMENTED, "")
        entry = self._methods[method]
        if not headers.admitted:
            raise CallFailed(Status.UNAVAILABLE, self._restrictions[entry.group].refusal)
        parameters = self._headers.of(headers.fields) if self._headers.active else {}
        context = trace_context(
            self._repository.telemetry.traces, lambda name: dict(headers.fields).get(name)
        )
        opening = Opening(connection, stream_id, headers, entry.limit, parameters, context)
        return entry.open(opening)

    # -- methods return the fields of the response, or a coroutine that does -----------------------

    def _find(self, name: str, version: str) -> Model:
        return self._repository.find(name, control.model_version(version))

    async def _model_ready(self, message: ProtoMessage) -> JsonObject:
        try:
            model = self._find(message.name, message.version)
        except BridgeError as error:
            # As in Triton, only a version that is no number is an error.
            if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE):
                raise
            return {"ready": False}
        return {"ready": await is_ready(model)}

    def _model_metadata(self, message: ProtoMessage) -> JsonObject:
        model = self._find(message.name, message.version)
        versions = [model.version] if message.version else self._repository.versions(message.name)
        return documents.model_metadata(model.config, versions)

    def _model_config(self, message: ProtoMessage) -> JsonObject:
        return {"config": self._find(message.name, message.version).config.message}

    def _model_statistics(self, message: ProtoMessage) -> JsonObject:
        models = list(self._repository.loaded())
        if message.name:
            version = control.model_version(message.version)
            models = self._repository.selected(message.name, version)
        return documents.model_statistics(model.statistics for model in models)

    async def _index(self, message: ProtoMessage) -> JsonObject:
        control.refuse_repository_name(message)
        rows = await self._repository.listed()
        if message.ready:
            rows = [row for row in rows if row.state == "READY"]
        return {"models": documents.repository_index(rows)}

    async def _load(self, data: bytes | memoryview) -> bytes:
        self._repository.check_control()
        name, (config, files) = await asyncio.to_thread(read_load_message, data)
        await self._repository.load(name, config, files)
        return encode_message("RepositoryModelLoadResponse")

    def _unload(self, message: ProtoMessage) -> _Answer:
        self._repository.check_control()
        dependents = control.read_unload(message)
        return _done(self._repository.unload(message.model_name, dependents=dependents))

    def _log_settings(self, message: ProtoMessage) -> JsonObject:
        log = self._repository.telemetry.log
        changes = control.log_changes(message)
        if changes:
            log.change(**changes)
        return control.log_answer(log.settings)

    def _trace_setting(self, message: ProtoMessage) -> JsonObject:
        changes = control.trace_changes(message)
        return control.trace_answer(trace_settings(self._repository, message.model_name, changes))

    def _register(self, message: ProtoMessage) -> JsonObject:
        self._regions.register(message.name, message.key, message.offset, message.byte_size)
        return {}

    def _register_device(self, message: ProtoMessage) -> _Answer:
        device = message.raw_handle, message.device_id, message.byte_size
        return _done(self._regions.register_device(message.name, *device))

    def _unregister(self, message: ProtoMessage) -> JsonObject:
        self._regions.unregister(message.name)
        return {}

    def _memory_status(self, message: ProtoMessage, *, on_device: bool) -> JsonObject:
        regions = self._regions.status(message.name, on_device=on_device)
        return {"regions": {region.name: region.described() for region in regions}}


def _answered(
    method: str, answer: Callable[[ProtoMessage], _Answer], data: bytes | memoryview
) -> bytes | Coroutine[Any, Any, bytes]:
    """Parse a request message, call a method, and encode the fields it returns."""
    fields = answer(parse_message(f"{method}Request", data))
    response = f"{method}Response"
    if isinstance(fields, dict):
        return encode_message(response, **fields)

    async def finish(fields: Coroutine[Any, Any, JsonObject]) -> bytes:
        return encode_message(response, **await fields)

    return finish(fields)


async def _done(work: Coroutine[Any, Any, None]) -> JsonObject:
    """Return an empty response once a coroutine has ended."""
    await work
    return {}
