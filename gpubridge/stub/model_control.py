"""The model's wishes to load, unload and ask after models, on their way to the server."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpubridge.stub.bls_client import BlsClient


class ModelControl:
    """Asks the server, and waits for what it says.

    - ``calls``: speaks with the server.
    - ``instance``: the model instance's name.
    """

    def __init__(self, calls: BlsClient, instance: str) -> None:
        self.instance = instance
        self._calls = calls

    def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model; raises BridgeError with the server's reason when it does not."""
        if not files:
            self._calls.ask("load", model=name, config=config)
            return
        # Their bytes in memory that goes along: a message is not made for files.
        fd = os.memfd_create("gpubridge-files", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as memory:
                memory.writelines(files.values())
            sizes = [[path, len(content)] for path, content in files.items()]
            self._calls.ask("load", (fd,), model=name, config=config, files=sizes)
        finally:
            os.close(fd)

    def unload(self, name: str, dependents: bool) -> None:
        """Unload a model; raises BridgeError with the server's reason when it does not."""
        self._calls.ask("unload", model=name, dependents=dependents)

    def is_ready(self, name: str, version: str) -> bool:
        """Tell whether a model is ready; raises BridgeError for a version that is none."""
        question = self._calls.ask("ready", model=name, version=version)
        return bool(question.answer["ready"])
