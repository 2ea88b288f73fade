"""A proxy before servers of a test, and its addresses."""

import contextlib
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from gpubridge.ray.haproxy_config import ProxyConfig
from gpubridge.ray.model_classes import model_classes
from gpubridge.ray.proxy import Proxy
from gpubridge.ray.server_address import ServerAddress
from gpubridge.ray.server_client import loaded_models, model_config


def free_ports(count):
    """Return free ports of loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Fleet:
    """A proxy with servers by slot; ``http_url``, ``grpc_url`` and ``metrics_url`` are the proxy's."""

    def __init__(self, proxy):
        self.proxy = proxy
        config = proxy.config
        self.http_url = f"127.0.0.1:{config.http_port}"
        self.grpc_url = f"127.0.0.1:{config.grpc_port}"
        self.metrics_url = f"127.0.0.1:{config.metrics_port}"
        self.servers = {}
        self.classes = {}

    def add(self, slot, server):
        """Put a server of `running_server` into a slot."""
        ports = [
            int(url.rpartition(":")[2])
            for url in (server.http_url, server.grpc_url, server.metrics_url)
        ]
        address = ServerAddress("127.0.0.1", *ports)
        self.servers[slot] = address
        configs = {
            name: model_config("127.0.0.1", address.http_port, name)
            for name in loaded_models("127.0.0.1", address.http_port)
        }
        self.classes |= model_classes(configs)
        self.apply()

    def drain(self, slot):
        """Send no new requests to a server."""
        self.servers[slot] = replace(self.servers[slot], draining=True)
        self.apply()

    def remove(self, slot):
        """Take a server out."""
        del self.servers[slot]
        self.apply()

    def apply(self):
        self.proxy.apply(self.servers, self.classes)


@contextlib.contextmanager
def running_fleet(**settings):
    """A proxy without servers."""
    # A socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="gpb"))
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    config = ProxyConfig(
        address="127.0.0.1",
        folder=folder,
        slots=4,
        threads=1,
        check_milliseconds=100,
        **ports,
        **settings,
    )
    try:
        proxy = Proxy(config)
        try:
            yield Fleet(proxy)
        finally:
            proxy.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
