"""The server's log: lines of the server and of the models, in Triton's forms or as JSON.

``default``  ``I1121 03:30:00.123456 4711 file.py:12] text``: severity and date, time, process, place;
``ISO8601``  ``2026-11-21T03:30:00Z I 4711 file.py:12] text``;
``json``     one object per line.

Lines of models begin with their instance, ``[m_0_0]``; the place of printed lines is ``stdout`` or
``stderr``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar

from gpubridge.errors import BridgeError, InternalError, NoMemory, invalid
from gpubridge.flags import boolean, check_flags, flag

VERBOSE = logging.DEBUG
LOG_FORMATS = ("default", "ISO8601", "json")
_LETTERS = {logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", VERBOSE: "V"}
_NAMES = {logging.INFO: "info", logging.WARNING: "warning", VERBOSE: "verbose"}

# The numbers of pb_utils.Logger's levels.
_STUB_LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: VERBOSE}
_model_logger = logging.getLogger("gpubridge.model")
_logger = logging.getLogger(__name__)


def _verbose_level(text: str) -> int:
    """Parse a level or a boolean as Triton does, for argparse."""
    return int(text) if text.lstrip("-").isdecimal() else int(boolean(text))


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of logging: levels, target and format."""

    flag_prefix: ClassVar[str] = "log-"
    flag_group: ClassVar[str] = "Logging"

    file: str = flag("", "file for log lines instead of the console")
    info: bool = flag(True, "log informational lines")
    warning: bool = flag(True, "log warnings")
    error: bool = flag(True, "log errors")
    verbose_level: int = flag(
        0, "verbose level; 0 for none", name="log-verbose", type=_verbose_level, least=0
    )
    format: str = flag(
        "default", "Triton's lines, those with ISO8601 times, or JSON objects", choices=LOG_FORMATS
    )

    access: bool = flag(
        False,
        "log a line for each request: id, model, client, status, bytes and milliseconds",
        name="access-log",
    )

    def __post_init__(self) -> None:
        check_flags(self)

    def shows(self, level: int) -> bool:
        """Return whether lines of a :mod:`logging` level are written."""
        if level <= VERBOSE:
            return self.verbose_level > 0
        if level <= logging.INFO:
            return self.info
        return self.warning if level <= logging.WARNING else self.error


class ServerLog:
    """The package's log, whose settings can be changed at any time.

    ``levels``: the least levels of lines of some loggers, by name.
    """

    def __init__(self, settings: LogSettings, levels: Mapping[str, int] | None = None) -> None:
        self._settings = settings
        self._listeners: list[Callable[[], None]] = []
        try:
            self._handler: logging.StreamHandler[Any] = (
                _LogFile(settings.file, encoding="utf-8", errors="backslashreplace")
                if settings.file
                else logging.StreamHandler(sys.stderr)
            )
        except OSError as error:
            why = "no program reads this FIFO" if error.errno == errno.ENXIO else error.strerror
            raise invalid(f"--log-file: cannot write to {settings.file}: {why}") from error
        self._handler.addFilter(lambda record: self._settings.shows(record.levelno))
        logger = logging.getLogger("gpubridge")
        levels = levels or {}
        loggers = [logger, *map(logging.getLogger, levels)]
        self._found = [(each, each.level, each.propagate) for each in loggers]
        logger.addHandler(self._handler)
        logger.propagate = False
        self._apply()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    @property
    def settings(self) -> LogSettings:
        """The current settings."""
        return self._settings

    @property
    def stub_levels(self) -> int:
        """The enabled levels of ``pb_utils.Logger``, as bits."""
        return sum(self._settings.shows(level) << n for n, level in _STUB_LEVELS.items())

    def change(self, **settings: Any) -> None:
        """Change some settings for the following lines."""
        self._settings = replace(self._settings, **settings)
        self._apply()
        for listener in self._listeners:
            listener()

    @property
    def descriptor(self) -> int:
        """The descriptor that lines are written to."""
        return int(self._handler.stream.fileno())

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of settings."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Stop writing; lines of the package go to the handlers of the process again, at the levels from before."""
        logging.getLogger("gpubridge").removeHandler(self._handler)
        for logger, level, propagate in self._found:
            logger.setLevel(level)
            logger.propagate = propagate
        self._handler.close()

    def _apply(self) -> None:
        settings = self._settings
        self._handler.setFormatter(_FORMATTERS[settings.format]())
        level = VERBOSE if settings.verbose_level else logging.INFO
        logging.getLogger("gpubridge").setLevel(level)


def log_from_stub(model: str, instance: str, fields: dict[str, Any]) -> None:
    """Write a line that a model logged."""
    level = _STUB_LEVELS.get(fields.get("level", 0), logging.INFO)
    place = {
        "model": model,
        "instance": instance,
        "model_file": Path(str(fields.get("file", ""))).name,
        "model_line": fields.get("line", 0),
    }
    _model_logger.log(level, "%s", fields.get("text", ""), extra=place)


def request_error(error: Exception, what: str = "request") -> BridgeError:
    """Return the error of a failed request; an exception that is a bug of gpubridge is logged.

    ``what``: names what has failed, if not a request.
    """
    if isinstance(error, BridgeError):
        return error
    if isinstance(error, MemoryError):
        return NoMemory()
    _logger.error("a %s failed by a bug of gpubridge", what, exc_info=error)
    return InternalError(
        f"internal error: {type(error).__name__}: {error}; this is a bug of gpubridge, not of the "
        f"{what}: the server's log has its traceback"
    )


class _LogFile(logging.FileHandler):
    """Writes to a file; says once on standard error when that takes no lines, as on a full disk.

    It never waits for the reader of a FIFO: lines that one does not take are lost.
    """

    _losing = _lost = False

    def _open(self) -> TextIOWrapper:
        """Open the file; raises OSError, also for a FIFO without a reader."""

        def opened(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)

        return open(
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=opened
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; it is lost where the file does not take it."""
        self._lost = False
        super().emit(record)
        self._losing = self._lost

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (of logging)
        """Say that lines are lost, unless the one before was, too."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._lost = True
        if not self._losing:
            with suppress(OSError, ValueError):
                sys.stderr.write(
                    f"lines of the log are lost: cannot write {self.baseFilename}: {error.strerror}\n"
                )

    def close(self) -> None:
        """Close the file, whether it takes the rest or not."""
        with suppress(OSError):
            super().close()


class _Lines(logging.Formatter):
    """``default``."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        instance = getattr(record, "instance", None)
        if instance is not None:
            text = f"[{instance}] {text}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        file, line = _place(record)
        place = f"{file}:{line}" if line else file
        return _printable(f"{self._head(record)} {record.process} {place}] {text}")

    def _head(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone()
        return f"{_LETTERS.get(record.levelno, 'I')}{when:%m%d %H:%M:%S.%f}"


class _IsoLines(_Lines):
    """``ISO8601``."""

    def _head(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        return f"{when:%Y-%m-%dT%H:%M:%SZ} {_LETTERS.get(record.levelno, 'I')}"


class _JsonLines(logging.Formatter):
    """``json``; a line of a model or a failed request tells its ``model`` and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        file, line = _place(record)
        fields: dict[str, Any] = {
            "time": f"{when:%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": _NAMES.get(record.levelno, "error"),
            "message": record.getMessage(),
        }
        for name in ("id", "model", "version", "instance", "client", "protocol"):
            if hasattr(record, name):
                fields[name] = getattr(record, name)
        fields |= {"file": file, "line": line, "process": record.process}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


_FORMATTERS = {"default": _Lines, "ISO8601": _IsoLines, "json": _JsonLines}


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_LOOKS_LIKE_A_LINE = re.compile(r"\n(?=[IWEV]\d{4} |\d{4}-\d\d-\d\dT)")


def _printable(text: str) -> str:
    """Escape control characters and forged lines in a log line, whose text clients may choose."""
    text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return _LOOKS_LIKE_A_LINE.sub("\n ", text)


def _place(record: logging.LogRecord) -> tuple[str, int]:
    """Return the file and line that logged, in a model or here."""
    file = getattr(record, "model_file", "") or record.filename
    return file, getattr(record, "model_line", record.lineno)


def boxed(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table with borders; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    texts = [
        "|".join(["", *(f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)), ""])
        for row in rows
    ]
    return "\n".join([line, texts[0], line, *texts[1:], line])
