"""Log lines in Triton's form, of the server and of the models.

``I1121 03:30:00.123456 4711 file.py:12] "text"``: severity and date, time, process, place, text.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["VERBOSE", "configure_logging", "log_from_stub"]

VERBOSE = logging.DEBUG
_LETTERS = {logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", VERBOSE: "V"}
# The numbers of pb_utils.Logger's levels.
_STUB_LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: VERBOSE}
_model_logger = logging.getLogger("gpubridge.model")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        when = datetime.fromtimestamp(record.created).astimezone()
        file = getattr(record, "model_file", record.filename if hasattr(record, "filename") else "")
        file = file or Path(record.pathname).name
        line = getattr(record, "model_line", record.lineno)
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"{letter}{when:%m%d %H:%M:%S.%f} {record.process} {file}:{line}] {text}"


def configure_logging(
    file: Path | None = None,
    verbose: int = 0,
    *,
    info: bool = True,
    warning: bool = True,
    error: bool = True,
) -> logging.Handler:
    """Send the package's log lines to ``file`` (else stderr); returns the handler to remove.

    The flags are those of the command line: each severity can be switched off.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(_Formatter())
    shown = {
        logging.INFO: info,
        logging.WARNING: warning,
        logging.ERROR: error,
        VERBOSE: verbose > 0,
    }
    handler.addFilter(lambda record: shown.get(record.levelno, True))
    logger = logging.getLogger("gpubridge")
    logger.addHandler(handler)
    logger.setLevel(VERBOSE if verbose > 0 else logging.INFO)
    logger.propagate = False
    return handler


def log_from_stub(instance: str, fields: dict[str, Any]) -> None:
    """Write a line that a model logged."""
    level = _STUB_LEVELS.get(fields.get("level", 0), logging.INFO)
    _model_logger.log(
        level,
        "[%s] %s",
        instance,
        fields.get("text", ""),
        extra={
            "model_file": Path(str(fields.get("file", ""))).name,
            "model_line": fields.get("line", 0),
        },
    )
