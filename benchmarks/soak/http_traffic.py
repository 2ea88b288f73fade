"""Clients over HTTP: they ask, and some hang up before they are answered."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.soak.known_requests import (
    Array,
    KnownRequest,
    RequestSource,
    parsed,
    serialized,
    texts_array,
)
from benchmarks.soak.request_log import Outcome, RequestLog

__all__ = ["ask_over_http", "hang_up"]

_ANSWER_SECONDS = 60.0


def ask_over_http(
    log: RequestLog,
    kind: str,
    model: str,
    source: RequestSource,
    port: int,
    running: Callable[[], bool],
) -> None:
    """Ask a model on one connection, checking each answer, while ``running``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    while running():
        request = source.ask()
        body, headers = _request(request)
        sent = log.send(kind)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            response = connection.getresponse()
            content = response.read()
            size = int(response.headers.get("Inference-Header-Content-Length", len(content)))
            answer = json.loads(content[:size])
        except (OSError, http.client.HTTPException, ValueError) as error:
            sent.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
            source.failed()
            connection.close()
            continue
        if response.status != 200:
            sent.fail(answer["error"])
            source.failed()
            continue
        (output,) = answer["outputs"]
        values = _values(output, content[size:], request)
        if not request.is_answered(answer.get("id", ""), output["shape"], values):
            log.fault(f"{kind}: wrong answer {content[:300]!r}")
        sent.close(Outcome.ANSWERED)
    connection.close()


def _request(request: KnownRequest) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request."""
    parameters = dict(request.parameters)
    following = b""
    inputs = []
    for name, datatype, values in request.inputs:
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": values.shape}
        if request.binary:
            content = serialized(values)
            entry["parameters"] = {"binary_data_size": len(content)}
            following += content
        elif datatype == "BYTES":
            entry["data"] = [text.decode() for text in values.flat]
        else:
            entry["data"] = values.tolist()
        inputs.append(entry)
    if request.binary:
        parameters["binary_data_output"] = True
    document = {"id": request.id, "inputs": inputs, "parameters": parameters}
    header = json.dumps(document).encode()
    if not request.binary:
        return header, {}
    return header + following, {"Inference-Header-Content-Length": str(len(header))}


def _values(output: dict[str, Any], binary: bytes, request: KnownRequest) -> Array:
    """Return the values of an output, in one dimension."""
    if request.binary:
        return parsed(output["datatype"], binary)
    if output["datatype"] == "BYTES":
        return texts_array([text.encode() for text in output["data"]])
    return np.array(output["data"], request.expected.dtype)


def hang_up(log: RequestLog, kind: str, port: int, running: Callable[[], bool]) -> None:
    """Send requests that take long, and go away before, or just when, they are answered."""
    chance = random.Random(kind)  # noqa: S311
    tensor = {"name": "COUNT", "datatype": "FP32", "shape": [1], "data": [60]}
    body = json.dumps({"inputs": [tensor]})
    while running():
        sent = log.send(kind)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("POST", "/v2/models/patient/infer", body)
            time.sleep(chance.random() * 0.07)
        except OSError as error:
            sent.close(Outcome.FAILED, f"{type(error).__name__}: {error}")
        else:
            sent.close(Outcome.HUNG_UP)
        connection.close()
