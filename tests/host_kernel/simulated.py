"""Environment of a process that preprocesses images on a simulated GPU."""

from __future__ import annotations

import os
from pathlib import Path

from tests import run_folder
from tests.host_kernel.running import build_kernel
from tests.simcuda import build

__all__ = ["imaging_cache", "imaging_environment"]

_PACKAGES = Path(build.__file__).parent / "packages"


def imaging_cache() -> Path:
    """Return where compiled kernels are kept by all servers of the run, which can so be lent."""
    folder = run_folder.path() / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


def imaging_environment(
    cache: Path | None = None, *, decoder: bool = True, kernel: bool = True
) -> dict:
    """Return variables to go with those of a machine.

    Parameters
    ----------
    cache : Path
        Where compiled kernels are kept, if not in `imaging_cache`.
    decoder, kernel : bool
        Whether there is nvImageCodec's double; whether NVRTC's can compile the kernel.
    """
    compiler = build.build_compiler()
    libraries = [compiler, build.build_driver()]
    found = {
        "XDG_CACHE_HOME": str(cache or imaging_cache()),
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
