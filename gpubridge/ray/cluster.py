"""The fleet of a Ray cluster: deployed, looked at, and told which models to load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from gpubridge.errors import invalid, unavailable
from gpubridge.ray.directory import NAMESPACE, directory_name

APPLICATION = "gpubridge"
_POLL_SECONDS = 0.2


class Fleet:
    """The fleet of the cluster that this process is connected to."""

    def deploy(self, application: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Deploy the application and wait until it runs; ``say`` is told the progress.

        Raises BridgeError: it does not start.
        """
        before = serve.status().applications.get(APPLICATION)
        since = 0.0 if before is None else before.last_deployed_time_s
        self._apply(application)
        said = ""
        while True:
            state = serve.status().applications.get(APPLICATION)
            if state is None or state.last_deployed_time_s == since:
                time.sleep(_POLL_SECONDS)
                continue
            told = f"{state.status.value}: {self._ready()} servers ready"
            if told != said:
                say(told)
                said = told
            if state.status == "RUNNING" and self._has_proxies(application):
                return
            if faults := self._directory()["faults"]:
                raise unavailable(f"a proxy does not start: {faults[0]}")
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise unavailable(f"the fleet does not start: {state.message}")
            time.sleep(_POLL_SECONDS)

    def status(self) -> dict[str, Any]:
        """Return the state of the application, its replicas and proxies."""
        state = serve.status().applications.get(APPLICATION)
        found = {"status": "absent" if state is None else str(state.status.value)}
        return {**found, "message": "" if state is None else state.message, **self._directory()}

    def set_model(self, name: str, value: Any, seconds: float) -> dict[str, Any]:
        """Make a value the desired state of a model; wait until all replicas have brought it about.

        Raises BridgeError: there is no fleet; a replica's load failed; not all are done in time.
        """
        application = self._deployed()
        (deployment,) = application["deployments"]
        models = dict((deployment.get("user_config") or {}).get("models") or {})
        deployment["user_config"] = {"models": {**models, name: value}}
        self._apply(application)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            replicas = self._directory()["replicas"]
            if replicas and all(each["applied"].get(name) == value for each in replicas):
                errors = {each["errors"][name] for each in replicas if name in each["errors"]}
                if errors:
                    raise unavailable(f"{name}: {'; '.join(sorted(errors))}")
                return {"replicas": len(replicas)}
            time.sleep(_POLL_SECONDS)
        raise unavailable(
            f"not all replicas have done it after {seconds:g} s; see 'gpubridge ray status'"
        )

    def update(self, application: Mapping[str, Any]) -> None:
        """Give the fleet other arguments or another size; models stay as they are wanted."""
        deployed = self._deployed()
        (new,), (old,) = application["deployments"], deployed["deployments"]
        before = deployed["args"]
        kept = {name: before[name] for name in ("proxies", "socket_folder") if name in before}
        args = {**application["args"], **kept}
        deployment = {**new, "user_config": old.get("user_config") or {"models": {}}}
        self.deploy({**application, "args": args, "deployments": [deployment]}, lambda _: None)

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run a command of ``gpubridge ray``: ``status``, ``model``, ``update`` or ``down``."""
        if command["command"] == "update":
            self.update(command["application"])
            return {}
        if command["command"] == "model":
            return self.set_model(command["name"], command["value"], command["seconds"])
        if command["command"] == "down":
            # Its servers answer what they have.
            serve.delete(APPLICATION)
            return {}
        return self.status()

    def _apply(self, application: Mapping[str, Any]) -> None:
        # Not serve.run: each call of that is a new version, which starts all replicas again.
        schema = ServeDeploySchema(proxy_location="Disabled", applications=[dict(application)])
        _get_global_client().deploy_apps(schema)

    def _deployed(self) -> dict[str, Any]:
        details = _get_global_client().get_serve_details()["applications"]
        if APPLICATION not in details:
            raise invalid(f"the cluster has no application {APPLICATION!r}; start it first")
        config: dict[str, Any] = dict(details[APPLICATION]["deployed_app_config"])
        if not config.get("deployments"):
            config["deployments"] = [{"name": "Server"}]
        return config

    def _directory(self) -> dict[str, Any]:
        try:
            directory = ray.get_actor(directory_name(APPLICATION), namespace=NAMESPACE)
            state: dict[str, Any] = ray.get(directory.state.remote(), timeout=10)
        except (ValueError, ray.exceptions.RayError):
            return {"replicas": [], "proxies": [], "lost": 0, "faults": []}
        return state

    def _ready(self) -> int:
        return len(self._directory()["replicas"])

    def _has_proxies(self, application: Mapping[str, Any]) -> bool:
        args = application["args"]
        wanted = 0 if args.get("proxies") == "none" else args.get("proxies_per_node", 1)
        return len(self._directory()["proxies"]) >= wanted


def application_config(
    args: Mapping[str, Any], replicas: int, most: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the application as a configuration file has it; ``options``: of Ray's actors.

    Where ``most`` is more than ``replicas``, that many are started when requests wait.
    """
    deployment: dict[str, Any] = {"name": "Server", "ray_actor_options": dict(options)}
    if most > replicas:
        deployment["autoscaling_config"] = {
            "min_replicas": replicas,
            "max_replicas": most,
            "look_back_period_s": 11,
            "upscale_delay_s": 2,
            "downscale_delay_s": 30,
            "policy": {"policy_function": "gpubridge.ray.autoscaling:pending_policy"},
        }
    else:
        deployment["num_replicas"] = replicas
    return {
        "name": APPLICATION,
        "import_path": "gpubridge.ray:build_app",
        "route_prefix": None,
        "args": dict(args),
        "deployments": [deployment],
    }


def connect(address: str) -> None:
    """Connect to a cluster; raises BridgeError if that fails."""
    try:
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    except ConnectionError as error:
        raise unavailable(f"no Ray cluster at {address}: {error}") from error
