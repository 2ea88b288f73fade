"""``gpubridge ray``: a fleet of servers on Ray."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gpubridge.errors import invalid

USAGE = "up REPOSITORY ... | update REPOSITORY ... | status | load MODEL | unload MODEL | down  [FLAG ...]"
DESCRIPTION = (
    "Servers behind a proxy, placed and watched by Ray Serve. 'up' runs a fleet on this machine until "
    "it is stopped, in a network of its own that is reached on loopback; 'update' gives it other flags, "
    "a few servers at a time, or another number of servers. The other commands are for "
    "that fleet, or for the one of a cluster (--address)."
)
_ACTIONS = ("up", "update", "status", "load", "unload", "down")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=_ACTIONS, help="the command")
    parser.add_argument(
        "names", nargs="*", help="up, update: model repositories; load, unload: a model"
    )
    add = parser.add_argument
    add("--address", default="", help="of a Ray cluster, as Ray has it (auto, ray://…)")
    add("--replicas", type=int, default=2, metavar="N", help="servers")
    add("--max-replicas", type=int, default=0, metavar="N", help="autoscale up to so many")
    add("--num-gpus", type=float, default=0.0, metavar="N", help="GPUs of each server")
    add("--proxies", type=int, default=1, metavar="N", help="that share the ports")
    add("--http-port", type=int, default=8000, metavar="N", help="of the proxy")
    add("--grpc-port", type=int, default=8001, metavar="N", help="of the proxy")
    add("--metrics-port", type=int, default=8002, metavar="N", help="of the proxy")
    add(
        "--server-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="of each server; repeat it",
    )
    add("--timeout-secs", type=float, default=600.0, metavar="X", help="load, unload: wait so long")


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit code."""
    from gpubridge.ray.settings import FleetSettings, require_ray  # noqa: PLC0415  (if used)

    starts = options.action in ("up", "update")
    if starts:
        args = {
            "model_repository": options.names,
            "flags": options.server_flag,
            "proxies_per_node": options.proxies,
            **{name: getattr(options, name) for name in ("http_port", "grpc_port", "metrics_port")},
        }
        FleetSettings.from_args(args)
        if not 1 <= options.replicas <= max(options.max_replicas, options.replicas):
            raise invalid(f"--replicas expects at least 1, got {options.replicas}")
    elif len(options.names) != (options.action in ("load", "unload")):
        raise invalid(f"'gpubridge ray {options.action}' expects {_expected(options.action)}")
    require_ray()
    if options.action == "up":
        return _up(_application(options, args))
    ask = _cluster(options.address) if options.address else _local()
    if options.action == "status":
        sys.stdout.write(status_table(ask({"command": "status"})))
    elif options.action == "down":
        ask({"command": "down"})
    elif options.action == "update":
        ask({"command": "update", "application": _application(options, args)})
    else:
        # A new value each time: a model that is loaded already is loaded anew.
        value = secrets.token_hex(4) if options.action == "load" else False
        command = {"command": "model", "name": options.names[0], "value": value}
        done = ask({**command, "seconds": options.timeout_secs})
        sys.stdout.write(f"{options.action}ed {options.names[0]} in {done['replicas']} servers\n")
    return 0


def status_table(status: Mapping[str, Any]) -> str:
    """Return the lines of ``gpubridge ray status``."""
    told = f"{len(status['proxies'])} proxies, {status['lost']} servers lost so far"
    lines = [f"{status['status']}, {told} {status['message']}".rstrip()]
    row = "{:<10} {:<22} {:>8} {:>8} {:>8} {:<9} {}"
    heads = ("replica", "server", "process", "pending", "restarts", "state", "models")
    lines.append(row.format(*heads))
    for each in status["replicas"]:
        server = each["server"]
        models = [f"{name}:{','.join(versions)}" for name, versions in each["models"].items()]
        models += [f"{name} FAILED: {error}" for name, error in each["errors"].items()]
        place = f"{server['address']}:{server['http_port']}"
        state = "draining" if server["draining"] else "serving"
        cells = (each["key"], place, each["process_id"], f"{each['pending']:g}", each["restarts"])
        lines.append(row.format(*cells, state, " ".join(models)))
    lines += [f"a proxy does not start: {fault}" for fault in status["faults"]]
    return "\n".join(lines) + "\n"


def _application(options: argparse.Namespace, args: Mapping[str, Any]) -> dict[str, Any]:
    from gpubridge.ray.cluster import application_config  # noqa: PLC0415  (if used)

    resources = {"num_cpus": 0, "num_gpus": options.num_gpus}
    return application_config(args, options.replicas, options.max_replicas, resources)


def _up(application: Mapping[str, Any]) -> int:
    from gpubridge.ray.local_fleet import run_local_fleet  # noqa: PLC0415  (if used)

    return run_local_fleet(application, lambda text: print(text, flush=True))  # noqa: T201


def _local() -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    from gpubridge.ray.local_fleet import ask_fleet  # noqa: PLC0415  (if used)

    return ask_fleet


def _cluster(address: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    from gpubridge.ray.cluster import Fleet, connect  # noqa: PLC0415  (if used)

    connect(address)
    return Fleet().answer


def _expected(action: str) -> str:
    return "the name of a model" if action in ("load", "unload") else "no names"
