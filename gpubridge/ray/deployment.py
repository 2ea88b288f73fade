"""The deployment of Ray Serve: a replica is one server with all its models."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from gpubridge.ray.autoscaling import BUSY, PENDING, TARGET, instances, pending_target
from gpubridge.ray.directory import LEAVE_SECONDS, Replica, fleet_directory
from gpubridge.ray.model_classes import model_classes
from gpubridge.ray.server_client import (
    control_model,
    executing_seconds,
    loaded_models,
    model_config,
    pending_and_restarts,
)
from gpubridge.ray.server_process import ServerProcess
from gpubridge.ray.settings import FleetSettings

_logger = logging.getLogger(__name__)
_STOP_SECONDS = 50.0
_PUBLISH_SECONDS = 10.0


class Server:
    """A replica: a server as a child process, published in the directory."""

    def __init__(self, settings: FleetSettings) -> None:
        context = serve.get_replica_context()
        self._key = context.replica_id.unique_id
        self._directory = fleet_directory(settings, context.app_name)
        address = settings.address or ray.util.get_node_ip_address()
        self._server = ServerProcess(settings.model_repository, settings.flags, address)
        self._slot = -1
        self._stopped = False
        # By model, the value of the desired state that has been brought about.
        self._applied: dict[str, Any] | None = None
        self._errors: dict[str, str] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self._models: dict[str, tuple[str, ...]] = {}
        # When, and for how long models had executed by then.
        self._executed: tuple[float, dict[str, float]] = (time.monotonic(), {})
        self._read_models()

    async def check_health(self) -> None:
        """Publish the server; raises RuntimeError if it has ended."""
        if ended := self._server.how_ended():
            await self._directory.forget.remote(self._key)
            raise RuntimeError(ended)
        handle = ray.get_runtime_context().current_actor
        published = self._directory.publish.remote(self._replica(), handle)
        try:
            slot = await asyncio.wait_for(published, _PUBLISH_SECONDS)
        except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
            # The server serves on while the directory is started again.
            _logger.warning("the directory gives no answer: %r", error)
            return
        if slot < 0:
            raise RuntimeError("no slot is free in the proxies: raise most_replicas of the fleet")
        self._slot = slot

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Bring about the desired state of models: ``{"models": {name: value}}``.

        A model with another value than before is loaded anew, with ``False`` unloaded. Loads go on
        behind this call; one that fails leaves the model as it is.
        """
        wanted = dict((config or {}).get("models") or {})
        if self._applied is None:
            # All models have just been loaded.
            self._applied = {name: value for name, value in wanted.items() if value is not False}
            first = [name for name in wanted if name not in self._applied]
            await asyncio.gather(*(self._bring_about(name, False) for name in first))
            return
        for name in wanted.keys() | self._applied.keys():
            value = wanted.get(name)
            if value != self._applied.get(name):
                before = self._loads.get(name)
                self._loads[name] = asyncio.create_task(self._bring_about(name, value, before))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `pending_policy` asks for."""
        return {
            PENDING: (await asyncio.to_thread(self._pending_and_restarts))[0],
            TARGET: float(pending_target(self._configs)),
            BUSY: await asyncio.to_thread(self._busy),
        }

    def __del__(self) -> None:
        """Stop: proxies send no more requests, then the server answers what it has, and ends."""
        if getattr(self, "_stopped", True):
            return
        self._stopped = True
        try:
            ray.get(self._directory.leave.remote(self._key), timeout=LEAVE_SECONDS)
        except ray.exceptions.RayError as error:
            _logger.warning("the directory gives no answer: %r", error)
        self._server.stop(_STOP_SECONDS)
        self._directory.forget.remote(self._key)

    async def _bring_about(
        self, name: str, value: Any, before: asyncio.Task[None] | None = None
    ) -> None:
        if before is not None:
            await before
        action = "unload" if value is False else "load"
        address, port = self._server.address.address, self._server.address.http_port
        error = await asyncio.to_thread(control_model, address, port, name, action)
        assert self._applied is not None
        self._applied[name] = value
        if error:
            self._errors[name] = error
            _logger.error("%s of %s failed: %s", action, name, error)
        else:
            self._errors.pop(name, None)
        await asyncio.to_thread(self._read_models)

    def _read_models(self) -> None:
        address, port = self._server.address.address, self._server.address.http_port
        models = loaded_models(address, port)
        configs = {name: model_config(address, port, name) for name in models}
        self._models = models
        self._configs = {name: config for name, config in configs.items() if config is not None}

    def _pending_and_restarts(self) -> tuple[float, int]:
        address = self._server.address
        try:
            return pending_and_restarts(address.address, address.metrics_port)
        except OSError:
            return 0.0, 0

    def _busy(self) -> float:
        """Return the share of the time that the busiest model has executed since the last call."""
        seconds = executing_seconds(self._server.address.address, self._server.address.http_port)
        now = time.monotonic()
        (then, before), self._executed = self._executed, (now, seconds)
        shares = [
            (seconds.get(name, 0.0) - before.get(name, 0.0)) / instances(config)
            for name, config in self._configs.items()
        ]
        return min(max(shares, default=0.0) / max(now - then, 1e-3), 1.0)

    def _replica(self) -> Replica:
        pending, restarts = self._pending_and_restarts()
        return Replica(
            key=self._key,
            server=self._server.address,
            process_id=self._server.process_id,
            actor_process_id=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            classes=model_classes(self._configs),
            models=self._models,
            errors=dict(self._errors),
            applied=dict(self._applied or {}),
            pending=pending,
            restarts=restarts,
            slot=self._slot,
        )


def server_deployment() -> Any:
    """Return the deployment with the options that a configuration file does not set."""
    return serve.deployment(
        name="Server",
        # One replica, too, is replaced before it ends.
        max_surge_percent=100,
        user_config={"models": {}},
        health_check_period_s=1,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=_STOP_SECONDS + LEAVE_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
    )(Server)
