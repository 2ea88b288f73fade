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
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple

import gpubridge
from gpubridge.config import PYTHON_BACKEND, Backends, PythonBackendSettings, ServerSettings
from gpubridge.config.connections import TlsSettings
from gpubridge.config.restrictions import header_names
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.load_progress import readable_size
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.repository.loader import ModelLoader
from gpubridge.engine.repository.model_index import VersionStatus
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.response_cache import ResponseCache
from gpubridge.engine.supervisor.context import EngineContext
from gpubridge.engine.supervisor.fork_servers import ForkServers
from gpubridge.engine.supervisor.orphans import Orphans
from gpubridge.engine.supervisor.stub_process import StartStub, start_stub
from gpubridge.engine.workers import Workers
from gpubridge.errors import unavailable
from gpubridge.frontend.answered import AnsweredRequests
from gpubridge.frontend.bls.server import BlsServer
from gpubridge.frontend.connection_limits import allow_connections
from gpubridge.frontend.forwarded_headers import ForwardedHeaders
from gpubridge.frontend.grpc.connection import GrpcConnection
from gpubridge.frontend.grpc.service import GrpcService
from gpubridge.frontend.http.connection import HttpConnection, HttpListener
from gpubridge.frontend.http.message import PLAIN_TO_TLS, HttpSettings
from gpubridge.frontend.http.origins import origins_at
from gpubridge.frontend.routes import MetricsRouter, V2Router
from gpubridge.frontend.status.document import StatusDocument
from gpubridge.frontend.status.page import StatusPage
from gpubridge.frontend.timeouts import TimeoutSweeper
from gpubridge.frontend.tls_connection import TlsConnection, TlsListener, read_context
from gpubridge.host_shm.usable_memory import usable_memory
from gpubridge.lifecycle import StopRequests, clear_ports_file, ports_file
from gpubridge.protocol.curl_line import curl_line
from gpubridge.telemetry.logs import boxed
from gpubridge.telemetry.server_telemetry import ServerTelemetry

_logger = logging.getLogger(__name__)

_MakeProtocol = Callable[[set[Any]], asyncio.BufferedProtocol]

_FLUSH_SECONDS = 1.0
_CALLS_SHOWN = 20
"""Models whose calls are logged at the start."""
_HTTP, _GRPC, _METRICS = "HTTPService", "GRPCInferenceService", "Metrics Service"
_NAMES = {_HTTP: "http", _GRPC: "grpc", _METRICS: "metrics"}


class _Endpoints(NamedTuple):
    """The parts that the endpoints serve; no ``status`` if the status page is switched off.

    ``answered``: counts of their requests.
    """

    router: V2Router
    service: GrpcService
    metrics: MetricsRouter
    status: StatusDocument | None
    answered: AnsweredRequests

    def leave_service(self) -> None:
        """Say that the server is not ready any more."""
        self.router.serving = False
        self.service.health.check(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Stop what they do beside requests."""
        self.answered.close()
        if self.status is not None:
            self.status.history.close()


@dataclass(slots=True)
class Endpoint:
    """A listening socket and its open connections."""

    name: str
    host: str
    port: int
    server: asyncio.Server
    connections: set[Any]
    tls: TlsListener | None = None

    @property
    def is_loopback(self) -> bool:
        """Return whether only clients on this machine can connect."""
        return ip_address(self.host).is_loopback

    @property
    def is_public(self) -> bool:
        """Return whether clients on other machines can connect without a certificate."""
        return not self.is_loopback and (self.tls is None or not self.tls.context.verify_mode)

    @property
    def url_host(self) -> str:
        """Host and port at which clients on this machine connect."""
        address = ip_address(self.host)
        host = "localhost" if address.is_unspecified else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


async def serve(settings: ServerSettings, telemetry: ServerTelemetry, parent: int) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code of the process.

    On a signal the endpoints close, requests in flight are answered, models are finalized.

    ``parent``: the process that started this one, for ``--exit-with-parent``.

    Raises BridgeError when the server cannot start: a port is taken, a setting is wrong.
    """
    stop = StopRequests(parent if settings.process.exit_with_parent else None)
    clear_ports_file(settings.process.ports_file)
    workers = Workers()
    workers.begin()
    forks = ForkServers(Orphans(), enabled=settings.instances.fork_stubs)
    starter = partial(start_stub, forks=forks) if forks.orphans.possible else start_stub
    repository = build_repository(settings, telemetry, workers, starter)
    regions = ClientRegions(
        repository.regions,
        repository.devices,
        allowed=settings.memory.allow_client_shm,
        most=settings.memory.client_shm_max_regions,
    )
    served = _build_endpoints(settings, repository, regions, workers)
    endpoints: list[Endpoint] = []
    failed = ""
    sweeper = TimeoutSweeper([*settings.http.connections.times, *settings.grpc.connections.times])
    try:
        await _open_endpoints(settings, repository, served, workers, endpoints)
        _check_timeouts(endpoints, sweeper, settings)
        sweeper.add([served.service.health])
        await _load(repository, stop)
        _log_backends(repository, settings)
        _log_models(await repository.listed())
        if repository.failures and settings.repository.exit_on_error and not stop.made:
            failed = _describe_failures(repository)
            return 1
        served.router.serving = True
        _log_ready(endpoints, repository, settings)
        with ports_file(settings.process.ports_file, _addresses(endpoints)):
            await stop.wait()
            if settings.process.drain_delay_secs:
                served.leave_service()
                await stop.delay(settings.process.drain_delay_secs)
        return 0
    except asyncio.CancelledError:
        return 0
    finally:
        served.leave_service()
        await _close(endpoints, repository, forks, settings.process.exit_timeout_secs, failed)
        sweeper.close()
        served.close()
        workers.close()


async def _load(repository: ModelRepository, stop: StopRequests) -> None:
    """Load the models; a request to stop cancels it, and the caller with it."""
    loop = asyncio.get_running_loop()
    loading = loop.create_task(repository.load_initial())
    stopping = loop.create_task(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
    stopping.cancel()
    await loading


def _addresses(endpoints: Sequence[Endpoint]) -> dict[str, tuple[str, int]]:
    return {_NAMES[endpoint.name]: (endpoint.host, endpoint.port) for endpoint in endpoints}


def _check_timeouts(
    endpoints: Sequence[Endpoint], sweeper: TimeoutSweeper, settings: ServerSettings
) -> None:
    """Have the timeouts of all connections checked, and reload certificates and keys on SIGHUP."""
    listeners = [endpoint.tls for endpoint in endpoints if endpoint.tls is not None]
    for group in (
        *(endpoint.connections for endpoint in endpoints),
        *(tls.handshakes for tls in listeners),
    ):
        sweeper.add(group)

    restricted = [*settings.http.restrictions.values(), *settings.grpc.restrictions.values()]

    def reload() -> None:
        for tls in listeners:
            tls.reload()
        for restriction in dict.fromkeys(restricted):
            restriction.reload()

    # Without TLS, too: SIGHUP ends a process that does not handle it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _describe_failures(repository: ModelRepository) -> str:
    """Return the names of the models that failed to load, and the reason of the first."""
    rows = repository.failures
    names = ", ".join(f"'{name}'" for name in dict.fromkeys(row.name for row in rows))
    reason = rows[0].reason.partition("\n")[0]
    return f"{names} failed; '{rows[0].name}': {reason}"


def build_repository(
    settings: ServerSettings,
    telemetry: ServerTelemetry,
    workers: Workers,
    start_stub: StartStub = start_stub,
    make_loader: Callable[..., ModelLoader] = ModelLoader,
) -> ModelRepository:
    """Build everything behind the endpoints, without loading any model.

    ``make_loader``: takes the arguments of :class:`ModelLoader`.
    """
    backend = PythonBackendSettings.from_backend_config(settings.backends.config.get("python", {}))
    for notice in [*settings.notices(), *backend.notices]:
        _logger.info("%s", notice)
    settings = _limited(settings)
    calls = BlsServer()
    regions = Regions(settings.memory.request_arena_limit, settings.memory.response_store_limit)
    threads = LoadThreads()
    environments = ModelEnvironments(
        backend.environment_cache,
        backend.environment_limit_bytes,
        threads,
        clean=settings.instances.stub_environment == "clean",
        build_seconds=backend.module_build_seconds,
    )
    devices = DeviceManager(
        backend.device_arena_bytes,
        backend.device_memory_handles,
        EventSharing(backend.device_events, backend.device_lost_event_seconds),
    )
    cache = ResponseCache(settings.cache_bytes) if settings.cache_bytes else None
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
        cache=cache,
    )
    repository = ModelRepository(
        settings,
        make_loader(
            context,
            devices.gpus.count,
            settings.instances.gpu_fallback,
            Backends(settings.backends.directory),
            auto_complete=settings.repository.auto_complete,
        ),
    )
    calls.serve(repository)
    repository.listen(calls.model_changed)
    if cache is not None:
        repository.listen(cache.model_changed)
    return repository


def _limited(settings: ServerSettings) -> ServerSettings:
    """Return the settings with limits of memory that fit the machine, or the container."""
    usable = usable_memory()
    memory = settings.memory.within(usable)
    together = (
        memory.request_arena_limit
        + memory.output_arena_limit
        + memory.response_store_limit
        + settings.cache_bytes
    )
    if together > usable:
        _logger.warning(
            "limits of memory are %s together, more than the %s that the server may use: lower "
            "--request-arena-limit, --output-arena-limit, --response-store-limit or --cache-config",
            readable_size(together),
            readable_size(usable),
        )
    elif memory != settings.memory:
        _logger.info(
            "the server may use %s of memory: requests have %s (--request-arena-limit), outputs of "
            "an instance %s (--output-arena-limit), responses for slow readers %s "
            "(--response-store-limit)",
            *map(readable_size, (usable, memory.request_arena_limit)),
            *map(readable_size, (memory.output_arena_limit, memory.response_store_limit)),
        )
    return replace(settings, memory=memory)


def _build_endpoints(
    settings: ServerSettings, repository: ModelRepository, regions: ClientRegions, workers: Workers
) -> _Endpoints:
    router = V2Router(
        repository,
        regions,
        workers,
        strict_readiness=settings.process.strict_readiness,
        headers=ForwardedHeaders(
            settings.http.header_forward_pattern, header_names(settings.http.restrictions)
        ),
        restrictions=settings.http.restrictions,
    )
    service = GrpcService(repository, router.ready, regions, workers, settings)
    repository.listen(router.model_changed)
    repository.listen(service.model_changed)
    page = status = None
    if settings.metrics_endpoint.status_page:
        sends = settings.metrics_endpoint.status_page_requests
        status = StatusDocument(repository, regions, workers, router.ready, sends=sends)
        status.history.begin()
        router.serve_status(status)
        page = StatusPage(status, router.route, sends=sends)
    answered = AnsweredRequests(service.methods.counts, service.names)
    if settings.log.access:
        answered.log_to(repository.telemetry.log)
    metrics = MetricsRouter(repository, settings.http.restrictions, answered, workers, page)
    return _Endpoints(router, service, metrics, status, answered)


async def _open_endpoints(
    settings: ServerSettings,
    repository: ModelRepository,
    served: _Endpoints,
    workers: Workers,
    endpoints: list[Endpoint],
) -> None:
    router, service, metrics, status, answered = served
    http_endpoints = settings.http.allow + settings.metrics_endpoint.allow
    backlog = allow_connections(
        [settings.http.connections.max_connections] * http_endpoints
        + [settings.grpc.connections.max_connections] * settings.grpc.allow,
        settings.memory.client_shm_max_regions if settings.memory.allow_client_shm else 0,
    )
    http = HttpSettings(settings.http.max_input_size, settings.http.connections)
    if settings.grpc.allow:
        grpc_calls: _MakeProtocol = partial(GrpcConnection, service, settings.grpc.connections)
        address, port = settings.grpc.address, settings.grpc.port
        limits = settings.grpc.connections
        most, seconds = limits.max_connections, limits.preface_timeout
        tls = _tls_listener(settings.grpc.tls, "h2", most, seconds)
        reuse = settings.grpc.reuse_port
        endpoints.append(
            await _open_endpoint(
                _GRPC, address, port, grpc_calls, tls, backlog=backlog, reuse_port=reuse
            )
        )
    if settings.http.allow:
        budget = repository.regions.budget
        address, port = settings.http.address, settings.http.port
        origins = await origins_at(address, settings.http.allowed_origins)
        listener = HttpListener(router, http, workers, budget, router.targets, origins)
        listener.counts = answered.http
        requests: _MakeProtocol = partial(HttpConnection, listener)
        most, seconds = http.connections.max_connections, http.connections.header_timeout
        tls = _tls_listener(settings.http.tls, "http/1.1", most, seconds, PLAIN_TO_TLS)
        reuse = settings.http.reuse_port
        endpoints.append(
            await _open_endpoint(
                _HTTP, address, port, requests, tls, backlog=backlog, reuse_port=reuse
            )
        )
    if settings.metrics_endpoint.allow:
        address, port = settings.metrics_endpoint.address, settings.metrics_endpoint.port
        origins = await origins_at(address, settings.http.allowed_origins)
        budget = repository.regions.budget
        listener = HttpListener(metrics, http, workers, budget, origins=origins)
        listener.counts = answered.http
        pages: _MakeProtocol = partial(HttpConnection, listener)
        endpoints.append(await _open_endpoint(_METRICS, address, port, pages, backlog=backlog))
    for each in endpoints:
        if each.name == _METRICS:
            router.pages.show_port(each.port, status_page=status is not None)
    if status is not None:
        status.endpoints = {
            _NAMES[each.name]: {
                "address": each.host,
                "port": each.port,
                "tls": each.tls is not None,
            }
            for each in endpoints
        }
    warn_if_public(endpoints, settings)


def _tls_listener(
    tls: TlsSettings, alpn: str, most: int, seconds: float, plain_answer: bytes = b""
) -> TlsListener | None:
    if not tls.served:
        return None
    read = partial(read_context, tls, alpn)
    return TlsListener(read, most=most, seconds=seconds, plain_answer=plain_answer)


async def _open_endpoint(
    name: str,
    address: str,
    port: int,
    protocol: _MakeProtocol,
    tls: TlsListener | None = None,
    **listening: Any,
) -> Endpoint:
    connections: set[Any] = set() if tls is None else tls.connections
    make = partial(protocol, connections)
    try:
        server = await asyncio.get_running_loop().create_server(
            make if tls is None else partial(TlsConnection, tls, make),
            address,
            port,
            family=socket.AF_UNSPEC,
            **listening,
        )
    except OSError as error:
        other = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "address"
        raise unavailable(
            f"cannot listen on {address}:{port} for {name}: {error.strerror or error}; choose "
            f"another {other}"
        ) from error
    host, bound = server.sockets[0].getsockname()[:2]
    _logger.info("Started %s at %s:%d", name, f"[{host}]" if ":" in host else host, bound)
    return Endpoint(name, host, bound, server, connections, tls)


def _log_backends(repository: ModelRepository, settings: ServerSettings) -> None:
    """Log the backends of the loaded models, as Triton does."""
    paths = {
        model.config.backend: str(model.config.backend_file or gpubridge.__path__[0])
        for model in repository.loaded()
        if model.config.backend
    }
    if paths:
        # The other backends run on it.
        paths.setdefault(PYTHON_BACKEND, gpubridge.__path__[0])
    options = {"auto-complete-config": str(settings.repository.auto_complete).lower()}
    if settings.backends.directory is not None:
        options["backend-directory"] = str(settings.backends.directory)
    rows = [("Backend", "Path", "Config")]
    for name, path in sorted(paths.items()):
        config = {**options, **settings.backends.config.get(PYTHON_BACKEND, {})}
        rows.append((name, path, json.dumps({"cmdline": config}, separators=(",", ":"))))
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


def warn_if_public(endpoints: Sequence[Endpoint], settings: ServerSettings) -> None:
    """Warn when clients on other machines can use the server."""
    public = ", ".join(
        f"{endpoint.host}:{endpoint.port}" for endpoint in endpoints if endpoint.is_public
    )
    if public:
        code = settings.repository.model_control_mode == "explicit"
        _logger.warning(
            "%s: every client that reaches this machine over a network can use every model%s; "
            "--http-address=127.0.0.1 and --grpc-address=127.0.0.1 let only this machine connect",
            public,
            " and load models, whose code runs here" if code else "",
        )


def _log_ready(
    endpoints: Sequence[Endpoint], repository: ModelRepository, settings: ServerSettings
) -> None:
    """Log the addresses, who can connect, and a command that calls each model."""
    forms = {_HTTP: "http://{}", _GRPC: "gRPC {}", _METRICS: "http://{}/metrics"}
    forms_of_tls = {_HTTP: "https://{}", _GRPC: "gRPC with TLS {}"}
    places = {
        endpoint.name: (forms_of_tls if endpoint.tls else forms)[endpoint.name].format(
            endpoint.url_host
        )
        for endpoint in endpoints
    }
    hint = ""
    if all(endpoint.is_loopback for endpoint in endpoints):
        hint = (
            " (only this machine can connect: --http-address=0.0.0.0 and --grpc-address=0.0.0.0 "
            "let others)"
        )
    pages = ""
    if _HTTP in places:
        pages = f"; open {places[_HTTP]}/ in a browser: status, metrics, calls of models"
    _logger.info("ready: %s%s%s", ", ".join(places.values()), pages, hint)
    configs = {model.name: model.config for model in repository.loaded()}
    if _HTTP in places and configs:
        # The page at / has those of all models.
        named = sorted(configs.items())[:_CALLS_SHOWN]
        lines = [curl_line(config, places[_HTTP], configs) for _, config in named]
        header = settings.http.restrictions.get("inference")
        needs = [] if header is None else [f"-H '{header.header}: ...'"]
        needs += ["--cacert ROOT"] if settings.http.tls.served else []
        needs += ["--cert CLIENT --key KEY"] if settings.http.tls.use_ssl_mutual else []
        extra = f", with {' '.join(needs)}" if needs else ""
        which = "each model" if len(named) == len(configs) else f"{len(named)} of the models"
        _logger.info("%s once%s:\n%s", which, extra, "\n".join(filter(None, lines)))


async def _close(
    endpoints: list[Endpoint],
    repository: ModelRepository,
    forks: ForkServers,
    seconds: float,
    failed: str,
) -> None:
    """Close the endpoints, answer requests in flight and finalize models; ``failed`` is logged last."""
    deadline = asyncio.get_running_loop().time() + seconds
    for endpoint in endpoints:
        endpoint.server.close()
        if endpoint.tls is not None:
            endpoint.tls.close()
        for connection in list(endpoint.connections):
            connection.drain()
    await repository.close(seconds)
    await forks.close()
    for endpoint in endpoints:
        for connection in list(endpoint.connections):
            connection.finish()
    await _flush(endpoints, deadline)
    for endpoint in endpoints:
        for connection in list(endpoint.connections):
            connection.abort()
    _logger.info("stopped")
    if failed:
        # The last line of the log: users look there first.
        _logger.error("error: creating server: Internal - failed to load all models: %s", failed)


async def _flush(endpoints: list[Endpoint], deadline: float) -> None:
    """Wait until clients have read their answers, or stop reading them."""
    clock = asyncio.get_running_loop().time
    # No callback reports what clients read, so it is polled.
    since, before = clock(), None
    end = max(deadline, since + _FLUSH_SECONDS)
    while (now := clock()) < end:
        open_ones = [connection for endpoint in endpoints for connection in endpoint.connections]
        left = len(open_ones), sum(connection.unsent for connection in open_ones)
        if left != before:
            since, before = now, left
        if not open_ones or now - since >= _FLUSH_SECONDS:
            break
        await asyncio.sleep(0.01)
