"""Loading, unloading and asking after models, from a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.arguments import sendable, text, wrong_type
from gpubridge.pb_utils.exceptions import TritonModelException


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model, or load it anew if it has changed; returns when it is served.

    Parameters
    ----------
    config : str, optional
        A configuration as JSON, instead of the model's config.pbtxt.
    files : dict of str to bytes, optional
        Contents by ``file:<version>/<path>``, instead of the model's directory; `config` must be
        given with them.

    Raises
    ------
    TritonModelException
        Outside of a server, without ``--model-control-mode=explicit``, or when it does not load.
    """
    name = text(model_name, "model_name")
    config = text(config, "config")
    given = _files(name, files)
    if not given:
        _ask("load_model()", "load model", "load", model=name, config=config)
        return
    # Their bytes in memory that goes along: a message is not made for files.
    fd = os.memfd_create("gpubridge-files", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as memory:
            memory.writelines(given.values())
        sizes = [[path, len(content)] for path, content in given.items()]
        _ask("load_model()", "load model", "load", (fd,), model=name, config=config, files=sizes)
    finally:
        os.close(fd)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; returns when it takes no more requests. No error where there is none.

    Parameters
    ----------
    unload_dependents : bool, optional
        Unload also the models that an ensemble requires.

    Raises
    ------
    TritonModelException
        Outside of a server, or without ``--model-control-mode=explicit``.
    """
    name = text(model_name, "model_name")
    if unload_dependents not in (True, False):
        raise wrong_type("unload_dependents", "bool", unload_dependents)
    dependents = bool(unload_dependents)
    _ask("unload_model()", "unload model", "unload", model=name, dependents=dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Tell whether a model would execute a request now, and says so if it has an ``is_ready``.

    Parameters
    ----------
    model_version : str, optional
        The highest there is, if not given.

    Raises
    ------
    TritonModelException
        Outside of a server, or for a version that is no number.
    """
    name = text(model_name, "model_name")
    version = text(model_version, "model_version")
    answer = _ask("is_model_ready()", "check model readiness", "ready", model=name, version=version)
    return bool(answer["ready"])


def _files(name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    told = f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
    if not isinstance(files, dict):
        raise TritonModelException(told)
    given = {}
    for path, held in files.items():
        content = held.encode() if isinstance(held, str) else held
        if not isinstance(path, str) or not isinstance(content, (bytes, bytearray)):
            raise TritonModelException(
                f"{told}: expected str and bytes, got {type(path).__name__} and "
                f"{type(content).__name__}"
            )
        given[sendable(path, "a path of files")] = bytes(content)
    return given


def _ask(
    function: str, action: str, about: str, fds: Sequence[int] = (), **fields: Any
) -> dict[str, Any]:
    """Ask the server for what a function of this module does; returns its answer."""
    around = host.current()
    if around is None or around.ask is None:
        raise TritonModelException(
            f"{function} expected to run inside a gpubridge server, got no server around; in a "
            "test, replace it"
        )
    try:
        answer: dict[str, Any] = around.ask(about, fds, **fields).answer
    except BridgeError as error:
        raise TritonModelException(
            f"Failed to {action}: Failed to process the request for model '{around.instance}', "
            f"message: {error.message}"
        ) from error
    return answer
