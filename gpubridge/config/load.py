"""Loading of a model's configuration: parsed, completed, checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]

from gpubridge.config.backends import Backends, choose_backend, find_backend
from gpubridge.config.files import read_regular
from gpubridge.config.json_forms import message_from_json
from gpubridge.config.model_config import (
    ModelConfig,
    VersionPolicy,
    model_config_from_message,
    version_policy,
)
from gpubridge.config.normalise import GpuFallback, normalise_instance_groups, normalise_model
from gpubridge.config.openai import check_openai
from gpubridge.config.text_proto import plain_text
from gpubridge.config.validate import (
    check_enumerations,
    ignored_features,
    validate_instances,
    validate_model,
)
from gpubridge.errors import BridgeError, invalid, not_found
from gpubridge.schema import ProtoMessage, message_class, schema_pool

CONFIG_FILENAME = "config.pbtxt"
_SHIPPED_BACKENDS = Backends()
_LONGEST = 4 * 1024 * 1024
"""Maximum characters of a configuration, so that parsing it does not block the server for long."""

_MOST_MESSAGES = 1 << 15
"""Braces that open in a configuration: each is a message, which takes a tenth of a millisecond to parse."""
_UNKNOWN_NAME = re.compile(r'(Message|Enum) type "([\w.]+)" has no (?:field|value) named "?(\w+)')
_TENSORS = ("input", "output")
_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class NotServable(BridgeError):
    """A valid configuration that this server or machine cannot serve, in any of the model's versions.

    ``policy``: which versions it has.
    """

    def __init__(self, reason: BridgeError, policy: VersionPolicy) -> None:
        super().__init__(reason.message, reason.code)
        self.policy = policy


def load_model_config(
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    gpu_fallback: GpuFallback = "none",
    override: str | Path | None = None,
    backends: Backends = _SHIPPED_BACKENDS,
    draft: bool = False,
) -> ModelConfig:
    """Read, complete and validate the ``config.pbtxt`` of a model's directory.

    - ``gpu_count``: number of GPUs for instances, or a function that counts them when needed.
    - ``gpu_fallback``: fallback for KIND_GPU instance groups without a GPU: an error, or KIND_CPU.
    - ``override``: a configuration as JSON, or another file, that replaces the file.
    - ``draft``: the model may complete the configuration: the file may be missing, and inputs and
      outputs incomplete.

    Returns the configuration with Triton's defaults; a draft if requested, except for an ensemble.

    Raises BridgeError: ``NOT_FOUND`` without the directory; ``INVALID_ARG`` for a file that is
    missing, malformed (with file, line and column), or invalid; `NotServable` for one that this server
    or machine cannot serve.
    """
    if not model_dir.is_dir():
        raise not_found(f"the model directory {model_dir} does not exist")
    if not isinstance(override, str):
        path = override or model_dir / CONFIG_FILENAME
        message = parse_model_config(_read_file(path, required=not draft), str(path))
    else:
        message = parse_config_override(override)
    return complete_model_config(
        message,
        model_dir,
        gpu_count=gpu_count,
        gpu_fallback=gpu_fallback,
        backends=backends,
        draft=draft,
    )


def custom_config(model_dir: Path, name: str) -> Path | None:
    """Return the file of a model's named configuration; None if there is none."""
    path = model_dir / "configs" / f"{name}.pbtxt"
    return path if name and path.is_file() else None


def _read_file(path: Path, *, required: bool) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError as error:
        if not required:
            return b""
        raise invalid(
            f"failed to open text file for read {path}: No such file or directory; write there at "
            'least: backend: "python", max_batch_size, and every input and output with name, '
            "data_type and dims"
        ) from error
    except OSError as error:
        raise invalid(f"failed to open text file for read {path}: {error.strerror}") from error


def parse_model_config(text: str | bytes, source: str) -> ProtoMessage:
    """Parse an ``inference.ModelConfig`` in protobuf's text format, without checks.

    Raises BridgeError: ``INVALID_ARG`` with `source`, line, column, and what was expected.
    """
    message = message_class("ModelConfig")()
    content = text.encode() if isinstance(text, str) else text
    _check_messages(content.decode("latin-1"), source)
    try:
        text_format.Parse(plain_text(content, source), message)
    except text_format.ParseError as error:
        text_of_error = f"{error}{_real_spelling(str(error))}"
        raise invalid(f"failed to read text proto from {source}: {text_of_error}") from error
    return message


def _real_spelling(error: str) -> str:
    """Return a hint for the error of an unknown field or value."""
    found = _UNKNOWN_NAME.search(error)
    if found is None:
        return ""
    kind, owner, name = found.groups()
    pool = schema_pool()
    if kind == "Message":
        names = list(pool.FindMessageTypeByName(owner).fields_by_name)
    else:
        names = list(pool.FindEnumTypeByName(owner).values_by_name)
    if name.startswith("python"):
        return ' A Python model has backend: "python".'
    likely = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {likely[0]}?" if likely else ""


def complete_model_config(
    message: ProtoMessage,
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    gpu_fallback: GpuFallback = "none",
    backends: Backends = _SHIPPED_BACKENDS,
    draft: bool = False,
) -> ModelConfig:
    """Complete and validate a copy of `message`; see `load_model_config`."""
    config = message_class("ModelConfig")()
    config.CopyFrom(message)
    config.name = config.name or model_dir.name
    if config.name != model_dir.name:
        raise invalid(
            f"unexpected directory name '{model_dir.name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    check_enumerations(config)
    count = gpu_count if callable(gpu_count) else lambda: gpu_count
    choose_backend(config, model_dir, backends)
    notices = normalise_model(config)
    try:
        backend_file = find_backend(config, model_dir, backends)
        on_host = 0
        if config.platform == "ensemble":
            draft = False
        else:
            on_host = normalise_instance_groups(config, count, gpu_fallback, notices)
            validate_instances(config, count)
        outputs = () if draft else config.output
        labels = {output.name: read_labels(output, model_dir) for output in outputs}
    except BridgeError as error:
        # An invalid one is that first of all.
        validate_model(config, draft=draft)
        raise NotServable(error, version_policy(config)) from error
    notices += ignored_features(config)
    validate_model(config, draft=draft)
    complete = model_config_from_message(
        config, tuple(notices), labels, backend_file, on_host=on_host, draft=draft
    )
    if not draft:
        check_openai(complete)
    return complete


def _check_messages(text: str, source: str) -> None:
    """Raise INVALID_ARG for a configuration of so many messages that it takes long to parse."""
    count = text.count("{")
    if count > _MOST_MESSAGES:
        raise invalid(
            f"{source}: expected at most {_MOST_MESSAGES} inputs, outputs and other messages in a "
            f"configuration, got {count}"
        )


def parse_config_override(text: str) -> ProtoMessage:
    """Parse an ``inference.ModelConfig`` in JSON, as in ``/config``."""
    if len(text) > _LONGEST:
        raise invalid(
            f"Invalid config override: expected at most {_LONGEST} characters, got {len(text)}"
        )
    _check_messages(text, "Invalid config override")
    try:
        # Unlike the standard library's json, orjson refuses lone surrogates.
        values: Any = orjson.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {text[:20]!r}")  # noqa: TRY004
        return message_from_json(values)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise invalid(f"Invalid config override: {error}") from error


def read_labels(output: ProtoMessage, model_dir: Path) -> tuple[bytes, ...]:
    """Return the labels of an output by class index; none if it names no file.

    As in Triton, a line is everything up to its newline, and an empty line is no label.
    """
    if not output.label_filename:
        return ()
    path = model_dir / output.label_filename
    # Also for links: clients must not see files outside of the model.
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise invalid(
            f"output '{output.name}': expected a label_filename in the model's directory "
            f"{model_dir}, got '{output.label_filename}'"
        )
    try:
        content = read_regular(path)
    except OSError as error:
        raise invalid(f"failed to open text file for read {path}: {error.strerror}") from error
    lines = content.split(b"\n")
    return tuple(lines[:-1] if not lines[-1] else lines)


def finish_model_config(
    draft: ModelConfig,
    returned: str | None,
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    backends: Backends = _SHIPPED_BACKENDS,
) -> ModelConfig:
    """Return the complete configuration of a model that has completed a draft.

    As in Triton, the model sets the batch size, inputs and outputs, the transaction policy, and a
    scheduler if the draft has none; everything else stays as in the draft. ``returned`` is the
    model's configuration as JSON; None if it completes nothing.

    Raises BridgeError: INVALID_ARG for a malformed or invalid configuration.
    """
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if returned is not None:
        _merge(_parse(returned, draft.name), message)
    whole = complete_model_config(message, model_dir, gpu_count=gpu_count, backends=backends)
    # Defaults filled in for the draft would cause wrong notices.
    return replace(whole, notices=draft.notices, fallbacks=draft.fallbacks)


def _parse(text: str, name: str) -> ProtoMessage:
    source = f"auto_complete_config of model '{name}' returned"
    if len(text) > _LONGEST:
        raise invalid(
            f"{source} a configuration of {len(text)} characters; expected at most {_LONGEST}"
        )
    _check_messages(text, f"{source} no valid configuration")
    try:
        # Unlike the standard library's json, orjson refuses lone surrogates.
        values: Any = orjson.loads(text)
        if not isinstance(values, dict):
            raise invalid(f"{source} {text[:40]!r}; expected a ModelConfig that holds a dict")
        return message_from_json(values)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise invalid(f"{source} no valid configuration: {error}") from error


def _merge(model: ProtoMessage, message: ProtoMessage) -> None:
    message.max_batch_size = model.max_batch_size
    for name in _TENSORS:
        message.ClearField(name)
        getattr(message, name).extend(getattr(model, name))
    if message.WhichOneof("scheduling_choice") is None:
        for name in _SCHEDULERS:
            if model.HasField(name):
                getattr(message, name).CopyFrom(getattr(model, name))
    if model.HasField("model_transaction_policy"):
        message.model_transaction_policy.CopyFrom(model.model_transaction_policy)
