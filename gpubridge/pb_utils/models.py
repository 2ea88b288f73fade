"""Models in the server: their configuration and directory; loading and unloading them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import TritonModelException, sendable, text, wrong_type


class ModelConfig:
    """A model configuration that a model's ``auto_complete_config`` completes, but may not contradict.

    Parameters
    ----------
    model_config : str
        The configuration as JSON.

    Raises
    ------
    ValueError
        By every method, if its argument is malformed or contradicts the configuration.
    """

    __module__ = "triton_python_backend_utils"

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration itself."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum batch size; it must not be below the configured one."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in "
                f"auto-complete-config function for model '{self._name()}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Select the dynamic batcher, with default settings unless it is configured."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"auto-complete-config function for model '{self._name()}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete the one of that name.

        Parameters
        ----------
        input : dict
            ``name``, ``data_type``, ``dims`` and, if wanted, ``optional``.
        """
        self._add(
            "input",
            input,
            ("name", "data_type", "dims", "optional"),
            "'name', 'data_type', 'dims' and 'optional'",
        )

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the one of that name.

        Parameters
        ----------
        output : dict
            ``name``, ``data_type`` and ``dims``.
        """
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled.

        Parameters
        ----------
        transaction_policy_dict : dict
            ``decoupled`` and nothing else.
        """
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name()}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name()}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def _name(self) -> str:
        return str(self._model_config["name"])

    def _add(self, kind: str, entry: dict[str, Any], allowed: tuple[str, ...], listed: str) -> None:
        where = f"in auto-complete-config function for model '{self._name()}'"
        if "name" not in entry:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = entry["name"]
        if any(key not in allowed for key in entry):
            raise ValueError(f"{kind} '{name}' {where} contains property other than {listed}.")
        for required in ("data_type", "dims"):
            if required not in entry:
                raise ValueError(f"{kind} '{name}' {where} is missing '{required}' property.")
        configured = self._model_config.setdefault(kind, [])
        for present in configured:
            if present["name"] == name:
                self._complete(kind, present, entry)
                return
        configured.append(dict(entry))

    def _complete(self, kind: str, present: dict[str, Any], entry: dict[str, Any]) -> None:
        name, model = entry["name"], self._name()
        data_type = present.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", entry["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {data_type} for "
                f"{kind} '{name}', model provides {entry['data_type']}"
            )
        specified = f"model '{model}', tensor '{name}': the model expects"
        dims = present.get("dims")
        if dims and dims != entry["dims"]:
            raise ValueError(
                f"{specified} dims {entry['dims']} but the model configuration specifies dims "
                f"{dims}"
            )
        optional = present.get("optional")
        if "optional" in entry and optional not in (None, entry["optional"]):
            raise ValueError(
                f"{specified} optional {entry['optional']} but the model configuration specifies "
                f"optional {optional}"
            )
        present.update(entry)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | Any:
    """Return the entry of an input in a parsed model configuration, or None."""
    return _entry(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | Any:
    """Return the entry of an output in a parsed model configuration, or None."""
    return _entry(model_config.get("output", ()), name)


def _entry(entries: Any, name: str) -> dict[str, Any] | None:
    for entry in entries:
        if entry["name"] == name:
            found: dict[str, Any] = entry
            return found
    return None


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether a parsed model configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """Return the directory of the model's version.

    Raises
    ------
    TritonModelException
        Outside of a server.
    """
    server = host.current()
    if server is None:
        raise TritonModelException(
            "get_model_dir() expected to run inside a gpubridge server, got no server around; in "
            "a test, replace it: monkeypatch.setattr(pb_utils, 'get_model_dir', lambda: path)"
        )
    return server.model_dir


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model, or reload it if it has changed; returns when it is ready.

    Parameters
    ----------
    config : str, optional
        A configuration as JSON that replaces the model's config.pbtxt.
    files : dict of str to bytes, optional
        Contents by ``file:<version>/<path>`` that replace the model's directory; they require
        `config`.

    Raises
    ------
    TritonModelException
        Outside of a server, without ``--model-control-mode=explicit``, or if it fails to load.
    """
    name = text(model_name, "model_name")
    config = text(config, "config")
    given = _files(name, files)
    if not given:
        _ask("load_model()", "load model", "load", model=name, config=config)
        return
    # Files may exceed a message: their bytes are sent as a memory file.
    fd = os.memfd_create("gpubridge-files", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as memory:
            memory.writelines(given.values())
        sizes = [[path, len(content)] for path, content in given.items()]
        _ask("load_model()", "load model", "load", (fd,), model=name, config=config, files=sizes)
    finally:
        os.close(fd)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; returns when it takes no more requests. An unknown model is no error.

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
    """Return whether a model can execute a request now, which its ``is_ready`` decides if it has one.

    Parameters
    ----------
    model_version : str, optional
        The highest one by default.

    Raises
    ------
    TritonModelException
        Outside of a server, or if the version is not a number.
    """
    name = text(model_name, "model_name")
    version = text(model_version, "model_version")
    answer = _ask("is_model_ready()", "check model readiness", "ready", model=name, version=version)
    return bool(answer["ready"])


def _files(name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    problem = f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
    if not isinstance(files, dict):
        raise TritonModelException(problem)
    given = {}
    for path, held in files.items():
        content = held.encode() if isinstance(held, str) else held
        if not isinstance(path, str) or not isinstance(content, (bytes, bytearray)):
            raise TritonModelException(
                f"{problem}: expected str and bytes, got {type(path).__name__} and "
                f"{type(content).__name__}"
            )
        given[sendable(path, "a path of files")] = bytes(content)
    return given


def _ask(
    function: str, action: str, about: str, fds: Sequence[int] = (), **fields: Any
) -> dict[str, Any]:
    """Send a control request to the server; returns its answer."""
    server = host.current()
    if server is None or server.ask is None:
        raise TritonModelException(
            f"{function} expected to run inside a gpubridge server, got no server around; in a "
            "test, replace it"
        )
    try:
        answer: dict[str, Any] = server.ask(about, fds, **fields).answer
    except BridgeError as error:
        raise TritonModelException(
            f"Failed to {action}: Failed to process the request for model '{server.instance}', "
            f"message: {error.message}"
        ) from error
    return answer
