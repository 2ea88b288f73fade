"""Compiles the kernel for the GPU that is there, with NVRTC, and keeps what came out of it on disk.

The cache is a convenience: where it cannot be read or written, the kernel is compiled at each start.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["KernelUnavailable", "cache_folder", "kernel_image"]

# Weights come from sums in double precision, which Pillow's compiler rounds one by one.
_OPTIONS = ("--std=c++17", "--fmad=false")
_MARK = b"gpubridge kernel 1\n"
_DIGEST = 32


class KernelUnavailable(Exception):
    """The kernel cannot be had here; the message says why, and what would help."""


def kernel_image(source: Path, capability: tuple[int, int], cache: Path | None) -> bytes:
    """Return the kernel as the driver loads it.

    Parameters
    ----------
    source : Path
        Its headers (``*.cuh``) lie beside it.
    capability : (int, int)
        The GPU's compute capability.
    cache : Path or None
        A directory; made if it is not there. None compiles in any case.

    Raises
    ------
    KernelUnavailable
        There is no NVRTC, or it does not compile this.
    """
    nvrtc, version = _load_nvrtc()
    code = source.read_bytes()
    headers = {path.name: path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
    options = (*_OPTIONS, _architecture(nvrtc, capability))
    key = hashlib.sha256(repr((code, headers, options, version)).encode()).hexdigest()
    entry = None if cache is None else cache / key
    if entry is not None:
        kept = _read(entry)
        if kept is not None:
            return kept
    image = _compile(nvrtc, code, headers, options)
    if entry is not None:
        _keep(entry, image)
    return image


def cache_folder() -> Path | None:
    """Return where kernels are kept: the user's cache directory; None for one without a home."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home).absolute() / "gpubridge" / "kernels"


def _load_nvrtc() -> tuple[Any, tuple[int, int]]:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415  (looks for a library of 100 MB)
    except ImportError as error:
        raise _absent(error) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    # Whatever cuda-python's own loader raises where there is no library.
    except Exception as error:
        raise _absent(error) from error
    _check("nvrtcVersion", status)
    return nvrtc, (int(major), int(minor))


def _absent(error: Exception) -> KernelUnavailable:
    # The rest tells each place that was looked at.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return KernelUnavailable(
        f"NVRTC, which compiles the kernel, cannot be loaded ({reason}); install it: pip install "
        "nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)"
    )


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    """Return the option for machine code of this GPU; where NVRTC is older than it, for PTX."""
    status, known = nvrtc.nvrtcGetSupportedArchs()
    _check("nvrtcGetSupportedArchs", status)
    wanted = 10 * capability[0] + capability[1]
    if wanted in known:
        return f"--gpu-architecture=sm_{wanted}"
    older = [number for number in known if number < wanted]
    if not older:
        raise KernelUnavailable(
            f"NVRTC knows GPUs of compute capability {min(known) / 10:.1f} and newer, this one has "
            f"{capability[0]}.{capability[1]}; install an older nvidia-cuda-nvrtc"
        )
    return f"--gpu-architecture=compute_{max(older)}"


def _compile(
    nvrtc: Any, code: bytes, headers: Mapping[str, bytes], options: tuple[str, ...]
) -> bytes:
    names = [name.encode() for name in headers]
    status, program = nvrtc.nvrtcCreateProgram(
        code, b"kernel.cu", len(names), list(headers.values()), names
    )
    _check("nvrtcCreateProgram", status)
    try:
        arguments = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        if status:
            raise KernelUnavailable(f"NVRTC does not compile the kernel: {_log(nvrtc, program)}")
        kind = "CUBIN" if "=sm_" in options[-1] else "PTX"
        return _output(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    return _output(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n ")


def _output(nvrtc: Any, program: Any, kind: str) -> bytes:
    status, nbytes = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    _check(f"nvrtcGet{kind}Size", status)
    image = bytes(nbytes)  # which the bindings write into
    (status,) = getattr(nvrtc, f"nvrtcGet{kind}")(program, image)
    _check(f"nvrtcGet{kind}", status)
    return image


def _check(call: str, status: Any) -> None:
    if status:
        raise KernelUnavailable(f"{call} failed: {getattr(status, 'name', status)}")


def _read(entry: Path) -> bytes | None:
    """Return what is kept; None unless all of it is there, and nobody else can have written it."""
    try:
        for path in (entry.parent, entry):
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        kept = entry.read_bytes()
    except OSError:
        return None
    start = len(_MARK) + _DIGEST
    image = kept[start:]
    if kept[:start] != _MARK + hashlib.sha256(image).digest():
        return None
    return image


def _keep(entry: Path, image: bytes) -> None:
    """Write an entry whole, or not at all; whoever comes last wins with the same bytes."""
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent)
    except OSError:
        return  # it will be compiled again
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MARK + hashlib.sha256(image).digest() + image)
        Path(name).replace(entry)
    except OSError:
        Path(name).unlink(missing_ok=True)
