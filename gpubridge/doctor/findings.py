"""Checks of this machine: the system, the packages, the GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpubridge.cuda_ipc import (
    Ability,
    DeviceInfo,
    DeviceProbe,
    driver_release,
    is_exclusive,
    probe_devices,
    probe_peers,
)
from gpubridge.cuda_ipc.device_check import DeviceCheck, check_device
from gpubridge.cuda_ipc.devices import image_extra, installed_releases, too_new
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment
from gpubridge.tensor.native import BUILD_ADVICE, import_failure
from gpubridge.transport.channel import Channel, pair

# A busy server holds a descriptor per connection and a few per model instance.
_DESCRIPTORS = 1024

_SERVER_PACKAGES = (
    ("uvloop", "uvloop"),
    ("orjson", "orjson"),
    ("numpy", "numpy"),
    ("google.protobuf", "protobuf"),
)

_MODEL_PACKAGES = (
    ("torch", "torch", "pip install torch, for the backend pytorch or if your models use it"),
    ("onnxruntime", "onnxruntime", "pip install 'gpubridge[onnx]', for the backend onnxruntime"),
    ("cupy", "cupy", "pip install cupy-cuda13x (or cupy-cuda12x), if your models use it"),
    ("PIL", "pillow", "pip install 'gpubridge[image]', for the backend image_preproc"),
    ("pynvml", "nvidia-ml-py", "pip install nvidia-ml-py, for the metrics of GPUs"),
)

_IMAGE_LIBRARIES = (
    ("nvidia-cuda-nvrtc", "to work on images on a GPU"),
    ("nvidia-nvimgcodec", "to decode images on a GPU"),
    ("nvidia-nvjpeg", "to decode JPEG on a GPU"),
)
_MODULE = Path("/proc/driver/nvidia/version")

# Releases before 12.8 are one distribution.
_BINDINGS = ("cuda-bindings", "cuda-python")
_NO_IPC = "tensors cross between processes in host memory; nothing else changes"
_NO_REGIONS = "clients' CUDA shared memory, which needs those handles, is refused"
_NO_EVENTS = "the process that makes a tensor waits for it before it passes it on; nothing to do"
_NO_LOSS = (
    "streams do not wait for other processes: the process that makes a tensor waits for it before it "
    "passes it on; nothing to do"
)
_NO_PEERS = "models that pass tensors to each other on the GPU belong on the same one"


@dataclass(frozen=True)
class Finding:
    """One line of the report: the subject, and the observation or the reason why it does not work.

    ``advice``: a remedy; ``needed``: whether serving needs it.
    """

    subject: str
    works: bool
    detail: str
    advice: str = ""
    needed: bool = False


def host_findings() -> list[Finding]:
    """Check the system."""
    return [_memfd(), _descriptor_passing(), _pidfd(), _native(), _descriptor_limit(), _dev_shm()]


def _needed(subject: str, attempt: Callable[[], str], advice: str) -> Finding:
    """Check something that serving needs; ``attempt`` returns the observation."""
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


def _native() -> Finding:
    subject = "compiled module"
    if (reason := import_failure()) is not None:
        return Finding(subject, works=False, detail=reason, advice=BUILD_ADVICE, needed=True)
    return Finding(subject, works=True, detail="gpubridge._native is loaded", needed=True)


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


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def package_findings() -> list[Finding]:
    """Check the packages that the server and models import."""
    return [
        *(_server_package(module, package) for module, package in _SERVER_PACKAGES),
        *(_model_package(*row) for row in _MODEL_PACKAGES),
        *(_image_library(*row) for row in _IMAGE_LIBRARIES),
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
    """Return the version of an importable module without importing it; None if there is none."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # a parent package is absent
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # Distributions may be named after a CUDA release: cupy-cuda13x. Finding those reads the records of
    # all distributions.
    for name in importlib.metadata.packages_distributions().get(module.partition(".")[0], []):
        if name.lower().replace("_", "-").startswith(package):
            return importlib.metadata.version(name)
    return "installed, version unknown"


def _image_library(package: str, purpose: str) -> Finding:
    found = installed_releases(package)
    if not found:
        advice = f"pip install {image_extra()}, {purpose}"
        return Finding(package, works=False, detail="not installed", advice=advice)
    # The newest is loaded.
    advice = too_new(max(found.values()))
    detail = ", ".join(sorted(found))
    return Finding(package, works=not advice, detail=detail, advice=advice)


def device_findings() -> list[Finding]:
    """Check the driver and every GPU."""
    probe = probe_devices()
    findings = [_kernel_module(probe), _bindings(probe), _devices(probe)]
    for device in probe.devices:
        findings += _abilities(device)
    if len(probe.devices) > 1:
        findings.append(_peers(probe.devices))
    return findings


def _kernel_module(probe: DeviceProbe) -> Finding:
    try:
        line = _MODULE.read_text().splitlines()[0]
    except (OSError, IndexError):
        detail = "the NVIDIA kernel module is not loaded, or not seen in here"
        if probe.count:  # as on WSL, which has another path
            return Finding("driver", works=True, detail=detail)
        advice = "for a GPU: install the driver; in a container, start it with access to the GPUs"
        return Finding("driver", works=False, detail=detail, advice=advice)
    return Finding("driver", works=True, detail=line.removeprefix("NVRM version: "))


def _bindings(probe: DeviceProbe) -> Finding:
    installed = [_version(name) for name in _BINDINGS]
    version = next(filter(None, installed), None)
    if version is None:
        advice = "for a GPU: pip install 'gpubridge[gpu]'"
        return Finding("cuda-python", works=False, detail="not installed", advice=advice)
    if not probe.count:
        return Finding("cuda-python", works=True, detail=version)
    known = driver_release()
    # Newer bindings mostly work: they look up each function in the driver.
    newer = int(version.partition(".")[0]) > int(known.partition(".")[0])
    advice = (
        "if calls fail: pip install 'cuda-python<13', which is for this driver" if newer else ""
    )
    detail = f"{version}, the driver knows CUDA {known}"
    return Finding("cuda-python", works=True, detail=detail, advice=advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(probe: DeviceProbe) -> Finding:
    if not probe.count:
        advice = (
            "without one, KIND_CPU and KIND_AUTO models run; KIND_GPU needs --gpu-fallback=host"
        )
        return Finding("GPUs", works=False, detail=probe.reason, advice=advice)
    names = ", ".join(
        f"{device.ordinal}: {device.name}, {device.nbytes >> 20} MiB, {device.uuid}"
        for device in probe.devices
    )
    return Finding("GPUs", works=True, detail=f"{probe.count} found ({names})")


def _abilities(device: DeviceInfo) -> list[Finding]:
    name = f"GPU {device.ordinal}"
    if is_exclusive(device):
        return [
            Finding(
                f"{name}, several processes",
                works=False,
                detail="it is in exclusive mode: one process has it for itself",
                advice=f"each model instance is a process: nvidia-smi -i {device.uuid} -c DEFAULT, "
                "or run MPS",
            )
        ]
    check = check_device(device.uuid)
    return [
        _memory(f"{name}, tensors between processes", check),
        _ability(f"{name}, order between processes", check.events, "CUDA IPC events", _NO_EVENTS),
        _ability(
            f"{name}, order after a killed process",
            check.lost_events,
            "who waits for it goes on when its events are recorded again",
            _NO_LOSS,
        ),
        _ability(
            f"{name}, pinned host memory",
            check.pinning,
            "shared memory is pinned",
            "copies between host and GPU are slower; raise the container's limit of memory, or "
            "loosen the sandbox",
        ),
    ]


def _memory(subject: str, check: DeviceCheck) -> Finding:
    """Report the handles of device memory: arenas use the first that works, clients need legacy ones."""
    handles, fds = check.memory, check.memory_fds
    if handles.works:
        detail = "by legacy IPC handles: tried by two processes"
        more = (
            "VMM file descriptors, too" if fds.works else f"no VMM file descriptors: {fds.reason}"
        )
        return Finding(subject, works=True, detail=f"{detail}; {more}")
    if fds.works:
        detail = "by VMM file descriptors: tried by two processes; no legacy IPC handles: "
        return Finding(subject, works=True, detail=detail + handles.reason, advice=_NO_REGIONS)
    detail = f"no legacy IPC handles: {handles.reason}; no VMM file descriptors: {fds.reason}"
    return Finding(subject, works=False, detail=detail, advice=_NO_IPC)


def _ability(subject: str, ability: Ability, what: str, advice: str) -> Finding:
    if ability.works:
        return Finding(subject, works=True, detail=f"{what}: tried")
    return Finding(subject, works=False, detail=ability.reason, advice=advice)


def _peers(devices: tuple[DeviceInfo, ...]) -> Finding:
    apart = [
        f"{one.ordinal} and {other.ordinal}"
        for one, other in itertools.combinations(devices, 2)
        if not (probe_peers(one, other).works and probe_peers(other, one).works)
    ]
    if not apart:
        return Finding("GPUs among themselves", works=True, detail="each reaches each one's memory")
    detail = f"these do not reach each other's memory: {', '.join(apart)}"
    return Finding("GPUs among themselves", works=False, detail=detail, advice=_NO_PEERS)
