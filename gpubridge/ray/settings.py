"""The checked arguments of a fleet's Serve application."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpubridge.errors import invalid, unavailable

_NODES = ("all", "head", "none")
_OWN_FLAGS = (
    "address",
    "port",
    "exit-with-parent",
    "ports-file",
    "model-control-mode",
    "load-model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The arguments of the application.

    - ``model_repository``: one or several directories, the same on each node.
    - ``flags``: of each server.
    - ``proxies``: ``all`` nodes, the ``head`` or ``none`` has proxies.
    - ``proxies_per_node``: more than one share the ports of a node: others go on if one ends.
    - ``address``: of servers and proxies; the node's if empty.
    - ``retry_bytes``, ``threads``, ``connections``: see `gpubridge.ray.haproxy_config.ProxyConfig`.
    - ``most_replicas``: that a proxy can have.
    - ``socket_folder``: where proxies listen on sockets, too: for this machine's other networks.
    """

    model_repository: tuple[str, ...]
    flags: tuple[str, ...] = ()
    proxies: str = "all"
    proxies_per_node: int = 1
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = ""
    retry_bytes: int = 65_536
    threads: int = 2
    connections: int = 10_000
    most_replicas: int = 64
    socket_folder: str = ""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> FleetSettings:
        """Check arguments; raises BridgeError with the one that is wrong."""
        known = {each.name: each for each in fields(cls)}
        if unknown := args.keys() - known.keys():
            names = ", ".join(sorted(known))
            raise invalid(
                f"unknown argument {min(unknown)!r} of the fleet; expected some of {names}"
            )
        if not args.get("model_repository"):
            raise invalid(
                "the fleet needs the argument model_repository, a directory or a list of them"
            )
        values: dict[str, Any] = {
            name: _words(name, value) if name in ("model_repository", "flags") else value
            for name, value in args.items()
        }
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise BridgeError if a value is wrong."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and (type(value) is not int or value < 1):
                raise invalid(f"{each.name} expects an integer of at least 1, got {value!r}")
        if self.proxies not in _NODES:
            raise invalid(f"proxies expects one of {', '.join(_NODES)}, got {self.proxies!r}")
        ports = (self.http_port, self.grpc_port, self.metrics_port)
        if len(set(ports)) < len(ports) or max(ports) > 65_535:
            raise invalid(f"expected three ports below 65536, got {', '.join(map(str, ports))}")
        if self.retry_bytes < 16_384:
            raise invalid(f"retry_bytes expects at least 16384, got {self.retry_bytes}")
        for word in self.flags:
            name = word.partition("=")[0]
            if name.endswith(tuple(f"-{own}" for own in _OWN_FLAGS)):
                raise invalid(f"the fleet sets {name} itself; remove it from flags")


def require_ray() -> None:
    """Raise BridgeError if Ray Serve is not installed."""
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise unavailable(
            f"a fleet needs Ray Serve ({error}): pip install 'gpubridge[ray]'"
        ) from error


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise invalid(f"{name} expects a text or a list of texts, got {value!r}")
    return tuple(words)
