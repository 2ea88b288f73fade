"""Clients over HTTP: they ask for sums, and some hang up before they are answered."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable

from benchmarks.soak.ledger import Ledger, Outcome

__all__ = ["ask_for_sums", "hang_up"]

_ANSWER_SECONDS = 60.0
_SMALL, _LARGE = 16, 8_000
_LARGE_SHARE = 0.05


def ask_for_sums(
    ledger: Ledger, kind: str, model: str, twice: bool, port: int, running: Callable[[], bool]
) -> None:
    """Ask a model for A + B (or A + 2 B) on one connection, checking each answer, while ``running``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    chance = random.Random(f"{kind} {time.monotonic_ns()}")  # noqa: S311  (no secret)
    while running():
        size = _LARGE if chance.random() < _LARGE_SHARE else _SMALL
        first, second = chance.randrange(1000), chance.randrange(1000)
        ticket = ledger.send(kind)
        body = _request(size, first, second)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", body)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            ticket.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
            connection.close()
            continue
        if response.status != 200:
            ticket.close(Outcome.FAILED, answer["error"])
            continue
        expected = [float(first + (2 if twice else 1) * second)] * size
        if answer["outputs"][0]["data"] != expected:
            ledger.fault(f"{kind}: wrong answer {answer['outputs'][0]['data'][:4]}")
        ticket.close(Outcome.ANSWERED)
    connection.close()


def hang_up(ledger: Ledger, kind: str, port: int, running: Callable[[], bool]) -> None:
    """Send requests that take long, and go away before, or just when, they are answered."""
    chance = random.Random(kind)  # noqa: S311
    tensor = {"name": "COUNT", "datatype": "FP32", "shape": [1], "data": [60]}
    body = json.dumps({"inputs": [tensor]})
    while running():
        ticket = ledger.send(kind)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("POST", "/v2/models/patient/infer", body)
            time.sleep(chance.random() * 0.07)
        except OSError as error:
            ticket.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
        else:
            ticket.close(Outcome.HUNG_UP)
        connection.close()


def _request(size: int, first: int, second: int) -> str:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [size], "data": [value] * size}
        for name, value in (("A", first), ("B", second))
    ]
    return json.dumps({"inputs": tensors})
