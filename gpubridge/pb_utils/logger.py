"""Logger of models: writes to the server's log, or to stderr outside of a server."""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar

from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import NamedEnum, text, wrong_type


class _LogLevel(NamedEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LogLevel.__module__ = "c_python_backend_utils"
_LogLevel.__name__ = "LogLevel"
_LogLevel.__qualname__ = "Logger.LogLevel"


def _emit(level: _LogLevel, message: Any) -> None:
    message = text(message, "message")
    # Two frames up: the model's own line, past the public method.
    frame = sys._getframe(2)
    filename, line = frame.f_code.co_filename, frame.f_lineno
    server = host.current()
    if server is not None:
        server.log(int(level), message, filename, line)
        return
    now = time.strftime("%H:%M:%S")
    sys.stderr.write(f"{level.name[0]} {now} {filename}:{line}] {message}\n")


class Logger:
    """Static methods only; each takes a str and raises TypeError for anything else."""

    __module__ = "c_python_backend_utils"

    LogLevel = _LogLevel
    INFO: ClassVar[_LogLevel] = _LogLevel.INFO
    WARNING: ClassVar[_LogLevel] = _LogLevel.WARNING
    ERROR: ClassVar[_LogLevel] = _LogLevel.ERROR
    VERBOSE: ClassVar[_LogLevel] = _LogLevel.VERBOSE

    def __init__(self) -> None:
        # As in Triton: there is one log, and no logger objects.
        raise TypeError("c_python_backend_utils.Logger: No constructor defined!")

    @staticmethod
    def log(message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        """Log at a level that the caller names."""
        if not isinstance(level, _LogLevel):
            raise wrong_type("level", "one of Logger's levels", level)
        _emit(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        """Log information for an operator."""
        _emit(_LogLevel.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log a warning."""
        _emit(_LogLevel.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        """Log a failure."""
        _emit(_LogLevel.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log details for debugging; shown with ``--log-verbose``."""
        _emit(_LogLevel.VERBOSE, message)
