"""The repositories that the benchmark of images serves: one model, ``images``, in several makes."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["MODEL", "write_repository"]

MODEL = "images"

_PILLOW = Path(__file__).resolve().parent / "models" / "images" / "pillow"
_CONFIG = """name: "images"
backend: "{backend}"
max_batch_size: 128
input [ {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }} ]
dynamic_batching {{ }}
instance_group [ {{ count: {instances} kind: {kind} }} ]
"""
# What the Pillow model does.
_PARAMETERS = {"SIZE": "224", "RESIZE_MODE": "crop", "RESIZE_SHORTER_SIDE": "256"}


def write_repository(
    folder: Path, instances: int, *, pillow: bool, kind: str = "KIND_CPU", **parameters: str
) -> Path:
    """Write a repository with the model, new or again.

    Parameters
    ----------
    pillow : bool
        Whether it is the Pillow model.py, or a configuration of the backend image_preproc.
    parameters : str
        Of the backend, beside those that make it do what the Pillow model does.
    """
    model = folder / MODEL
    shutil.rmtree(model, ignore_errors=True)
    if pillow:
        shutil.copytree(_PILLOW, model)
    else:
        (model / "1").mkdir(parents=True)
    backend = "python" if pillow else "image_preproc"
    text = _CONFIG.format(backend=backend, instances=instances, kind=kind)
    if not pillow:
        text += "".join(
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
            for key, value in (_PARAMETERS | parameters).items()
        )
    (model / "config.pbtxt").write_text(text)
    return folder
