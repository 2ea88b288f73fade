"""Model configurations for tests, from the text of a config.pbtxt."""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from gpubridge.config import ModelConfig, complete_model_config, parse_model_config

__all__ = ["INPUT", "MINIMAL", "OUTPUT", "PYTHON", "cases", "model_config", "write_model"]

PYTHON = 'backend: "python"\n'
INPUT = 'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }\n'
OUTPUT = 'output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }\n'
MINIMAL = PYTHON + INPUT + OUTPUT


def model_config(inputs: str, outputs: str = "", more: str = "") -> ModelConfig:
    """Make a configuration of model ``m``; tensors are ``NAME TYPE [dims] rest`` by ``;``."""
    outputs = outputs or "OUT FP32 [-1]"
    text = 'backend: "python"\n' + more
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in filter(None, tensors.split(";")):
            name, datatype, rest = tensor.split(maxsplit=2)
            text += f'\n{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: {rest} }}'
    return complete_model_config(parse_model_config(text, "text"), Path("m"), gpu_count=0)


def write_model(repository: Path, config: str | bytes | None) -> Path:
    """Make the directory of model ``m`` with a version, and with a configuration unless that is None."""
    model_dir = repository / "m"
    (model_dir / "1").mkdir(parents=True)
    (model_dir / "1" / "model.py").touch()
    if config is not None:
        content = config.encode() if isinstance(config, str) else config
        (model_dir / "config.pbtxt").write_bytes(content)
    return model_dir


def cases(text: str, names: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """Read cases from lines: what is given, and indented below it what is told; both wrapped at spaces.

    ``$NAME`` is replaced by the value of that name.
    """
    rows = re.findall(r"^((?:\S.*\n)+)((?: .*\n)+)", text, re.MULTILINE)
    words = [[Template(" ".join(part.split())) for part in row] for row in rows]
    return [tuple(part.substitute(names or {}) for part in row) for row in words]
