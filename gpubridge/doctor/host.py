"""What the system gives: shared memory, descriptors, limits, the compiled module."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

from gpubridge.doctor.finding import Finding
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment
from gpubridge.tensor.native import BUILD_ADVICE, import_failure
from gpubridge.transport.channel import Channel, pair

__all__ = ["host_findings"]

# A busy server holds a descriptor per connection and a few per model instance.
_DESCRIPTORS = 1024


def host_findings() -> list[Finding]:
    """Look at the system."""
    return [
        _memfd(),
        _descriptor_passing(),
        _pidfd(),
        _native(),
        _descriptor_limit(),
        _dev_shm(),
    ]


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
