"""Services that the process of a model injects into this package.

The stub attaches one `Host` before it imports the model. Outside of a server there is none: logs go
to stderr, and functions that need a server raise TritonModelException.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Protocol, Union

from gpubridge.pb_utils.exceptions import TritonModelException

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from gpubridge.tensor.device_bytes import DeviceBytes, OrderingStream
    from gpubridge.transport.metric_board import CounterCell, HistogramCell

    Cell = Union[CounterCell, HistogramCell]


class LoopWaiter(Protocol):
    """Waits on an event loop; see `gpubridge.pb_utils.answers`."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return its loop."""

    def set(self) -> None:
        """Wake it to look again; any thread may, any number of times."""


class ResponseSource(Protocol):
    """Responses to one call of another model: instances of `InferenceResponse`.

    Any number of threads and coroutines may wait; one at a time takes a response. Dropping the source
    abandons the call.
    """

    @property
    def ready(self) -> bool:
        """Return whether :meth:`next` need not wait."""

    def wait(self) -> None:
        """Wait until it is ready."""

    def add_waiter(self, waiter: LoopWaiter, /) -> None:
        """Wake a waiter of the running event loop whenever something comes, and hold it until then.

        It must look at `ready` once more after this.
        """

    def remove_waiter(self, waiter: LoopWaiter, /) -> None:
        """Wake it no longer."""

    def next(self) -> Any:
        """Wait for the next response; None when there are no more."""

    def cancel(self) -> None:
        """Ask the called model to stop sending responses; does not wait."""

    def abandon(self) -> None:
        """Cancel the call and discard its responses; does not wait."""


class ModelCaller(Protocol):
    """Sends requests to other models."""

    def exec(self, request: Any, /) -> Any:
        """Send an `InferenceRequest` to a model that is not decoupled, and wait for its response."""

    def call(
        self,
        request: Any,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,
        /,
    ) -> ResponseSource:
        """Send an `InferenceRequest`: now, or with others of this turn of ``loop``, which runs."""


class MetricStore(Protocol):
    """Creates metric families and metrics for a model ``instance``."""

    instance: str

    def open_family(self, name: str, description: str, kind: str, /) -> int:
        """Make a family, or join the one of that name; returns its number. Raises BridgeError."""

    def open_metric(
        self, family: int, kind: str, labels: dict[str, str], buckets: list[float] | None, /
    ) -> Cell:
        """Make a metric, or join the one with these labels. Raises BridgeError."""

    def close_family(self, family: int, /) -> None:
        """Release a family and all its metrics; any thread, at any time; never raises."""


class DeviceMemory(Protocol):
    """The memory of the GPU that an instance is on. Any thread may call.

    Each method raises BridgeError where it fails: UNAVAILABLE where memory is short.
    """

    @property
    def ordinal(self) -> int:
        """The device's number in this process."""

    @property
    def stream(self) -> OrderingStream:
        """Stream that orders the import of a library's tensor."""

    @property
    def capacity(self) -> int:
        """Bytes of the instance's arena."""

    def allocate_device(self, nbytes: int) -> DeviceBytes:
        """Return writable, undefined bytes in the instance's arena."""

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Begin to copy host memory into the arena; `ready` tells when that is done.

        The copy keeps a reference to the memory, which must not change until then.
        """

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        """Fill a writable buffer of exactly ``data.nbytes``, in order; it is full on return."""

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        """Return a copy of bytes in the instance's arena, in order; `ready` tells when it is made."""

    def join(self, parts: Sequence[DeviceBytes]) -> DeviceBytes:
        """Return bytes one after another: a view where they lie so, else a copy in the arena."""


class Host(NamedTuple):
    """Services that a server injects into the process of a model.

    - ``model_dir``: the version directory, or a Python-based backend's model directory.
    - ``log``: takes level (a ``Logger.LogLevel`` number), message, file and line; must not raise.
    - ``caller``: sends requests to other models; None while the model may send none.
    - ``ask``: sends a control request to the server and waits for the answer; raises BridgeError.
    - ``device``: the memory of the GPU that the model's instance is on.
    - ``instance``: the model instance, for error texts.
    - ``record_span``: takes the fields of a span of a traced request; must not raise.
    """

    model_dir: str
    log: Callable[[int, str, str, int], None]
    caller: ModelCaller | None = None
    metrics: MetricStore | None = None
    ask: Callable[..., Any] | None = None
    device: DeviceMemory | None = None
    instance: str = ""
    record_span: Callable[[dict[str, Any]], None] | None = None


_host: Host | None = None


def attach(host: Host) -> None:
    """Set the process's host; the stub does so before it imports a model."""
    global _host  # noqa: PLW0603  (one process, one host)
    _host = host


def detach() -> None:
    """Remove the host; functions that need one then behave as outside of a server."""
    global _host  # noqa: PLW0603  (one process, one host)
    _host = None


def current() -> Host | None:
    """Return the host, or None outside of a server."""
    return _host


def device_memory() -> DeviceMemory:
    """Return this process's device memory, or raise TritonModelException where it has none."""
    if _host is None or _host.device is None:
        raise TritonModelException(
            "expected an instance on a GPU, got one without; give the model an instance_group of "
            "KIND_GPU"
        )
    return _host.device
