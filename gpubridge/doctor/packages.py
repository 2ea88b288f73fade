"""What is installed: found by name, imported never."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from gpubridge.doctor.finding import Finding

__all__ = ["package_findings"]

_SERVER_PACKAGES = (
    ("uvloop", "uvloop"),
    ("orjson", "orjson"),
    ("numpy", "numpy"),
    ("google.protobuf", "protobuf"),
    ("tritonclient", "tritonclient"),
)
_MODEL_PACKAGES = (
    ("torch", "torch", "pip install torch, for the backend pytorch or if your models use it"),
    ("onnxruntime", "onnxruntime", "pip install 'gpubridge[onnx]', for the backend onnxruntime"),
    ("cupy", "cupy", "pip install cupy-cuda13x (or cupy-cuda12x), if your models use it"),
    ("PIL", "pillow", "pip install 'gpubridge[image]', for the backend image_preproc"),
    (
        "nvidia.nvimgcodec",
        "nvidia-nvimgcodec",
        "pip install 'gpubridge[image-gpu]', for its decoder",
    ),
    ("pynvml", "nvidia-ml-py", "pip install nvidia-ml-py, for the metrics of GPUs"),
)
_JPEG_LIBRARY = "nvidia-nvjpeg"


def package_findings() -> list[Finding]:
    """Look for what the server and models import."""
    return [
        *(_server_package(module, package) for module, package in _SERVER_PACKAGES),
        *(_model_package(*row) for row in _MODEL_PACKAGES),
        _jpeg_library(),
    ]


def _server_package(module: str, package: str) -> Finding:
    version = _installed(module, package)
    if version is None:
        advice = f"pip install {package}, or install gpubridge again"
        return Finding(package, works=False, detail="not installed", advice=advice, needed=True)
    return Finding(package, works=True, detail=version, needed=True)


def _model_package(module: str, package: str, advice: str) -> Finding:
    version = _installed(module, package)
    if version is None:
        return Finding(package, works=False, detail="not installed", advice=advice)
    return Finding(package, works=True, detail=version)


def _installed(module: str, package: str) -> str | None:
    """The version of an importable module, found without importing it; None when there is none."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # a parent package is absent
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # Distributions are named after the CUDA release they were built for: cupy-cuda13x. Finding them
    # so means reading what every one of them has.
    for name in importlib.metadata.packages_distributions().get(module.partition(".")[0], []):
        if name.lower().replace("_", "-").startswith(package):
            return importlib.metadata.version(name)
    return "installed, version unknown"


def _jpeg_library() -> Finding:
    # It brings a library, no module; its name may end in the CUDA release it was built for.
    found = set()
    for distribution in importlib.metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        if name == _JPEG_LIBRARY or name.startswith(f"{_JPEG_LIBRARY}-"):
            found.add(f"{name} {distribution.version}")
    if found:
        return Finding(_JPEG_LIBRARY, works=True, detail=", ".join(sorted(found)))
    advice = "pip install 'gpubridge[image-gpu]', to decode JPEG on a GPU"
    return Finding(_JPEG_LIBRARY, works=False, detail="not installed", advice=advice)
