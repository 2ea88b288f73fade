"""The directory of a fleet, an actor: which servers there are, and which proxies know them.

Replicas publish their servers with each health check, so that a directory that was started again
knows them soon; until then (``settled``) proxies take no server out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpubridge.ray.proxy_actor import ProxyActor
from gpubridge.ray.server_address import ServerAddress
from gpubridge.ray.settings import FleetSettings

_logger = logging.getLogger(__name__)
NAMESPACE = "gpubridge"
_SETTLE_SECONDS = 8.0
_CONFIRM_SECONDS = 10.0
_SUPERVISE_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_LONGEST_DRAIN_SECONDS = 60.0
_SUCCESSOR_SECONDS = 20.0
LEAVE_SECONDS = _SUCCESSOR_SECONDS + _CONFIRM_SECONDS
"""The longest time that `Directory.leave` takes."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A server of the fleet, as it is published.

    - ``slot``: its place in proxies; negative while it has none.
    - ``classes``: its models' classes.
    - ``models``: ready versions by model.
    - ``errors``: by model, of loads that failed.
    - ``applied``: the desired state of models that has been brought about.
    - ``pending``: requests without a last response; ``restarts``: of its models' processes.
    """

    key: str
    server: ServerAddress
    process_id: int
    actor_process_id: int
    node: str
    classes: dict[str, str]
    models: dict[str, tuple[str, ...]]
    errors: dict[str, str]
    applied: dict[str, Any]
    pending: float = 0.0
    restarts: int = 0
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The servers by slot at a version; ``settled``: servers that are missing are gone."""

    version: int
    settled: bool
    servers: dict[int, ServerAddress]
    classes: dict[str, str]


class Directory:
    """The actor; ``application``: the fleet's in Serve, with which the directory ends."""

    def __init__(self, settings: FleetSettings, application: str) -> None:
        self._settings = settings
        self._application = application
        self._replicas: dict[str, Replica] = {}
        # Versions of a later directory are higher.
        self._version = time.time_ns()
        self._changed = asyncio.Condition()
        self._settled = False
        # By proxy: the version that it has applied, and when it said so.
        self._confirmed: dict[str, tuple[int, float]] = {}
        self._proxies: dict[str, Any] = {}
        # Why proxies could not start.
        self._faults: dict[str, str] = {}
        self._ended: set[str] = set()
        self._leaving: set[str] = set()
        self._lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, replica: Replica, handle: Any) -> int:
        """Enter a replica, or what has changed of it; return its slot, negative if all are taken."""
        self._start_tasks()
        known = self._replicas.get(replica.key)
        if replica.key in self._ended or (known is not None and known.server.draining):
            return replica.slot
        slot = known.slot if known is not None else self._slot(replica.slot)
        if slot < 0:
            return slot
        replica = replace(replica, slot=slot)
        self._replicas[replica.key] = replica
        if known is None:
            self._spawn(self._watch(replica.key, handle))
        if known is None or (known.server, known.classes) != (replica.server, replica.classes):
            await self._bump()
        return slot

    async def leave(self, key: str) -> None:
        """Have proxies send no new requests to a server that ends, once another one serves.

        Serve stops the replicas of a node that ends soon before it has started others.
        """
        if key not in self._replicas:
            return
        self._leaving.add(key)
        deadline = time.monotonic() + _SUCCESSOR_SECONDS
        while not self._serving() and time.monotonic() < deadline:
            if not await asyncio.to_thread(self._is_deployed):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        await self.withdraw(key)

    async def withdraw(self, key: str) -> None:
        """Have proxies send no new requests to a server; wait until they say so."""
        replica = self._replicas.get(key)
        if replica is None:
            return
        self._replicas[key] = replace(replica, server=replace(replica.server, draining=True))
        version = await self._bump()

        def all_know() -> bool:
            recent = time.monotonic() - _CONFIRM_SECONDS
            return all(at < recent or of >= version for of, at in self._confirmed.values())

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until(all_know), _CONFIRM_SECONDS)

    async def forget(self, key: str) -> None:
        """Remove a server that has ended."""
        self._ended.add(key)
        if self._replicas.pop(key, None) is not None:
            self._lost += key not in self._leaving
            self._leaving.discard(key)
            await self._bump()

    async def wait(self, proxy: str, applied: int, seconds: float) -> Snapshot:
        """Note that a proxy has applied a version; wait for a newer one for some time."""
        self._start_tasks()
        self._confirmed[proxy] = (applied, time.monotonic())
        async with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until(lambda: self._version != applied), seconds)
        self._confirmed[proxy] = (applied, time.monotonic())
        replicas = self._replicas.values()
        classes = {name: kind for each in replicas for name, kind in each.classes.items()}
        servers = {each.slot: each.server for each in replicas}
        return Snapshot(self._version, self._settled, servers, classes)

    async def state(self) -> dict[str, Any]:
        """Return the fleet's state, for people and tests."""
        proxies = {name: at for name, (_, at) in self._confirmed.items()}
        now = time.monotonic()
        return {
            "replicas": [asdict(each) for each in self._replicas.values()],
            "lost": self._lost,
            "faults": sorted(self._faults.values()),
            "proxies": sorted(name for name, at in proxies.items() if now - at < _CONFIRM_SECONDS),
        }

    def _serving(self) -> list[str]:
        """Return the servers that stay."""
        replicas = self._replicas.items()
        return [key for key, each in replicas if not (each.server.draining or key in self._leaving)]

    def _slot(self, wanted: int) -> int:
        """Return a free slot, the one that the replica has had if possible."""
        taken = {each.slot for each in self._replicas.values()}
        if wanted >= 0 and wanted not in taken:
            return wanted
        return next((slot for slot in range(self._settings.most_replicas) if slot not in taken), -1)

    async def _bump(self) -> int:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()
            return self._version

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    # -- supervision -----------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_tasks(self) -> None:
        if not self._tasks:
            self._spawn(self._settle())
            self._spawn(self._supervise())

    async def _settle(self) -> None:
        await asyncio.sleep(_SETTLE_SECONDS)
        self._settled = True
        await self._bump()

    async def _watch(self, key: str, handle: Any) -> None:
        """Withdraw a server whose replica has died; the server ends by itself."""
        while key in self._replicas:
            try:
                await handle.__ray_ready__.remote()
            except ActorUnavailableError:
                pass  # its node cannot be reached for a moment
            except RayActorError:
                if key not in self._leaving:
                    self._lost += 1
                    self._leaving.add(key)
                await self.withdraw(key)
                await asyncio.sleep(_LONGEST_DRAIN_SECONDS)
                await self.forget(key)
                return
            await asyncio.sleep(_SUPERVISE_SECONDS)

    async def _supervise(self) -> None:
        """Keep a proxy on each node that should have one; end with the application."""
        missing = 0
        while missing < 3 or self._replicas:
            try:
                nodes = await asyncio.to_thread(ray.nodes)
                self._place_proxies([node for node in nodes if node["Alive"]])
            except RayError as error:
                _logger.warning("proxies cannot be placed now: %r", error)
            missing = 0 if await asyncio.to_thread(self._is_deployed) else missing + 1
            await asyncio.sleep(_SUPERVISE_SECONDS)
        for handle in self._proxies.values():
            ray.kill(handle)
        ray.kill(ray.get_runtime_context().current_actor)

    def _place_proxies(self, nodes: list[dict[str, Any]]) -> None:
        settings = self._settings
        if settings.proxies == "none":
            return
        for node in nodes:
            if settings.proxies == "head" and "node:__internal_head__" not in node["Resources"]:
                continue
            for number in range(settings.proxies_per_node):
                name = f"{self._application}-{node['NodeID'][:12]}-{number}"
                if name not in self._proxies:
                    self._proxies[name] = self._start_proxy(name, node)
                    self._spawn(self._see_start(name))

    def _start_proxy(self, name: str, node: dict[str, Any]) -> Any:
        address = self._settings.address or node["NodeManagerAddress"]
        options = {
            "name": f"proxy-{name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        proxy = ray.remote(ProxyActor).options(**options)
        return proxy.remote(name, address, self._settings, directory_name(self._application))

    async def _see_start(self, name: str) -> None:
        """Have a proxy started again that could not start: its ports may be free by then."""
        try:
            await self._proxies[name].__ray_ready__.remote()
            self._faults.pop(name, None)
        except RayActorError as error:
            self._faults[name] = str(error)
            await asyncio.sleep(_CONFIRM_SECONDS)
            del self._proxies[name]

    def _is_deployed(self) -> bool:
        try:
            state = serve.status().applications.get(self._application)
            return state is not None and state.status != "DELETING"
        except Exception:  # noqa: BLE001  (while the controller is started again)
            return True


def directory_name(application: str) -> str:
    """Return the name of a fleet's directory."""
    return f"directory-{application}"


def fleet_directory(settings: FleetSettings, application: str) -> Any:
    """Return the directory of a fleet, started if there is none."""
    options = {
        "name": directory_name(application),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
    }
    return ray.remote(Directory).options(**options).remote(settings, application)
