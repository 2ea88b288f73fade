"""A proxy on a node, an actor: a HAProxy that follows the directory."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from gpubridge.errors import BridgeError
from gpubridge.ray.haproxy_config import ProxyConfig
from gpubridge.ray.proxy import Proxy
from gpubridge.ray.server_address import ServerAddress
from gpubridge.ray.settings import FleetSettings

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 4.0
_RETRY_SECONDS = 0.2


class ProxyActor:
    """The actor; it ends, and Ray starts it again, when HAProxy ends."""

    def __init__(self, name: str, address: str, settings: FleetSettings, directory: str) -> None:
        self._name = name
        self._directory = directory
        sockets = None
        if settings.socket_folder:
            sockets = Path(settings.socket_folder) / name.rpartition("-")[2]
        self._proxy = Proxy(
            ProxyConfig(
                address=address,
                http_port=settings.http_port,
                grpc_port=settings.grpc_port,
                metrics_port=settings.metrics_port,
                folder=Path(tempfile.mkdtemp(prefix="gpubridge-")),
                sockets=sockets,
                slots=settings.most_replicas,
                threads=settings.threads,
                connections=settings.connections,
                retry_bytes=settings.retry_bytes,
            )
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def processes(self) -> tuple[int, int]:
        """Return the processes of HAProxy and of the actor."""
        return self._proxy.process_id, os.getpid()

    def _follow(self) -> None:
        applied = -1
        servers: dict[int, ServerAddress] = {}
        while self._proxy.is_running():
            try:
                snapshot = ray.get(self._ask(applied), timeout=3 * _POLL_SECONDS)
            except (RayError, ValueError):
                # The directory is being started again: the servers stay as they are.
                time.sleep(_RETRY_SECONDS)
                continue
            servers = snapshot.servers if snapshot.settled else {**servers, **snapshot.servers}
            try:
                if snapshot.version != applied:
                    self._proxy.apply(servers, snapshot.classes)
            except BridgeError as error:
                _logger.error("%s", error.message)  # noqa: TRY400  (the text is the cause)
                break
            applied = snapshot.version
        os._exit(1)

    def _ask(self, applied: int) -> Any:
        directory = ray.get_actor(self._directory, namespace="gpubridge")
        return directory.wait.remote(self._name, applied, _POLL_SECONDS)
