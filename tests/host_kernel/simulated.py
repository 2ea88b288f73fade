"""Environment of a process that preprocesses images on a simulated GPU."""

from __future__ import annotations

import os
from pathlib import Path

from tests.host_kernel.running import build_kernel
from tests.simcuda import build

__all__ = ["imaging_environment"]

_PACKAGES = Path(build.__file__).parent / "packages"


def imaging_environment(cache: Path, *, decoder: bool = True, kernel: bool = True) -> dict:
    """Return variables to go with those of a machine.

    Parameters
    ----------
    cache : Path
        Where compiled kernels are kept.
    decoder, kernel : bool
        Whether there is nvImageCodec's double; whether NVRTC's can compile the kernel.
    """
    compiler = build.build_compiler()
    libraries = [compiler, build.build_driver()]
    found = {
        "XDG_CACHE_HOME": str(cache),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        ),
    }
    # cuda.bindings takes what is loaded before it looks for NVIDIA's package, which may be there, too.
    loaded = [os.environ.get("LD_PRELOAD", ""), str(compiler / "libnvrtc.so.12")]
    found["LD_PRELOAD"] = " ".join(filter(None, loaded))
    if kernel:
        found["SIMCUDA_KERNEL"] = str(build_kernel())
    if decoder:
        found["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), os.environ.get("PYTHONPATH", "")])
    return found
