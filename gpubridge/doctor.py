"""What works on this machine, what does not and why, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import gpubridge
from gpubridge.cuda_ipc import probe_devices
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment
from gpubridge.tensor.native import absence
from gpubridge.transport.channel import Channel, pair

__all__ = ["Finding", "examine", "exit_code", "report"]

_SERVER_PACKAGES = (
    ("uvloop", "uvloop"),
    ("hpack", "hpack"),
    ("httptools", "httptools"),
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
)
# A busy server holds a descriptor per connection and a few per model instance.
_DESCRIPTORS = 1024
_PINNED_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    subject : str
        What was looked at.
    works : bool
        Whether it can be used.
    detail : str
        What was seen; the reason, where it does not work.
    advice : str
        What to do about it; empty where there is nothing to do.
    needed : bool
        Whether nothing can be served without it.
    """

    subject: str
    works: bool
    detail: str
    advice: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at everything; imports no framework, and loads the driver only to count GPUs."""
    return [
        _memfd(),
        _descriptor_passing(),
        _pidfd(),
        *(_server_package(module, package) for module, package in _SERVER_PACKAGES),
        _native(),
        _descriptor_limit(),
        _dev_shm(),
        _driver(),
        _devices(),
        _locked_memory(),
        _device_ipc(),
        *(_model_package(*row) for row in _MODEL_PACKAGES),
    ]


def report(findings: Iterable[Finding]) -> str:
    """Word the findings, the needed ones first."""
    findings = list(findings)
    python = f"Python {platform.python_version()} ({sys.executable})"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    lines = [f"gpubridge {gpubridge.__version__}, {python}, {system}"]
    for title, needed in (("needed to serve", True), ("faster, or on a GPU, or for models", False)):
        lines += ["", title]
        for finding in findings:
            if finding.needed == needed:
                lines += _lines(finding)
    broken = [finding.subject for finding in findings if finding.needed and not finding.works]
    lines += ["", f"cannot serve: {', '.join(broken)}" if broken else "models can be served here"]
    return "\n".join(lines)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something is missing that serving needs, else 0."""
    return int(any(finding.needed and not finding.works for finding in findings))


def _lines(finding: Finding) -> list[str]:
    verdict = "works" if finding.works else "no"
    lines = [f"  {verdict:5}  {finding.subject}: {finding.detail}"]
    if finding.advice:
        lines.append(f"         -> {finding.advice}")
    return lines


def _needed(subject: str, attempt: Callable[[], str], advice: str) -> Finding:
    """Try something that serving needs; ``attempt`` returns what it saw."""
    try:
        return Finding(subject, works=True, detail=attempt(), needed=True)
    except BridgeError as error:
        reason = f"{error.message}: {error.__cause__}" if error.__cause__ else error.message
    except (OSError, AttributeError) as error:
        reason = str(error)
    return Finding(subject, works=False, detail=reason, advice=advice, needed=True)


def _memfd() -> Finding:
    def attempt() -> str:
        segment = Segment.create(0, 4096)
        try:
            Segment.open(0, os.dup(segment.fd), segment.size).close()
        finally:
            segment.close()
        return "made, sealed against resizing, mapped twice"

    advice = "use Linux 3.17 or newer; in a sandbox, allow memfd_create and F_ADD_SEALS"
    return _needed("shared memory (memfd)", attempt, advice)


def _descriptor_passing() -> Finding:
    def attempt() -> str:
        ends = [Channel(end) for end in pair()]
        source, sink = os.pipe()
        try:
            ends[0].send(b"\x01", [source])
            _, received = ends[1].receive()
            for fd in received:
                os.close(fd)
            if len(received) != 1:
                raise OSError(f"one descriptor was sent, {len(received)} came")
        finally:
            for fd in (source, sink):
                os.close(fd)
            for end in ends:
                end.close()
        return "a descriptor crossed a socket pair (SCM_RIGHTS over SEQPACKET)"

    return _needed(
        "channel to stubs", attempt, "in a sandbox, allow AF_UNIX SOCK_SEQPACKET sockets"
    )


def _pidfd() -> Finding:
    def attempt() -> str:
        os.close(os.pidfd_open(os.getpid()))
        return "the end of a stub is seen at once"

    advice = "use Linux 5.3 or newer; in a sandbox, allow pidfd_open"
    return _needed("supervision (pidfd)", attempt, advice)


def _server_package(module: str, package: str) -> Finding:
    version = _installed(module, package)
    if version is None:
        advice = f"pip install {package}, or install gpubridge again"
        return Finding(package, works=False, detail="not installed", advice=advice, needed=True)
    return Finding(package, works=True, detail=version, needed=True)


def _native() -> Finding:
    reason = absence()
    if reason is None:
        return Finding("compiled module", works=True, detail="gpubridge._native is loaded")
    advice = "nothing breaks, small requests, BYTES tensors and DLPack are slower; install with a C++17 compiler"
    return Finding("compiled module", works=False, detail=reason, advice=advice)


def _descriptor_limit() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_amount(soft)} open files, at most {_amount(hard)} (RLIMIT_NOFILE)"
    if soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS:
        return Finding("descriptors", works=True, detail=detail)
    advice = f"each connection takes one: ulimit -n {_DESCRIPTORS} or more before the start"
    return Finding("descriptors", works=False, detail=detail, advice=advice)


def _dev_shm() -> Finding:
    subject = "/dev/shm"  # noqa: S108  (nothing is written there)
    try:
        stat = os.statvfs(subject)
    except OSError as error:
        advice = "only clients' system shared memory would use it; mount a tmpfs there"
        return Finding(subject, works=False, detail=str(error), advice=advice)
    free = (stat.f_bavail * stat.f_frsize) >> 20
    detail = f"{free} MiB free, for clients' system shared memory; gpubridge leaves nothing there"
    return Finding(subject, works=True, detail=detail)


def _driver() -> Finding:
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        detail = "the NVIDIA kernel module is not loaded, or not seen in here"
        advice = "for a GPU: install the driver; in a container, start it with access to the GPUs"
        return Finding("driver", works=False, detail=detail, advice=advice)
    return Finding("driver", works=True, detail=line.removeprefix("NVRM version: "))


def _devices() -> Finding:
    probe = probe_devices()
    if probe.count:
        return Finding("GPUs", works=True, detail=f"{probe.count} found")
    advice = "without one, KIND_CPU and KIND_AUTO models run; KIND_GPU needs --gpu-fallback=host"
    return Finding("GPUs", works=False, detail=probe.reason, advice=advice)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = f"{_amount(soft)} bytes may be locked (RLIMIT_MEMLOCK)"
    enough = soft == resource.RLIM_INFINITY or soft >= _PINNED_BYTES
    # The driver pins pages itself and mostly heeds no limit, so a low one is no failure.
    advice = "" if enough else "where pinning fails on a GPU: ulimit -l unlimited before the start"
    return Finding("locked memory", works=True, detail=detail, advice=advice)


def _device_ipc() -> Finding:
    detail = "tensors cross in host memory; CUDA IPC comes with device tensors, in a later version"
    return Finding("tensors on the GPU", works=False, detail=detail)


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
    # Distributions are named after the CUDA release they were built for: cupy-cuda13x.
    for name in importlib.metadata.packages_distributions().get(module.partition(".")[0], []):
        if name.lower().replace("_", "-").startswith(package):
            return importlib.metadata.version(name)
    return "installed, version unknown"


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
