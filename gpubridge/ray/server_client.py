"""Requests to one server of a fleet over HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote

_LOAD_SECONDS = 3600.0
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_PENDING, _RESTARTS = "gpubridge_open_requests", "gpubridge_stub_restarts_total"


def request(
    address: str, port: int, method: str, path: str, *, seconds: float = 10.0
) -> tuple[int, Any]:
    """Send a request without a body; return the status and the JSON of the answer.

    A server that gives no answer has the status 503.
    """
    connection = http.client.HTTPConnection(address, port, timeout=seconds)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 503, {"error": f"{address}:{port} gives no answer: {error}"}
    finally:
        connection.close()


def control_model(address: str, port: int, name: str, action: str) -> str:
    """``load`` or ``unload`` a model; return the error, empty if there is none."""
    path = f"/v2/repository/models/{quote(name, safe='')}/{action}"
    status, answer = request(address, port, "POST", path, seconds=_LOAD_SECONDS)
    return "" if status == 200 else str(answer.get("error", f"status {status}"))


def loaded_models(address: str, port: int) -> dict[str, tuple[str, ...]]:
    """Return the ready versions of each model."""
    status, rows = request(address, port, "POST", "/v2/repository/index")
    versions: dict[str, tuple[str, ...]] = {}
    for row in rows if status == 200 else ():
        if row.get("state") == "READY":
            versions[row["name"]] = (*versions.get(row["name"], ()), str(row.get("version", "")))
    return versions


def model_config(address: str, port: int, name: str) -> dict[str, Any] | None:
    """Return a loaded model's configuration; None if the server gives none."""
    status, config = request(address, port, "GET", f"/v2/models/{quote(name, safe='')}/config")
    return config if status == 200 else None


def executing_seconds(address: str, port: int) -> dict[str, float]:
    """Return for how long each model has executed, all its instances together."""
    status, answer = request(address, port, "GET", "/v2/models/stats")
    seconds: dict[str, float] = {}
    for row in answer["model_stats"] if status == 200 else ():
        parts = [batch[part]["ns"] for batch in row.get("batch_stats", ()) for part in _COMPUTE]
        seconds[row["name"]] = seconds.get(row["name"], 0.0) + sum(map(int, parts)) / 1e9
    return seconds


def pending_and_restarts(address: str, port: int) -> tuple[float, int]:
    """Return how many requests of all models have no last response, and how often stubs were started again.

    Raises OSError: the server gives no answer at this port, that of its metrics.
    """
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    pending, restarts = (
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        for name in (_PENDING, _RESTARTS)
    )
    return pending, int(restarts)
