"""From a model's directory to its configuration: read, fill in, check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]

from gpubridge.config.backends import Backends, settle_backend
from gpubridge.config.labels import read_labels
from gpubridge.config.model_config import ModelConfig, model_config_from_message
from gpubridge.config.normalise import GpuFallback, normalise_instance_groups, normalise_model
from gpubridge.config.override import parse_config_override
from gpubridge.config.schema import ProtoMessage, model_config_schema
from gpubridge.config.validate import refuse, validate_model
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["CONFIG_FILENAME", "complete_model_config", "load_model_config", "parse_model_config"]

CONFIG_FILENAME = "config.pbtxt"

_SHIPPED_BACKENDS = Backends()


def load_model_config(
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    gpu_fallback: GpuFallback = "none",
    override: str | None = None,
    backends: Backends = _SHIPPED_BACKENDS,
    draft: bool = False,
) -> ModelConfig:
    """Read, complete and validate the ``config.pbtxt`` of a model.

    Parameters
    ----------
    model_dir : Path
        The model's directory; its name is the model's name.
    gpu_count : int or callable
        GPUs that instances may use, 0 on a machine without; or what counts them, which is asked only
        where the configuration depends on it.
    gpu_fallback : {"none", "host"}
        What becomes of a KIND_GPU instance group where `gpu_count` is 0: an error, or KIND_CPU.
    override : str or None
        The configuration as JSON, to be used instead of the file.
    backends : Backends
        Those beside Python's; the shipped ones if it is not said.
    draft : bool
        The model may complete it: there need not be a file, and inputs and outputs need not be whole.

    Returns
    -------
    ModelConfig
        With every default of Triton's filled in; a draft unless it is an ensemble's.

    Raises
    ------
    BridgeError
        ``NOT_FOUND`` without the directory; ``INVALID_ARG`` for a file that is missing, cannot be
        parsed (with file, line and column), or asks for what cannot be.
    """
    if not model_dir.is_dir():
        raise BridgeError(f"the model directory {model_dir} does not exist", ErrorCode.NOT_FOUND)
    if override is None:
        path = model_dir / CONFIG_FILENAME
        message = parse_model_config(_read_text(path, required=not draft), str(path))
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


def _read_text(path: Path, *, required: bool) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if not required:
            return ""
        raise refuse(
            f"failed to open text file for read {path}: No such file or directory; write there at "
            'least: backend: "python", max_batch_size, and every input and output with name, '
            "data_type and dims"
        ) from error
    except OSError as error:
        raise refuse(f"failed to open text file for read {path}: {error.strerror}") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise refuse(
            f"failed to read text proto from {path}: {line}:{column}: expected UTF-8, got the byte "
            f"0x{content[error.start]:02x}"
        ) from error


def parse_model_config(text: str, source: str) -> ProtoMessage:
    """Return the ``inference.ModelConfig`` that `text` spells in protobuf's text format.

    Nothing is filled in or checked beyond the syntax and the schema.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: names `source`, line and column, and what was expected.
    """
    message = model_config_schema().ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise refuse(f"failed to read text proto from {source}: {error}") from error
    return message


def complete_model_config(
    message: ProtoMessage,
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    gpu_fallback: GpuFallback = "none",
    backends: Backends = _SHIPPED_BACKENDS,
    draft: bool = False,
) -> ModelConfig:
    """Return the configuration that `message` means for the model in `model_dir`.

    `message` itself is left as it is; the parameters and errors are those of `load_model_config`.
    """
    config = model_config_schema().ModelConfig()
    config.CopyFrom(message)
    config.name = config.name or model_dir.name
    if config.name != model_dir.name:
        raise refuse(
            f"unexpected directory name '{model_dir.name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    count = gpu_count if callable(gpu_count) else lambda: gpu_count
    backend_file = settle_backend(config, model_dir, backends)
    notices = normalise_model(config)
    on_host = 0
    if config.platform == "ensemble":
        draft = False
    else:
        on_host = normalise_instance_groups(config, count, gpu_fallback, notices)
    validate_model(config, count, draft=draft)
    outputs = () if draft else config.output
    labels = {output.name: read_labels(output, model_dir) for output in outputs}
    return model_config_from_message(
        config, tuple(notices), labels, backend_file, on_host=on_host, draft=draft
    )
