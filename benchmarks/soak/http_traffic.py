"""Clients over HTTP: they ask, and some hang up before they are answered."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.soak.ledger import Ledger, Outcome
from benchmarks.soak.questions import (
    Array,
    Question,
    Questions,
    parsed,
    serialized,
    texts_array,
)

__all__ = ["ask_over_http", "hang_up"]

_ANSWER_SECONDS = 60.0


def ask_over_http(
    ledger: Ledger,
    kind: str,
    model: str,
    questions: Questions,
    port: int,
    running: Callable[[], bool],
) -> None:
    """Ask a model on one connection, checking each answer, while ``running``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    while running():
        question = questions.ask()
        body, headers = _request(question)
        ticket = ledger.send(kind)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            response = connection.getresponse()
            content = response.read()
            size = int(response.headers.get("Inference-Header-Content-Length", len(content)))
            answer = json.loads(content[:size])
        except (OSError, http.client.HTTPException, ValueError) as error:
            ticket.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
            questions.failed()
            connection.close()
            continue
        if response.status != 200:
            ticket.fail(answer["error"])
            questions.failed()
            continue
        (output,) = answer["outputs"]
        values = _values(output, content[size:], question)
        if not question.is_answered(answer.get("id", ""), output["shape"], values):
            ledger.fault(f"{kind}: wrong answer {content[:300]!r}")
        ticket.close(Outcome.ANSWERED)
    connection.close()


def _request(question: Question) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request."""
    parameters = dict(question.parameters)
    following = b""
    inputs = []
    for name, datatype, values in question.inputs:
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": values.shape}
        if question.binary:
            content = serialized(values)
            entry["parameters"] = {"binary_data_size": len(content)}
            following += content
        elif datatype == "BYTES":
            entry["data"] = [text.decode() for text in values.flat]
        else:
            entry["data"] = values.tolist()
        inputs.append(entry)
    if question.binary:
        parameters["binary_data_output"] = True
    document = {"id": question.id, "inputs": inputs, "parameters": parameters}
    header = json.dumps(document).encode()
    if not question.binary:
        return header, {}
    return header + following, {"Inference-Header-Content-Length": str(len(header))}


def _values(output: dict[str, Any], binary: bytes, question: Question) -> Array:
    """Return the values of an output, in one dimension."""
    if question.binary:
        return parsed(output["datatype"], binary)
    if output["datatype"] == "BYTES":
        return texts_array([text.encode() for text in output["data"]])
    return np.array(output["data"], question.expected.dtype)


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
