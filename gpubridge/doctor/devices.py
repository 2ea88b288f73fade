"""What GPUs can do here: tried by processes of their own, so that this one gets no context."""

from __future__ import annotations

import importlib.metadata
import itertools
import resource
from pathlib import Path

from gpubridge.cuda_ipc import (
    Ability,
    DeviceCheck,
    DeviceInfo,
    DeviceProbe,
    check_device,
    driver_release,
    is_exclusive,
    probe_devices,
    probe_peers,
)
from gpubridge.doctor.finding import Finding

__all__ = ["device_findings"]

_MODULE = Path("/proc/driver/nvidia/version")
# Releases before 12.8 have it all in one.
_BINDINGS = ("cuda-bindings", "cuda-python")
_PINNED_BYTES = 256 << 20
_NO_IPC = "tensors cross between processes in host memory; nothing else changes"
_NO_REGIONS = "clients' CUDA shared memory, which needs those handles, is refused"
_NO_EVENTS = "the process that makes a tensor waits for it before it passes it on; nothing to do"
_NO_PEERS = "models that pass tensors to each other on the GPU belong on the same one"


def device_findings() -> list[Finding]:
    """Look at the driver and at every GPU."""
    probe = probe_devices()
    findings = [_kernel_module(probe), _bindings(probe), _devices(probe), _locked_memory()]
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
        if probe.count:  # as on WSL, where it has another place
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
    detail = f"{version}, the driver knows CUDA {driver_release()}" if probe.count else version
    return Finding("cuda-python", works=True, detail=detail)


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
            f"{name}, pinned host memory",
            check.pinning,
            "shared memory is pinned",
            "copies between host and GPU are slower; raise ulimit -l, or loosen the sandbox",
        ),
    ]


def _memory(subject: str, check: DeviceCheck) -> Finding:
    """Say by what memory crosses: arenas take the first that works, clients' regions need the first."""
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
        return Finding(subject, works=True, detail=f"{what}: tried by two processes")
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


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    detail = f"{'unlimited' if unlimited else soft} bytes may be locked (RLIMIT_MEMLOCK)"
    # The driver pins pages itself and mostly heeds no limit, so a low one is no failure.
    enough = unlimited or soft >= _PINNED_BYTES
    advice = "" if enough else "where pinning fails on a GPU: ulimit -l unlimited before the start"
    return Finding("locked memory", works=True, detail=detail, advice=advice)
