"""Services that the process which runs a model injects into this package.

The stub attaches one `Host` before it imports the model. Outside of a server there is none: logs go
to stderr, and what only a server can do says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpubridge.pb_utils.calls import ModelCaller
    from gpubridge.pb_utils.device_memory import DeviceMemory
    from gpubridge.pb_utils.metrics import MetricStore


class Host(NamedTuple):
    """Services that a server injects.

    - ``model_dir``: the version directory, or a Python-based backend's model directory.
    - ``log``: takes level (a ``Logger.LogLevel`` number), message, file and line; must not raise.
    - ``caller``: sends requests to other models, while the model may.
    - ``ask``: asks the server something and waits for the answer; raises BridgeError.
    - ``device``: the memory of the GPU that the model's instance is on.
    - ``instance``: the model instance, for error texts.
    """

    model_dir: str
    log: Callable[[int, str, str, int], None]
    caller: ModelCaller | None = None
    metrics: MetricStore | None = None
    ask: Callable[..., Any] | None = None
    device: DeviceMemory | None = None
    instance: str = ""


_host: Host | None = None


def attach(host: Host) -> None:
    """Set the process's host; done once, by the stub, before a model is imported."""
    global _host  # noqa: PLW0603  (one process, one host)
    _host = host


def detach() -> None:
    """Forget the host; what needs one then behaves as outside of a server."""
    global _host  # noqa: PLW0603  (one process, one host)
    _host = None


def current() -> Host | None:
    """Give the host, or None outside of a server."""
    return _host
