"""CUDA releases: the one that the driver knows, and those that installed packages were made for."""

from __future__ import annotations

import importlib.metadata
import re

from gpubridge.cuda_ipc.devices import driver_release
from gpubridge.errors import BridgeError

_EXTRAS = {12: "gpubridge[image-gpu-cu12]", 13: "gpubridge[image-gpu]"}
_DRIVERS = {12: "R530", 13: "R580"}
"""The first branch of the NVIDIA driver for which those packages are."""


def installed_releases(package: str) -> dict[str, int]:
    """Return the distributions of a package of NVIDIA's, with their versions, by their CUDA release.

    Their names end in it (``-cu12``), or it is the first number of their version.
    """
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        match = re.fullmatch(re.escape(package) + r"(-cu(\d+))?", name)
        if match:
            release = match[2] or distribution.version.partition(".")[0]
            found[f"{name} {distribution.version}"] = int(release)
    return found


def image_extra() -> str:
    """Return the extra of gpubridge for images on a GPU that fits the driver; or both with what fits."""
    try:
        known = int(driver_release().partition(".")[0])
    except BridgeError:
        return f"'{_EXTRAS[13]}' (driver {_DRIVERS[13]} or newer) or '{_EXTRAS[12]}'"
    return f"'{_EXTRAS[13 if known >= 13 else 12]}'"


def too_new(release: int) -> str:
    """Say what to do about what was made for a CUDA release; empty where the driver can run it."""
    try:
        known = driver_release()
    except BridgeError:
        return ""
    if release <= int(known.partition(".")[0]):
        return ""
    newest = _DRIVERS.get(release, "the newest")
    return (
        f"it is for CUDA {release}, and the driver knows {known}: uninstall it and pip install "
        f"{image_extra()}, or update the NVIDIA driver to {newest}"
    )
