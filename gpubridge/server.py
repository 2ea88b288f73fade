"""Composition root of the server: builds its parts, opens the endpoints, drains and stops."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

import gpubridge
from gpubridge.config import PYTHON_BACKEND, Backends, PythonBackendSettings, ServerSettings
from gpubridge.config.tls import TlsSettings
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.context import EngineContext
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.model_loader import ModelLoader
from gpubridge.engine.orphans import Orphans
from gpubridge.engine.regions import Regions
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.served_models import VersionStatus
from gpubridge.engine.stub_process import StartStub, StubProcess
from gpubridge.engine.workers import Workers
from gpubridge.errors import unavailable
from gpubridge.frontend.bls.server import BlsServer
from gpubridge.frontend.connection_limits import Sweeper, allow_connections
from gpubridge.frontend.forwarded_headers import ForwardedHeaders
from gpubridge.frontend.grpc.connection import GrpcConnection
from gpubridge.frontend.grpc.service import GrpcService
from gpubridge.frontend.http.connection import HttpConnection, HttpListener
from gpubridge.frontend.http.faults import PLAIN_TO_TLS
from gpubridge.frontend.http.message import HttpSettings
from gpubridge.frontend.routes import MetricsRouter, V2Router
from gpubridge.frontend.tls.connection import TlsConnection, TlsListener
from gpubridge.frontend.tls.context import read_context
from gpubridge.protocol.curl_line import curl_line
from gpubridge.telemetry.logs import boxed
from gpubridge.telemetry.server_telemetry import ServerTelemetry

_logger = logging.getLogger(__name__)

_MakeProtocol = Callable[[set[Any]], asyncio.BufferedProtocol]

_FLUSH_SECONDS = 1.0
_HTTP, _GRPC, _METRICS = "HTTPService", "GRPCInferenceService", "Metrics Service"


@dataclass(slots=True)
class _Door:
    """A listening socket and its open connections."""

    name: str
    host: str
    port: int
    server: asyncio.Server
    connections: set[Any]
    tls: TlsListener | None = None

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can connect."""
        return ip_address(self.host).is_loopback

    @property
    def is_far(self) -> bool:
        """Return whether whoever reaches this machine can connect, without a certificate."""
        return not self.is_local and (self.tls is None or not self.tls.context.verify_mode)

    @property
    def place(self) -> str:
        """Host and port by which this machine connects."""
        address = ip_address(self.host)
        host = "localhost" if address.is_unspecified else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


async def serve(settings: ServerSettings, telemetry: ServerTelemetry) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code of the process.

    On a signal the endpoints close, requests in flight are answered, models are finalized.

    Raises BridgeError when the server cannot start: a port is taken, a setting is wrong.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    workers = Workers()
    orphans = Orphans()
    start_stub = partial(StubProcess, orphans=orphans)
    repository = build_repository(settings, telemetry, workers, start_stub)
    regions = ClientRegions(
        repository.regions,
        repository.devices,
        allowed=settings.allow_client_shm,
        most=settings.client_shm_max_regions,
    )
    router, service = _build_endpoints(settings, repository, regions, workers)
    doors: list[_Door] = []
    failed = ""
    sweeper = Sweeper([*settings.http_connections.times, *settings.grpc_connections.times])
    try:
        await _open_doors(settings, repository, (router, service), workers, doors)
        _watch(doors, sweeper)
        sweeper.add([service.health])
        loading = loop.create_task(repository.load_initial())
        stopping = loop.create_task(stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
        await asyncio.gather(loading, return_exceptions=False)
        _log_backends(repository, settings)
        _log_models(await repository.listed())
        if repository.failures and settings.exit_on_error and not stop.is_set():
            failed = _describe_failures(repository)
            return 1
        router.serving = True
        _say_ready(doors, repository, settings)
        await stopping
        return 0
    except asyncio.CancelledError:
        return 0
    finally:
        router.serving = False
        service.health.check(loop.time())
        await _close(doors, repository, orphans, settings.exit_timeout_secs, failed)
        sweeper.close()
        workers.close()


def _watch(doors: Sequence[_Door], sweeper: Sweeper) -> None:
    """Look at all connections, and read certificates again when told to."""
    listeners = [door.tls for door in doors if door.tls is not None]
    for group in (*(door.connections for door in doors), *(tls.handshakes for tls in listeners)):
        sweeper.add(group)

    def reload() -> None:
        for tls in listeners:
            tls.reload()

    if listeners:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _describe_failures(repository: ModelRepository) -> str:
    """Name the models that are not loaded, and say why the first of them is not."""
    rows = repository.failures
    names = ", ".join(f"'{name}'" for name in dict.fromkeys(row.name for row in rows))
    reason = rows[0].reason.partition("\n")[0]
    return f"{names} failed; '{rows[0].name}': {reason}"


def build_repository(
    settings: ServerSettings,
    telemetry: ServerTelemetry,
    workers: Workers,
    start_stub: StartStub = StubProcess,
    make_loader: Callable[..., ModelLoader] = ModelLoader,
) -> ModelRepository:
    """Build everything behind the endpoints; nothing is loaded yet.

    ``make_loader``: takes what :class:`ModelLoader` does.
    """
    backend = PythonBackendSettings.from_backend_config(settings.backend_config.get("python", {}))
    for notice in [*settings.notices(), *backend.notices]:
        _logger.info("%s", notice)
    calls = BlsServer()
    regions = Regions(settings.request_arena_limit)
    threads = LoadThreads()
    environments = ModelEnvironments(
        backend.environment_cache,
        backend.environment_limit_bytes,
        threads,
        clean=settings.stub_environment == "clean",
    )
    devices = DeviceMemory(
        backend.device_arena_bytes,
        backend.device_memory_handles,
        EventSharing(backend.device_events, backend.device_lost_event_seconds),
    )
    context = EngineContext(
        regions,
        environments,
        settings,
        backend,
        telemetry,
        calls,
        devices,
        workers,
        threads,
        start_stub=start_stub,
    )
    repository = ModelRepository(
        settings,
        make_loader(
            context,
            devices.count,
            settings.gpu_fallback,
            Backends(settings.backend_directory),
            auto_complete=settings.auto_complete,
        ),
    )
    calls.serve(repository)
    repository.listen(calls.model_changed)
    return repository


def _build_endpoints(
    settings: ServerSettings, repository: ModelRepository, regions: ClientRegions, workers: Workers
) -> tuple[V2Router, GrpcService]:
    router = V2Router(
        repository,
        regions,
        workers,
        strict_readiness=settings.strict_readiness,
        headers=ForwardedHeaders(
            settings.http_header_forward_pattern, settings.http_restricted_api
        ),
        restrictions=settings.http_restricted_api,
    )
    service = GrpcService(repository, router.ready, regions, workers, settings)
    repository.listen(router.model_changed)
    repository.listen(service.model_changed)
    return router, service


async def _open_doors(
    settings: ServerSettings,
    repository: ModelRepository,
    served: tuple[V2Router, GrpcService],
    workers: Workers,
    doors: list[_Door],
) -> None:
    router, service = served
    http_doors = settings.allow_http + settings.allow_metrics
    allow_connections(
        [settings.http_connections.max_connections] * http_doors
        + [settings.grpc_connections.max_connections] * settings.allow_grpc,
        settings.client_shm_max_regions if settings.allow_client_shm else 0,
    )
    http = HttpSettings(settings.http_max_input_size, settings.http_connections)
    if settings.allow_grpc:
        grpc_calls: _MakeProtocol = partial(GrpcConnection, service, settings.grpc_connections)
        address, port = settings.grpc_address, settings.grpc_port
        limits = settings.grpc_connections
        most, seconds = limits.max_connections, limits.preface_timeout
        tls = _tls_listener(settings.grpc_tls, "h2", most, seconds)
        reuse = settings.reuse_grpc_port
        doors.append(await _open_door(_GRPC, address, port, grpc_calls, tls, reuse=reuse))
    if settings.allow_http:
        budget = repository.regions.budget
        listener = HttpListener(router, http, workers, budget, router.targets)
        requests: _MakeProtocol = partial(HttpConnection, listener)
        address, port = settings.http_address, settings.http_port
        most, seconds = http.connections.max_connections, http.connections.header_timeout
        tls = _tls_listener(settings.http_tls, "http/1.1", most, seconds, PLAIN_TO_TLS)
        reuse = settings.reuse_http_port
        doors.append(await _open_door(_HTTP, address, port, requests, tls, reuse=reuse))
    if settings.allow_metrics:
        metrics = MetricsRouter(repository, settings.http_restricted_api)
        listener = HttpListener(metrics, http, workers, repository.regions.budget)
        pages: _MakeProtocol = partial(HttpConnection, listener)
        address, port = settings.metrics_address, settings.metrics_port
        doors.append(await _open_door(_METRICS, address, port, pages))
    _warn_of_reach(doors, settings)


def _tls_listener(
    tls: TlsSettings, alpn: str, most: int, seconds: float, plain_answer: bytes = b""
) -> TlsListener | None:
    if not tls.served:
        return None
    read = partial(read_context, tls, alpn)
    return TlsListener(read, most=most, seconds=seconds, plain_answer=plain_answer)


async def _open_door(
    name: str,
    address: str,
    port: int,
    protocol: _MakeProtocol,
    tls: TlsListener | None = None,
    *,
    reuse: bool = False,
) -> _Door:
    connections: set[Any] = set() if tls is None else tls.connections
    make = partial(protocol, connections)
    try:
        server = await asyncio.get_running_loop().create_server(
            make if tls is None else partial(TlsConnection, tls, make),
            address,
            port,
            backlog=1024,
            family=socket.AF_UNSPEC,
            reuse_port=reuse,
        )
    except OSError as error:
        other = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "address"
        raise unavailable(
            f"cannot listen on {address}:{port} for {name}: {error.strerror or error}; choose "
            f"another {other}"
        ) from error
    host, bound = server.sockets[0].getsockname()[:2]
    _logger.info("Started %s at %s:%d", name, f"[{host}]" if ":" in host else host, bound)
    return _Door(name, host, bound, server, connections, tls)


def _log_backends(repository: ModelRepository, settings: ServerSettings) -> None:
    """Tell which backends run the models that are loaded, as Triton does."""
    paths = {
        model.config.backend: str(model.config.backend_file or gpubridge.__path__[0])
        for model in repository.loaded()
        if model.config.backend
    }
    if paths:
        # By which the others run.
        paths.setdefault(PYTHON_BACKEND, gpubridge.__path__[0])
    options = {"auto-complete-config": str(settings.auto_complete).lower()}
    if settings.backend_directory is not None:
        options["backend-directory"] = str(settings.backend_directory)
    rows = [("Backend", "Path", "Config")]
    for name, path in sorted(paths.items()):
        told = {**options, **settings.backend_config.get(PYTHON_BACKEND, {})}
        rows.append((name, path, json.dumps({"cmdline": told}, separators=(",", ":"))))
    _logger.info("\n%s", boxed(rows))


def _log_models(index: Sequence[VersionStatus]) -> None:
    rows = [("Model", "Version", "Status")]
    for status in index:
        text = f"UNAVAILABLE: {status.reason}" if status.reason else status.state
        rows.append((status.name, str(status.version or "-"), text))
    widths = [max(len(row[i].splitlines()[0]) for row in rows) for i in (0, 1)]
    lines = [f"| {row[0]:<{widths[0]}} | {row[1]:<{widths[1]}} | {row[2]}" for row in rows]
    _logger.info(
        "gpubridge %s, process %d\n%s", gpubridge.__version__, os.getpid(), "\n".join(lines)
    )


def _warn_of_reach(doors: Sequence[_Door], settings: ServerSettings) -> None:
    """Tell who can use the server, where that is not only this machine."""
    far = ", ".join(f"{door.host}:{door.port}" for door in doors if door.is_far)
    if far:
        code = settings.model_control_mode == "explicit"
        _logger.warning(
            "%s: whoever reaches this machine over a network can use every model%s; "
            "--http-address=127.0.0.1 and --grpc-address=127.0.0.1 let only this machine connect",
            far,
            ", and load models, whose code runs here" if code else "",
        )


def _say_ready(
    doors: Sequence[_Door], repository: ModelRepository, settings: ServerSettings
) -> None:
    """Tell where the server listens, who can connect, and how each model is asked."""
    forms = {_HTTP: "http://{}", _GRPC: "gRPC {}", _METRICS: "http://{}/metrics"}
    forms_of_tls = {_HTTP: "https://{}", _GRPC: "gRPC with TLS {}"}
    places = {
        door.name: (forms_of_tls if door.tls else forms)[door.name].format(door.place)
        for door in doors
    }
    reach = ""
    if all(door.is_local for door in doors):
        reach = (
            " (only this machine can connect: --http-address=0.0.0.0 and --grpc-address=0.0.0.0 "
            "let others)"
        )
    _logger.info("ready: %s%s", ", ".join(places.values()), reach)
    configs = {model.name: model.config for model in repository.loaded()}
    if _HTTP in places and configs:
        named = sorted(configs.items())
        lines = [curl_line(config, places[_HTTP], configs) for _, config in named]
        header = settings.http_restricted_api.get("inference")
        needs = [] if header is None else [f"-H '{header.header}: ...'"]
        needs += ["--cacert ROOT"] if settings.http_tls.served else []
        needs += ["--cert CLIENT --key KEY"] if settings.http_tls.use_ssl_mutual else []
        told = f", with {' '.join(needs)}" if needs else ""
        _logger.info("each model once%s:\n%s", told, "\n".join(filter(None, lines)))


async def _close(
    doors: list[_Door],
    repository: ModelRepository,
    orphans: Orphans,
    seconds: float,
    failed: str,
) -> None:
    """Close the endpoints, answer requests in flight, finalize models; log what ``failed`` last."""
    deadline = asyncio.get_running_loop().time() + seconds
    for door in doors:
        door.server.close()
        if door.tls is not None:
            door.tls.close()
        for connection in list(door.connections):
            connection.drain()
    await repository.close(seconds)
    await orphans.close()
    for door in doors:
        for connection in list(door.connections):
            connection.finish()
    await _flush(doors, deadline)
    for door in doors:
        for connection in list(door.connections):
            connection.abort()
    _logger.info("stopped")
    if failed:
        # The last line, where whoever started it looks.
        _logger.error("error: creating server: Internal - failed to load all models: %s", failed)


async def _flush(doors: list[_Door], deadline: float) -> None:
    """Let clients have the answers that are on their way, for as long as they take any of them."""
    clock = asyncio.get_running_loop().time
    # Nothing tells of what is taken: it is looked up.
    since, before = clock(), None
    while (now := clock()) < max(deadline, since + _FLUSH_SECONDS):
        open_ones = [connection for door in doors for connection in door.connections]
        left = len(open_ones), sum(connection.unsent for connection in open_ones)
        if left != before:
            since, before = now, left
        if not open_ones or now - since >= _FLUSH_SECONDS:
            break
        await asyncio.sleep(0.01)
