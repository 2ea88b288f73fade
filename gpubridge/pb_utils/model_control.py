"""Loading, unloading and asking after models, from a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.arguments import sendable, text, wrong_type
from gpubridge.pb_utils.exceptions import TritonModelException

__all__ = ["ModelController", "is_model_ready", "load_model", "unload_model"]


class ModelController(Protocol):
    """Changes the models of the server; given by the process around the model.

    Attributes
    ----------
    instance : str
        The model instance, for error texts.
    """

    instance: str

    def load(self, name: str, config: str, files: Mapping[str, bytes], /) -> None:
        """Load a model; raises BridgeError."""

    def unload(self, name: str, dependents: bool, /) -> None:
        """Unload a model; raises BridgeError."""

    def is_ready(self, name: str, version: str, /) -> bool:
        """Tell whether a model is ready; raises BridgeError."""


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
    control = _controller("load_model()")
    try:
        control.load(name, config, given)
    except BridgeError as error:
        raise _failure("load model", control, error) from error


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
    control = _controller("unload_model()")
    try:
        control.unload(name, bool(unload_dependents))
    except BridgeError as error:
        raise _failure("unload model", control, error) from error


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
    control = _controller("is_model_ready()")
    try:
        return control.is_ready(name, version)
    except BridgeError as error:
        raise _failure("check model readiness", control, error) from error


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


def _controller(what: str) -> ModelController:
    around = host.current()
    if around is None or around.models is None:
        raise TritonModelException(
            f"{what} expected to run inside a gpubridge server, got no server around; in a test, "
            "replace it"
        )
    return around.models


def _failure(what: str, control: ModelController, error: BridgeError) -> TritonModelException:
    return TritonModelException(
        f"Failed to {what}: Failed to process the request for model '{control.instance}', "
        f"message: {error.message}"
    )
