"""The figures of ``gpubridge top``, from a server's status document or from Triton's statistics."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gpubridge.errors import invalid, unavailable
from gpubridge.protocol.conditions import index_condition

_SCHEMA = 1
_SECONDS = 10.0
_MOST_BYTES = 256 << 20
_PARTS = {
    "request_us": "success", "queue_us": "queue", "input_us": "compute_input",
    "execute_us": "compute_infer", "output_us": "compute_output",
    "cache_us": "cache_hit",
}  # fmt: skip
"""Names of durations in the status document, and in Triton's statistics."""


class Trust(NamedTuple):
    """Files of certificates: of the authorities to trust (the system's without), and of this client."""

    authorities: str | None = None
    certificate: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the settings of TLS connections; raises BridgeError."""
        try:
            context = ssl.create_default_context(cafile=self.authorities)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            files = ", ".join(filter(None, self))
            raise invalid(
                f"--cacert, --cert and --key expect PEM files of certificates and of the key, got {files}: "
                f"{error}"
            ) from error
        return context


class StatusSource:
    """Reads documents of one server.

    - ``trust``: for ``https`` URLs.

    Attribute ``note``: what the server does not tell, if it has no status document.

    Raises BridgeError: INVALID_ARG for a URL of another form.
    """

    def __init__(self, url: str, headers: Mapping[str, str], trust: Trust = Trust()) -> None:  # noqa: B008  (it never changes)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or parts.path.strip("/"):
            raise invalid(f"top expects http://HOST:PORT or https://HOST:PORT, got {url!r}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.note = ""
        self._headers = dict(headers)
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_SECONDS, context=trust.context()
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)

    def read(self) -> dict[str, Any]:
        """Return a status document; made of Triton's statistics where the server has none.

        Raises BridgeError: UNAVAILABLE if the server does not answer as one.
        """
        status, body = self._ask("GET", "/v2/gpubridge/status")
        if status == 404:
            return self._of_statistics()
        self.note = ""
        document = self._parsed(status, body, "/v2/gpubridge/status")
        if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
            raise unavailable(
                f"{self.url} is a gpubridge whose status has another form: use the gpubridge top of "
                "its version"
            )
        return document

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _of_statistics(self) -> dict[str, Any]:
        server = self._parsed(*self._ask("GET", "/v2"), "/v2")
        index = self._parsed(*self._ask("POST", "/v2/repository/index"), "/v2/repository/index")
        told = self._parsed(*self._ask("GET", "/v2/models/stats"), "/v2/models/stats")
        try:
            ours = any(str(each).startswith("gpubridge(") for each in server["extensions"])
            why = (
                "its status is switched off (--allow-status-page=false)" if ours else "it is Triton"
            )
            self.note = f"{why}: no p50, p99, answer times, queues, instances, restarts, slower paths and errors"
            statistics = {(each["name"], each["version"]): each for each in told["model_stats"]}
            models = [_model(row, statistics) for row in index]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unavailable(f"{self.url} does not answer as Triton does: {error!r}") from error
        return {"time": time.monotonic(), "server": server, "models": models}

    def _parsed(self, status: int, body: bytes, path: str) -> Any:
        if status == 200:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                pass
        raise unavailable(
            f"{self.url} is no model server: {path} has status {status} {body[:200]!r}"
        )

    def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, headers=self._headers)
            response = self._connection.getresponse()
            body = response.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise unavailable(f"{self.url} does not answer: {reason}") from error
        return response.status, body


def _model(row: Mapping[str, Any], statistics: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Return a model of a status document, of a row of the index and Triton's statistics."""
    name, version = str(row["name"]), str(row.get("version", ""))
    made = {"name": name, "version": version, "reason": row.get("reason", "")}
    made["condition"] = index_condition(str(row.get("state", "")), made["reason"])
    told = statistics.get((name, version))
    if told is not None:
        sums = told["inference_stats"]
        made["statistics"] = {
            "success": sums["success"]["count"],
            "failures": {"": sums["fail"]["count"]},
            "batch_sizes": [
                (each["batch_size"], each["compute_infer"]["count"])
                for each in told.get("batch_stats", ())
            ],
            **{a: sums[b]["ns"] / 1000 for a, b in _PARTS.items() if b in sums},
        }
    return made


def read_headers(entries: list[str]) -> dict[str, str]:
    """Parse ``NAME:VALUE`` headers; raises INVALID_ARG."""
    headers = {}
    for entry in entries:
        name, colon, value = entry.partition(":")
        if not colon or not name.strip() or not entry.isprintable():
            raise invalid(f"--header expects NAME:VALUE, got {entry!r}")
        headers[name.strip()] = value.strip()
    return headers
