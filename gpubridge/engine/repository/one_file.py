"""Directories of the models that Python files declare with ``@gpubridge.model``."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]

from gpubridge.config import CONFIG_FILENAME
from gpubridge.config.load import parse_config_override
from gpubridge.engine.repository.model_files import FileOverrides, is_model_name
from gpubridge.errors import invalid, listed, unavailable
from gpubridge.own_command import own_command

_FILE = re.compile(r"(.+\.py)(?::(.+))?", re.DOTALL)
_ENTRY = """\
from gpubridge.one_file.adapter import model_class

TritonPythonModel = model_class({path!r}, {name!r})
"""
_SOURCE = Path("1", "gpubridge.declared_in")
"""In a model's directory, a link to the file, with the time of the change that the configuration is of."""
_SERVED = Path("1", "gpubridge.served")
"""In a model's directory, the names of the file's models that are served, as JSON."""
_logger = logging.getLogger(__name__)


class OneFileModels:
    """Writes a directory for each model of Python files; `close` removes them."""

    def __init__(self) -> None:
        self._files = FileOverrides()

    def directories(self, text: str) -> list[Path]:
        """Return the directories of the models of ``PATH.py``, or of some of them: ``PATH.py:NAME,NAME``.

        Empty for anything but a file. Raises BridgeError: INVALID_ARG where the file cannot be imported,
        or does not declare the models.
        """
        found = _FILE.fullmatch(text)
        if found is None or not os.path.isfile(found[1]):  # noqa: PTH113
            return []
        path = os.path.abspath(found[1])  # noqa: PTH100
        # Read first: a file that changes meanwhile is read again.
        changed = os.stat(path).st_mtime_ns  # noqa: PTH116
        models = _declared(path)
        names = found[2].split(",") if found[2] else list(models)
        for name in names:
            if name not in models or not is_model_name(name):
                known = ", ".join(f"'{each}'" for each in models) or "none"
                raise invalid(
                    f"expected a model that {path} declares, which are {known}, got '{name}'"
                )
        if not names:
            raise invalid(f"{path} declares no model: expected a function with @gpubridge.model")
        served = json.dumps(names).encode()
        return [self._write(path, name, models[name], changed, served) for name in names]

    def _write(self, path: str, name: str, config: object, changed: int, served: bytes) -> Path:
        files = {
            f"file:{_SERVED}": served,
            f"file:{CONFIG_FILENAME}": _text(config),
            "file:1/model.py": _ENTRY.format(path=path, name=name).encode(),
        }
        model = self._files.write(name, files).model
        (model / _SOURCE).symlink_to(path)
        _note_time(model, changed)
        return model

    def close(self) -> None:
        """Remove the directories; idempotent."""
        self._files.close()


def renew(directory: Path) -> None:
    """Write a model's configuration anew if the Python file that declares the model has changed.

    Models that the file has besides those served are named in the log, once for each change.

    Does nothing for any other model. Raises BridgeError: INVALID_ARG as `OneFileModels.directories`,
    UNAVAILABLE where it cannot be written; then the next call writes it.
    """
    link = directory / _SOURCE
    if not link.is_symlink():
        return
    try:
        changed = link.stat().st_mtime_ns
    except OSError:
        raise invalid(f"{link.readlink()} is not there any more") from None
    if changed == link.lstat().st_mtime_ns:
        return
    path = str(link.readlink())
    models = _declared(path)
    served = json.loads((directory / _SERVED).read_bytes())
    added = [name for name in models if name not in served]
    if added and directory.name == next((name for name in models if name in served), ""):
        _logger.warning(
            "%s declares models that are not served, start the server again for them: %s",
            path,
            listed(added),
        )
    if directory.name not in models:
        raise invalid(f"{path} no longer declares a model '{directory.name}'")
    config, text = directory / CONFIG_FILENAME, _text(models[directory.name])
    if config.read_bytes() != text:
        fresh = config.with_suffix(".new")
        try:
            fresh.write_bytes(text)
            fresh.replace(config)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise unavailable(f"{config} cannot be written: {error}; free space there") from error
    _note_time(directory, changed)


def _note_time(directory: Path, changed: int) -> None:
    os.utime(directory / _SOURCE, ns=(changed, changed), follow_symlinks=False)


def _text(config: object) -> bytes:
    text: str = text_format.MessageToString(parse_config_override(json.dumps(config)))
    return text.encode()


def _declared(path: str) -> dict[str, object]:
    """Return the configurations of a file's models; it is imported in another process."""
    done = subprocess.run(
        [*own_command("gpubridge.one_file"), path, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": f"its process ended with exit code {done.returncode}"}
    if "error" in answer:
        raise invalid(f"{path} cannot be imported: {answer['error']}")
    models: dict[str, object] = answer["models"]
    return models
