"""A server under measurement as a child process: started, watched, stopped with all its stubs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubridge.errors import BridgeError, unavailable

if TYPE_CHECKING:
    from typing_extensions import Self

_STOP_SECONDS = 30.0
_LINES = 15


class ServerProcess:
    """A running server, with its output in ``log``; a context manager.

    Owns the process group that it starts; `close` ends all of it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._log = log
        self._environment = dict(os.environ if environment is None else environment)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The server's process; its stubs are its descendants."""
        if self._process is None:
            raise BridgeError(f"{self.name} is not running: enter it as a context manager first")
        return self._process.pid

    def check_alive(self) -> None:
        """Raise BridgeError with the server's last output if its process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise self._failure(f"ended with exit code {code}")

    def check_start(self, limit_seconds: float) -> None:
        """Raise BridgeError if the server has ended, or was started longer ago than the limit."""
        self.check_alive()
        if time.monotonic() - self._started > limit_seconds:
            raise self._failure(f"not ready after {limit_seconds:.0f} s")

    def close(self) -> None:
        """Stop the server as an operator would, then kill its group; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # To the server alone: it ends its stubs.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _failure(self, text: str) -> BridgeError:
        last = self._log.read_text(errors="replace").splitlines()[-_LINES:]
        return unavailable("\n".join([f"{self.name}: {text}; its log:", *last]))
