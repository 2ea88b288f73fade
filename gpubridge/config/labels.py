"""The names of an output's classes, one per line of a file in the model's directory."""

from __future__ import annotations

from pathlib import Path

from gpubridge.config.schema import ProtoMessage
from gpubridge.config.validate import refuse

__all__ = ["read_labels"]


def read_labels(output: ProtoMessage, model_dir: Path) -> tuple[bytes, ...]:
    """Return the labels of an output by class index; none where it names no file.

    As in Triton, a line is everything up to its newline and an empty one names nothing.

    Raises
    ------
    BridgeError
        INVALID_ARG for a file that cannot be read, or that is outside of `model_dir`.
    """
    if not output.label_filename:
        return ()
    path = model_dir / output.label_filename
    # Also of a link: a configuration is not to show files to clients that its model does not hold.
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise refuse(
            f"output '{output.name}': expected a label_filename in the model's directory "
            f"{model_dir}, got '{output.label_filename}'"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise refuse(f"failed to open text file for read {path}: {error.strerror}") from error
    lines = content.split(b"\n")
    return tuple(lines[:-1] if not lines[-1] else lines)
