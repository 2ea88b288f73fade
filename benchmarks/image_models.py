"""The repositories that the benchmark of images serves: one model, ``images``, in several makes."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["BACKEND", "CUPY", "MODEL", "PILLOW", "write_repository"]

MODEL = "images"

# A configuration of image_preproc, a model.py with Pillow, and the example's with nvImageCodec and CuPy.
BACKEND, PILLOW, CUPY = "backend", "pillow", "cupy"

_HERE = Path(__file__).resolve().parent
_SOURCES = {
    PILLOW: _HERE / "models" / "images" / "pillow",
    CUPY: _HERE.parent / "examples/image_preproc/python_repository/image_preproc_python",
}
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
_NORMALIZED = {
    "LAYOUT": "NCHW",
    "NORMALIZE_MEAN": "0.485, 0.456, 0.406",
    "NORMALIZE_STD": "0.229, 0.224, 0.225",
    "MAX_PIXELS": "50000000",
}


def write_repository(
    folder: Path, instances: int, *, make: str, kind: str = "KIND_CPU", **parameters: str
) -> Path:
    """Write a repository with the model, new or again.

    Parameters
    ----------
    make : str
        `BACKEND`, `PILLOW` or `CUPY`.
    parameters : str
        Of the backend, beside those that make it do what the Pillow model does.
    """
    model = folder / MODEL
    shutil.rmtree(model, ignore_errors=True)
    if make == BACKEND:
        (model / "1").mkdir(parents=True)
    else:
        shutil.copytree(_SOURCES[make], model)
    backend = "image_preproc" if make == BACKEND else "python"
    text = _CONFIG.format(backend=backend, instances=instances, kind=kind)
    given = {BACKEND: _PARAMETERS, PILLOW: {}, CUPY: _PARAMETERS | _NORMALIZED}[make] | parameters
    text += "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        for key, value in given.items()
    )
    (model / "config.pbtxt").write_text(text)
    return folder
