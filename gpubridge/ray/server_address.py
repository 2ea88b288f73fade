"""Where a server of a fleet is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The endpoints of a server; ``draining``: whether it gets no new requests."""

    address: str
    http_port: int
    grpc_port: int
    metrics_port: int
    draining: bool = False
