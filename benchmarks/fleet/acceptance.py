"""A server behind the fleet's proxy beside the same server without it, and beside plain Ray Serve.

Ray listens on all interfaces: each side runs in namespaces of its own, with its load.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.client import Client
from benchmarks.proc import cpu_seconds
from benchmarks.traffic import Traffic, binary_request, grpc_request
from gpubridge.bench.processes import process_tree
from gpubridge.errors import BridgeError
from gpubridge.ray.local_fleet import (
    ENVIRONMENT,
    LOCAL_RAY,
    UNSHARE,
    raise_loopback,
    require_namespaces,
)

HTTP, GRPC, METRICS = 8000, 8001, 8002
_SERVED = Path(__file__).parents[1] / "models" / "served"
_WARM_UP_SECONDS = 1
_SIDE_SECONDS = 600
_HAPROXY_MODE = ("RAY_SERVE_ENABLE_HA_PROXY", "1")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: ``value`` of a round's figures has to be at least or at most ``bound``."""

    name: str
    value: Callable[[Mapping[str, Any]], float]
    bound: float
    at_least: bool = True

    def holds(self, value: float) -> bool:
        """Return whether a value keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


def _ratio(load: str, one: str, other: str, figure: str = "rate") -> Callable[[Any], float]:
    return lambda seen: float(seen[f"{one}, {load}"][figure] / seen[f"{other}, {load}"][figure])


ROWS = (
    Row("proxy / direct, HTTP 16", _ratio("HTTP 16", "proxy", "direct"), 0.8),
    Row(
        "proxy p50 minus direct, HTTP 1, µs",
        lambda seen: seen["proxy, HTTP 1"]["p50_us"] - seen["direct, HTTP 1"]["p50_us"],
        100,
        at_least=False,
    ),
    Row("proxy / direct, gRPC 16", _ratio("gRPC 16", "proxy", "direct"), 0.8),
    Row("proxy / direct, gRPC 600 KB 4", _ratio("gRPC 600 KB 4", "proxy", "direct"), 0.5),
    Row("proxy / plain Ray Serve, HTTP 16", _ratio("HTTP 16", "proxy", "Serve"), 20),
    Row(
        "proxy / plain Ray Serve in HAProxy mode, HTTP 16",
        _ratio("HTTP 16", "proxy", "Serve, HAProxy mode"),
        2.5,
    ),
    Row(
        "proxy / plain Ray Serve in HAProxy mode, gRPC 16",
        _ratio("gRPC 16", "proxy", "Serve, HAProxy mode"),
        2.5,
    ),
    *(
        Row(
            f"server's CPU time, proxy / direct, {load}",
            _ratio(load, "proxy", "direct", "server_us"),
            1.2,
            at_least=False,
        )
        for load in ("gRPC 16", "gRPC 64")
    ),
)


def loads() -> dict[str, tuple[Traffic, int]]:
    """Return requests and the number of connections, by name."""
    values = np.arange(16, dtype=np.float32)
    inputs = {"INPUT0": values, "INPUT1": np.full(16, 0.5, np.float32)}
    small = Traffic([binary_request("add_sub", inputs, ["OUTPUT0", "OUTPUT1"])], ("add_sub",))
    path = "/inference.GRPCInferenceService/ModelInfer"
    calls = Traffic([grpc_request("add_sub", inputs)], ("add_sub",), path)
    large = grpc_request("identity_fp32", {"INPUT0": np.arange(150_000, dtype=np.float32)})
    return {
        "HTTP 1": (small, 1),
        "HTTP 16": (small, 16),
        "gRPC 16": (calls, 16),
        "gRPC 64": (calls, 64),
        "gRPC 600 KB 4": (Traffic([large], ("identity_fp32",), path), 4),
    }


def accept(rounds: int, seconds: int) -> dict[str, Any]:
    """Return the table's rows, and the figures that they are made from; each round starts all sides."""
    require_namespaces()
    samples: list[dict[str, Any]] = []
    for number in range(rounds):
        seen: dict[str, Any] = {}
        for side in _SIDES:
            print(f"round {number + 1}: {side} ...", file=sys.stderr, flush=True)
            seen |= _run_apart(side, seconds)
        samples.append(seen)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "rows": judged_rows(samples),
        "figures": _figures(samples),
    }


def judged_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each row with the middle of its rounds; ``samples`` has each round's figures by name."""
    rows = []
    for row in ROWS:
        values = sorted(row.value(seen) for seen in samples)
        middle = statistics.median(values)
        rows.append(
            {
                "row": row.name,
                "bound": f"{'≥' if row.at_least else '≤'} {row.bound:g}",
                "seen": f"{middle:.3g}",
                "rounds": f"{values[0]:.3g} to {values[-1]:.3g}",
                "holds": "yes" if row.holds(middle) else "**no**",
            }
        )
    return rows


def _figures(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def middle(name: str, figure: str) -> Any:
        values = [seen[name][figure] for seen in samples if figure in seen[name]]
        return round(statistics.median(values)) if values else "–"

    return [
        {
            "path and load": name,
            "requests/s": middle(name, "rate"),
            "p50 µs": middle(name, "p50_us"),
            "p99 µs": middle(name, "p99_us"),
            "CPU µs, server": middle(name, "server_us"),
            "CPU µs, HAProxy": middle(name, "proxy_us"),
            "CPU µs, all of Ray": middle(name, "all_us"),
        }
        for name in samples[0]
    ]


def _run_apart(side: str, seconds: int) -> dict[str, Any]:
    """Run one side in namespaces that end with it."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="gpb") as folder:
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": folder}
        if side == "serve-haproxy":
            environment |= dict([_HAPROXY_MODE])
            environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = f"{folder}/haproxy.cfg"
            environment["RAY_SERVE_HAPROXY_SOCKET_PATH"] = f"{folder}/admin.sock"
            environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = folder
            environment["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = f"{folder}/state"
        # Compiled here, where the program stays.
        Client(Path(folder))
        answer = Path(folder) / "figures.json"
        command = [*UNSHARE, sys.executable, "-m", __spec__.name, side, str(seconds), str(answer)]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SIDE_SECONDS,
            check=False,
        )
        if done.returncode or not answer.exists():
            raise BridgeError(f"{side}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        figures: dict[str, Any] = json.loads(answer.read_text())
        return figures


def main(side: str, seconds: int, answer: Path) -> None:
    """Measure one side within its namespaces."""
    raise_loopback()
    import ray  # noqa: PLC0415  (reads the environment)

    ray.init(**LOCAL_RAY)
    with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder:
        client = Client(Path(folder))
        answer.write_text(json.dumps(_SIDES[side](client, seconds, Path(folder))))
    # The namespace of processes ends with this one.
    os._exit(0)


def _measure_fleet(client: Client, seconds: int, folder: Path) -> dict[str, Any]:
    from ray import serve  # noqa: PLC0415  (reads the environment)

    from gpubridge.ray.cluster import Fleet, application_config  # noqa: PLC0415

    for model in ("add_sub", "identity_fp32"):
        shutil.copytree(_SERVED / model, folder / "models" / model)
    ports = {"http_port": HTTP, "grpc_port": GRPC, "metrics_port": METRICS}
    args = {"model_repository": [str(folder / "models")], "threads": 1, **ports}
    serve.start(proxy_location="Disabled")
    fleet = Fleet()
    fleet.deploy(application_config(args, 1, 0, {"num_cpus": 0}), lambda _: None)
    (replica,) = fleet.status()["replicas"]
    own = replica["server"]
    counted = {"server_us": [replica["process_id"]], "proxy_us": _named("haproxy")}
    sides = {
        "direct": (own["http_port"], own["grpc_port"], {"server_us": counted["server_us"]}),
        "proxy": (HTTP, GRPC, counted),
    }
    figures = {}
    for name, (traffic, connections) in loads().items():
        for side, (http, grpc, processes) in sides.items():
            port = grpc if traffic.path else http
            figures[f"{side}, {name}"] = _load(
                client, traffic, port, connections, seconds, processes
            )
    return figures


def _measure_serve(client: Client, seconds: int, folder: Path) -> dict[str, Any]:
    from benchmarks.fleet import plain_serve  # noqa: PLC0415  (needs tritonclient)

    del folder
    plain_serve.start(HTTP, GRPC)
    name = "Serve, HAProxy mode" if os.environ.get(_HAPROXY_MODE[0]) else "Serve"
    figures = {}
    for load in ("HTTP 16", "gRPC 16"):
        traffic, connections = loads()[load]
        port = GRPC if traffic.path else HTTP
        processes = {"all_us": [1]}
        figures[f"{name}, {load}"] = _load(client, traffic, port, connections, seconds, processes)
    return figures


_SIDES: Mapping[str, Callable[[Client, int, Path], dict[str, Any]]] = {
    "fleet": _measure_fleet,
    "serve": _measure_serve,
    "serve-haproxy": _measure_serve,
}


def _load(
    client: Client,
    traffic: Traffic,
    port: int,
    connections: int,
    seconds: int,
    processes: Mapping[str, Sequence[int]],
) -> dict[str, float]:
    """Load a port; ``processes`` are those whose CPU time for a request is wanted."""
    client.run(traffic, port, connections, _WARM_UP_SECONDS)
    before = _spent(processes)
    seen = client.run(traffic, port, connections, seconds)
    spent = _spent(processes)
    if seen.failed:
        raise BridgeError(f"port {port}: {seen.failed} requests failed")
    cpu = {name: (spent[name] - before[name]) / seen.requests * 1e6 for name in processes}
    return {
        "rate": seen.requests_per_second,
        "p50_us": seen.p50_us,
        "p99_us": seen.p99_us,
        **cpu,
    }


def _spent(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_seconds, pids)) for name, pids in processes.items()}


def _named(program: str) -> list[int]:
    found = []
    for pid in process_tree(1):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
        if Path(line).name == program:
            found.append(pid)
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
