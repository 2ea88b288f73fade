"""Calls of a model over HTTP, with the binary protocol: arrays in and out."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from gpubridge.develop.arrays import decode_array, encode_array
from gpubridge.errors import BridgeError, unavailable

_HEADER = "Inference-Header-Content-Length"


def infer(
    address: str, path: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Post a request to ``HOST:PORT``; return its outputs, or raise BridgeError with the answer."""
    tensors, data = [], []
    for name, value in inputs.items():
        datatype, shape, encoded = encode_array(name, value, "numbers or strings")
        size = {"binary_data_size": len(encoded)}
        tensors.append({"name": name, "datatype": datatype, "shape": shape, "parameters": size})
        data.append(encoded)
    asked = {"inputs": tensors, "parameters": {"binary_data_output": True, **parameters}}
    head = json.dumps(asked).encode()
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("POST", path, b"".join([head, *data]), {_HEADER: str(len(head))})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise unavailable(f"the server at {address} did not answer: {error!r}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise BridgeError(json.loads(body)["error"])
    length = int(answer.headers.get(_HEADER, len(body)))
    return _decoded(json.loads(body[:length])["outputs"], memoryview(body)[length:])


def _decoded(outputs: Any, data: memoryview) -> dict[str, NDArray[Any]]:
    arrays = {}
    for output in outputs:
        size = output["parameters"]["binary_data_size"]
        mine, data = data[:size], data[size:]
        arrays[output["name"]] = decode_array(output["datatype"], output["shape"], mine)
    return arrays
