"""Clients over HTTP: they ask for sums, and some hang up before they are answered."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.soak.ledger import Ledger, Outcome

__all__ = ["ask_for_sums", "hang_up"]

_ANSWER_SECONDS = 60.0
_LARGEST_SMALL, _LARGEST = 2_000, 40_000
_LARGE_SHARE = 0.05


def ask_for_sums(
    ledger: Ledger, kind: str, model: str, twice: bool, port: int, running: Callable[[], bool]
) -> None:
    """Ask a model for A + B (or A + 2 B) on one connection, checking each answer, while ``running``.

    Each request has an id, a shape and values of its own; half of them carry binary data.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    chance = random.Random(f"{kind} {time.monotonic_ns()}")  # noqa: S311  (no secret)
    while running():
        question = _Question(chance)
        ticket = ledger.send(kind)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", question.body, question.headers)
            response = connection.getresponse()
            body = response.read()
            header = int(response.headers.get("Inference-Header-Content-Length", len(body)))
            answer = json.loads(body[:header])
        except (OSError, http.client.HTTPException, ValueError) as error:
            ticket.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
            connection.close()
            continue
        if response.status != 200:
            ticket.close(Outcome.FAILED, answer["error"])
            continue
        expected = question.first + (2 if twice else 1) * question.second
        if not question.is_answered(answer, body[header:], expected):
            ledger.fault(f"{kind}: wrong answer {body[:300]!r}")
        ticket.close(Outcome.ANSWERED)
    connection.close()


class _Question:
    """A request for a sum: its bytes, and what the answer has to be."""

    def __init__(self, chance: random.Random) -> None:
        large = chance.random() < _LARGE_SHARE
        size = chance.randrange(1, _LARGEST if large else _LARGEST_SMALL)
        start = chance.randrange(-1000, 1000)
        # Small integers, so that every sum is exact.
        self.first = np.arange(start, start + size, dtype=np.float32)
        self.second = np.full(size, chance.randrange(1000), np.float32)
        self.id = f"{chance.getrandbits(64):x}"
        self._binary = chance.random() < 0.5
        document: dict[str, Any] = {
            "id": self.id,
            "inputs": [self._tensor("A", self.first), self._tensor("B", self.second)],
        }
        if self._binary:
            document["parameters"] = {"binary_data_output": True}
        self.body = json.dumps(document).encode()
        self.headers = {}
        if self._binary:
            self.headers["Inference-Header-Content-Length"] = str(len(self.body))
            self.body += self.first.tobytes() + self.second.tobytes()

    def _tensor(self, name: str, values: np.ndarray[Any, Any]) -> dict[str, Any]:
        data = {"parameters": {"binary_data_size": values.nbytes}}
        return {
            "name": name,
            "datatype": "FP32",
            "shape": [values.size],
            **(data if self._binary else {"data": values.tolist()}),
        }

    def is_answered(
        self, answer: dict[str, Any], binary: bytes, expected: np.ndarray[Any, Any]
    ) -> bool:
        """Tell whether an answer is this request's: its id, its shape, its values."""
        output = answer["outputs"][0]
        if self._binary:
            values = np.frombuffer(binary, np.float32)
        else:
            values = np.array(output["data"], np.float32)
        return (
            answer.get("id") == self.id
            and output["shape"] == [expected.size]
            and np.array_equal(values, expected)
        )


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
