"""A check of the abilities of a device that processes share, by four new processes.

One exports memory and events, which others import; it also tries to pin memory. It forks these before it
uses the driver, which costs them no interpreter and no imports. They exchange lines of JSON. Patterns are random, so that no earlier contents of the memory pass for an answer. In the end one
importer is killed before its recorded work is complete, and one ends by itself after that, while a stream of
another one waits: the server relies on these cases when a stub ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

import gpubridge
from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream
from gpubridge.cuda_ipc.devices import Ability, find_device, is_under_mps
from gpubridge.cuda_ipc.driver import DriverAbsent, call, import_bindings
from gpubridge.cuda_ipc.events import SharedEvents
from gpubridge.cuda_ipc.pinned import PinnedMemory
from gpubridge.cuda_ipc.segment import DeviceSegment
from gpubridge.errors import BridgeError, ErrorCode

_SIZE = 2 << 20
_PATTERN = 64
# Offset of the pattern that is copied to the front after copies of half the segment.
_SOURCE = _SIZE // 2
_COPIES_BEFORE = 32
_NO_MEMORY = "not tried, since device memory is not shared"
_NO_EVENTS = "not tried, since events do not cross processes"
_LONGEST_SECONDS = 60
_KILLED = 2
"""The event whose recorder is killed."""
_LEFT = 3
"""The event whose recorder has completed its work and ended."""
_LOST_SECONDS = 0.5
"""Time in which a stream that waits for a killed process must not continue."""
_RELEASE_SECONDS = 5.0
_END_SECONDS = 2.0
_PAUSE = 0.02
# The directory that Python adds to its path is the user's, with modules of any name.
_PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from gpubridge.cuda_ipc.device_check import main; main(sys.argv[1:])"
)


@dataclass(frozen=True)
class DeviceCheck:
    """Abilities of a device that several processes use.

    - ``memory``, ``memory_fds``: a process uses memory of another by a legacy handle, or by a descriptor.
    - ``events``: streams wait for events of another process.
    - ``lost_events``: streams that wait for a killed process continue when another process records its
      events again, and not before; those that wait for a process that has ended continue then, too.
    - ``pinning``: shared host memory can be pinned.
    - ``tried``: false if the check failed for reasons that may pass.
    """

    memory: Ability
    memory_fds: Ability
    events: Ability
    lost_events: Ability
    pinning: Ability
    tried: ClassVar[bool] = True


class _NoCheck(DeviceCheck):
    tried = False


def check_device(device_uuid: str, timeout_seconds: float = 60.0) -> DeviceCheck:
    """Check a device with new processes, which are killed after ``timeout_seconds``.

    Takes a few seconds, and the memory of three contexts on the device at a time.
    """
    process = subprocess.Popen(
        check_command(device_uuid),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        end_check(process.pid)
        process.communicate()
        return no_check(f"the check did not end within {timeout_seconds:g} s")
    except BaseException:
        end_check(process.pid)
        process.communicate()
        raise
    return read_check(out, err, process.returncode)


def read_check(out: str, err: str, exit_code: int | None) -> DeviceCheck:
    """Return the result of a check from the output and exit code of its first process."""
    try:
        found = json.loads(out)
        if "untried" in found:
            return no_check(found["untried"])
        return DeviceCheck(**{field.name: Ability(found[field.name]) for field in _FACTS})
    except (ValueError, KeyError):
        lines = err.strip().splitlines() or ["the check ended without output"]
        return no_check(f"{lines[-1]} (exit code {exit_code})")


def check_command(device_uuid: str) -> list[str]:
    """Return the command of the first process of a check, independent of the current folder."""
    home = str(Path(gpubridge.__file__).parent.parent)
    return [sys.executable, "-c", _PROGRAM, home, device_uuid]


def end_check(pid: int) -> None:
    """Kill the processes of a check by the pid of the first, which was not waited for yet.

    All are in its process group, and each may hang in the driver.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def no_check(reason: str) -> DeviceCheck:
    """Return the result of a check that could not be completed."""
    return _NoCheck(*(Ability(reason) for _ in _FACTS))


_FACTS = fields(DeviceCheck)


def main(arguments: list[str]) -> None:
    """Run the first process of a check, which prints the result for `read_check`."""
    (device_uuid,) = arguments
    # The alarm ends a process that hangs in the driver, also after its parent has died.
    signal.alarm(_LONGEST_SECONDS)
    try:
        found = _export(device_uuid)
    except BridgeError as error:
        # There is not enough device memory now.
        found = {"untried": error.message}
    json.dump(found, sys.stdout)


def _export(device_uuid: str) -> dict[str, str]:
    # Once for all three; each says for itself that there are none.
    with contextlib.suppress(DriverAbsent):
        import_bindings()
    with contextlib.ExitStack() as ending:
        first, second, third = (ending.enter_context(_Peer(device_uuid)) for _ in range(3))
        first.begin()
        second.begin()
        return _exported(device_uuid, first, second, third)


def _exported(device_uuid: str, first: _Peer, second: _Peer, third: _Peer) -> dict[str, str]:
    try:
        exporter = _Exporter(device_uuid)
        memory = _reason(lambda: exporter.share_memory(first, by_fd=False))
        memory_fds = _reason(lambda: exporter.share_memory(first, by_fd=True))
        events = (
            _NO_MEMORY if memory and memory_fds else _reason(lambda: exporter.share_events(first))
        )
        lost = _NO_EVENTS if events else _reason(lambda: exporter.lose_events(first, second))
        lost = lost or _reason(lambda: exporter.leave_events(third, second))
        pinning = _reason(exporter.pin)
    except BridgeError as error:
        _reraise_unavailable(error)
        memory = memory_fds = events = lost = pinning = error.message
    return {
        "memory": memory,
        "memory_fds": memory_fds,
        "events": events,
        "lost_events": lost,
        "pinning": pinning,
    }


class _Lines:
    """Messages from and to another process."""

    def __init__(self, inbound: IO[str], outbound: IO[str]) -> None:
        self._inbound = inbound
        self._outbound = outbound
        self._end_reason = BridgeError("the other process has ended")

    def send(self, message: dict[str, Any]) -> None:
        # A process that has ended has sent the reason, which is received next.
        with contextlib.suppress(BrokenPipeError):
            self._outbound.write(json.dumps(message) + "\n")
            self._outbound.flush()

    def receive(self) -> dict[str, Any]:
        line = self._inbound.readline()
        if not line:
            raise self._end_reason
        message: dict[str, Any] = json.loads(line)
        if message.get("error"):
            self._end_reason = BridgeError(message["error"], ErrorCode(message["code"]))
            raise self._end_reason
        return message

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the answer; raises BridgeError."""
        self.send(message)
        return self.receive()


class _Peer(_Lines):
    """An importing process and a socket to send it descriptors; ends with this context.

    It is forked: neither this process nor the other one may have used the driver before. It uses that from
    `begin` on.
    """

    def __init__(self, device_uuid: str) -> None:
        self.fds, its_fds = socket.socketpair()
        (told, outbound), (inbound, tell) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            for fd in (outbound, inbound, self.fds.detach()):
                os.close(fd)
            _import(device_uuid, os.fdopen(told), os.fdopen(tell, "w"), its_fds)
        its_fds.close()
        os.close(told)
        os.close(tell)
        super().__init__(os.fdopen(inbound), os.fdopen(outbound, "w"))

    def __enter__(self) -> _Peer:
        return self

    def begin(self) -> None:
        """Let the process make its context."""
        self.send({})

    def leave(self) -> None:
        """Let the process close what it has opened and end, as a stub does, and wait until it is gone."""
        self._outbound.close()
        select.select([self._inbound], [], [], _END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        pid, self._pid = self._pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def __exit__(self, *_: object) -> None:
        # It ends now, unless it hangs in the driver.
        with contextlib.suppress(BrokenPipeError):
            self.leave()
        self.kill()
        self._inbound.close()
        self.fds.close()


def _import(device_uuid: str, inbound: IO[str], outbound: IO[str], fds: socket.socket) -> NoReturn:
    """Run an importing process to its end."""
    code = 1
    try:
        signal.alarm(_LONGEST_SECONDS)
        try:
            # Nothing is said where this process is not needed.
            if inbound.readline():
                _Importer(device_uuid, inbound, outbound, fds).run()
        except BridgeError as error:
            json.dump({"error": error.message, "code": error.code}, outbound)
        outbound.flush()
        code = 0
    except Exception:  # noqa: BLE001  (nothing may return into code of the first process)
        traceback.print_exc()
    finally:
        os._exit(code)


class _Device:
    """The device and a stream, in each of the processes."""

    def __init__(self, device_uuid: str) -> None:
        self.context = DeviceContext(find_device(device_uuid))
        self.copies = CopyStream(self.context)
        # Address of the shared memory in this process.
        self.pointer = 0

    def write(self, pointer: int, data: bytes) -> None:
        self.copies.h2d(pointer, memoryview(data), len(data))
        self.copies.wait()

    def read(self, pointer: int) -> bytes:
        data = bytearray(_PATTERN)
        self.copies.d2h(memoryview(data), pointer, _PATTERN)
        self.copies.wait()
        return bytes(data)

    def begin_slowly(self, pointer: int, pattern: bytes, events: SharedEvents, number: int) -> None:
        """Start a slow series of copies, the last of a pattern to the front; record an event behind it."""
        self.write(pointer + _SOURCE, pattern)
        for _ in range(_COPIES_BEFORE):
            self.copies.d2d(pointer + _PATTERN, pointer + _SOURCE, _SOURCE - _PATTERN)
        self.copies.d2d(pointer, pointer + _SOURCE, _PATTERN)
        events.record(number, self.copies.handle)


class _Exporter(_Device):
    def share_memory(self, peer: _Peer, *, by_fd: bool) -> None:
        segment = DeviceSegment.allocate(self.context, 0, _SIZE, by_fd=by_fd)
        pattern = os.urandom(_PATTERN)
        self.write(segment.pointer, pattern)
        if by_fd:
            with contextlib.suppress(OSError):
                socket.send_fds(peer.fds, [b"m"], segment.fds)
        seen = peer.request(memory=segment.handle.hex())["seen"]
        if seen != pattern.hex():
            raise BridgeError("the other process reads other bytes than were written")
        if self.read(segment.pointer) != pattern[::-1]:
            raise BridgeError("this process reads other bytes than the other one has written")
        self.pointer = segment.pointer

    def share_events(self, peer: _Peer) -> None:
        # Each process records one: a stub records events that the server has created.
        events = self._events = SharedEvents.create(self.context, _LEFT + 1)
        peer.request(events=[handle.hex() for handle in events.handles])
        pattern = os.urandom(_PATTERN)
        self.begin_slowly(self.pointer, pattern, events, 0)
        if peer.request(recorded=0)["seen"] != pattern.hex():
            raise BridgeError("a stream of the other process did not wait for the event")
        pattern = bytes.fromhex(peer.request(record=1)["written"])
        events.order(1, self.copies.handle)
        if self.read(self.pointer) != pattern:
            raise BridgeError(
                "a stream did not wait for an event that the other process has recorded"
            )

    def lose_events(self, recorder: _Peer, waiter: _Peer) -> None:
        """Kill a process before its work is complete; check when a stream that waits for it continues."""
        if is_under_mps(self.context.device):
            raise BridgeError("not tried: under MPS a process that is killed may take others along")
        events = self._events
        waiter.request(events=[handle.hex() for handle in events.handles])
        recorder.request(stall=_KILLED)
        waiter.request(order=_KILLED)
        recorder.kill()
        if _becomes_true(lambda: bool(waiter.request(passed=True)["passed"]), _LOST_SECONDS):
            raise BridgeError(
                "streams that wait for a killed process continue at once, with undefined data"
            )
        events.record(_KILLED, self.copies.handle)
        if not _becomes_true(lambda: bool(waiter.request(passed=True)["passed"]), _RELEASE_SECONDS):
            raise BridgeError(
                "streams that wait for a killed process do not continue when another one records its "
                "event again"
            )

    def leave_events(self, recorder: _Peer, waiter: _Peer) -> None:
        """Let a process complete its work and end; check that streams that wait for it then can be released."""
        recorder.begin()
        recorder.request(events=[handle.hex() for handle in self._events.handles])
        recorder.request(complete=_LEFT)
        recorder.leave()
        # Whether the driver lets this stream pass by itself does not matter: the server always records.
        waiter.request(order=_LEFT)
        self._events.record(_LEFT, self.copies.handle)
        if not _becomes_true(lambda: bool(waiter.request(passed=True)["passed"]), _RELEASE_SECONDS):
            raise BridgeError(
                "streams that wait for a process that has ended do not continue when another one records "
                "its event again"
            )

    def pin(self) -> None:
        # Like an arena: the whole of a segment of shared memory.
        with mmap.mmap(-1, _SIZE) as mapped:
            view = memoryview(mapped)
            pinned = PinnedMemory(self.context)
            try:
                if not pinned.pin(view):
                    raise BridgeError(pinned.reason)
            finally:
                pinned.close()
                view.release()


class _Importer(_Device):
    def __init__(
        self, device_uuid: str, inbound: IO[str], outbound: IO[str], fds: socket.socket
    ) -> None:
        super().__init__(device_uuid)
        self._lines = _Lines(inbound, outbound)
        self._fds = fds
        self._events: SharedEvents | None = None

    def run(self) -> None:
        """Answer requests until the exporter has ended."""
        while True:
            try:
                message = self._lines.receive()
            except BridgeError:
                if self._events is not None:
                    self._events.close()
                return
            try:
                answer = self._answer(message)
            except BridgeError as error:
                answer = {"error": error.message, "code": error.code}
            self._lines.send(answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if "memory" in message:
            pointer = self._open(bytes.fromhex(message["memory"])).pointer
            seen = self.read(pointer)
            self.write(pointer, seen[::-1])
            self.pointer = pointer
            return {"seen": seen.hex()}
        if "events" in message:
            handles = [bytes.fromhex(handle) for handle in message["events"]]
            self._events = SharedEvents.open(self.context, handles)
            return {}
        if "passed" in message:
            return {"passed": self.copies.done()}
        assert self._events is not None
        return self._use(message, self._events)

    def _use(self, message: dict[str, Any], events: SharedEvents) -> dict[str, Any]:
        if "record" in message:
            pattern = os.urandom(_PATTERN)
            self.begin_slowly(self.pointer, pattern, events, message["record"])
            return {"written": pattern.hex()}
        if "stall" in message:
            self._stall()
            events.record(message["stall"], self.copies.handle)
            return {}
        if "complete" in message:
            events.record(message["complete"], self.copies.handle)
            self.copies.wait()
            return {}
        if "order" in message:
            events.order(message["order"], self.copies.handle)
            return {}
        events.order(message["recorded"], self.copies.handle)
        return {"seen": self.read(self.pointer).hex()}

    def _stall(self) -> None:
        """Enqueue a host function that never returns."""
        forever = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p).value
        with self.context.pushed():
            call("cuLaunchHostFunc", self.copies.handle, forever, 0)

    def _open(self, handle: bytes) -> DeviceSegment:
        if handle:
            return DeviceSegment.open(self.context, 0, handle, _SIZE)
        _, (fd,), _, _ = socket.recv_fds(self._fds, 1, 1)
        try:
            return DeviceSegment.open_fd(self.context, 0, fd, _SIZE)
        finally:
            os.close(fd)


def _becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition; return whether it becomes true within a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _reason(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except BridgeError as error:
        _reraise_unavailable(error)
        return error.message
    return ""


def _reraise_unavailable(error: BridgeError) -> None:
    """Re-raise an error for lack of device memory, which says nothing about the driver."""
    if error.code is ErrorCode.UNAVAILABLE:
        raise error
