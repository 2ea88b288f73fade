"""Stop requests to the server's process, and the file that names its addresses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpubridge.errors import unavailable

_logger = logging.getLogger(__name__)


class StopRequests:
    """SIGTERM, SIGINT and, where ``parent`` is given, the end of that parent process.

    Made within the event loop, once for a process. Raises BridgeError: the parent process cannot be
    watched.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._event = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._event.set)
        if parent is not None:
            self._watch(parent)

    @property
    def made(self) -> bool:
        """Return whether the server has been asked to stop."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until the server is asked to stop."""
        await self._event.wait()

    async def delay(self, seconds: float) -> None:
        """Wait after a request to stop, at most until the next one."""
        _logger.info("not ready; serving for %g s more", seconds)
        self._event.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        self._event.set()

    def _watch(self, parent: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(parent)
        except OSError as error:
            if os.getppid() != parent:
                self._parent_ended(parent)
                return
            raise unavailable(
                f"--exit-with-parent cannot watch the parent process {parent}: {error.strerror}; "
                "it needs Linux 5.3 and a parent in the same PID namespace"
            ) from error

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._parent_ended(parent)

        loop.add_reader(descriptor, ended)
        if os.getppid() != parent:
            # It ended before, and its number may be another process's.
            ended()

    def _parent_ended(self, parent: int) -> None:
        _logger.info("the parent process %d has ended", parent)
        self._event.set()


@contextlib.contextmanager
def ports_file(path: Path | None, addresses: Mapping[str, tuple[str, int]]) -> Iterator[None]:
    """Name the process and its addresses in a JSON file for as long as the block runs.

    For programs that start a server: readers see the whole file or none. A file that another server
    has written meanwhile stays.

    Raises BridgeError: the file cannot be written.
    """
    if path is None:
        yield
        return
    named = {name: {"address": host, "port": port} for name, (host, port) in addresses.items()}
    with _new_file(path) as new:
        new.write_text(json.dumps({"pid": os.getpid(), **named}) + "\n")
        new.replace(path)
    try:
        yield
    finally:
        if _writer(path) == os.getpid():
            path.unlink(missing_ok=True)


def clear_ports_file(path: Path | None) -> None:
    """Remove the file of a server that has ended, so that none is found before this one is ready.

    Raises BridgeError: a file cannot be written there.
    """
    if path is None:
        return
    writer = _writer(path)
    if writer is None or not Path(f"/proc/{writer}").exists():
        with _new_file(path) as new:
            new.touch()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a name beside a ports file; what the block leaves there is removed."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
    except OSError as error:
        raise unavailable(f"--ports-file cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def _writer(path: Path) -> int | None:
    """Return the process that wrote a ports file, or None."""
    try:
        written = json.loads(path.read_bytes())
        return int(written["pid"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
