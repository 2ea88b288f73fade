"""The processes of `check_device`: one exports memory and events, two others use them.

The exporter, which also tries to pin memory, starts the others, and they exchange lines of JSON. What they see is random each time,
so that nothing left in the memory can be taken for an answer. At the end one of the two is killed before what it has recorded is
complete, while the other one's stream waits for it: what the server relies on when a stub dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream
from gpubridge.cuda_ipc.devices import check_command, find_device, is_under_mps
from gpubridge.cuda_ipc.driver import call
from gpubridge.cuda_ipc.events import SharedEvents
from gpubridge.cuda_ipc.pinned import PinnedMemory
from gpubridge.cuda_ipc.segment import DeviceSegment
from gpubridge.errors import BridgeError, ErrorCode

_SIZE = 2 << 20
_PATTERN = 64
# Where the pattern lies that is copied to the front, behind copies of a half of the segment.
_SOURCE = _SIZE // 2
_COPIES_BEFORE = 32
_NO_MEMORY = "not tried, since device memory is not shared"
_NO_EVENTS = "not tried, since events do not cross processes"
_LONGEST_SECONDS = 60
_KILLED = 2
"""The event whose recorder is killed."""
_LOOK_SECONDS = 0.5
"""As long a stream is watched that must not go on."""
_RELEASE_SECONDS = 5.0
_END_SECONDS = 2.0
_PAUSE = 0.02


def main(arguments: list[str]) -> None:
    """Run one of them; the exporter prints what works, as `check_device` reads it."""
    role, device_uuid, *descriptor = arguments
    # The system ends a process that hangs in the driver, also when its parent has died.
    signal.alarm(_LONGEST_SECONDS)
    if role == "import":
        try:
            with socket.socket(fileno=int(descriptor[0])) as fds:
                _Importer(device_uuid, sys.stdin, sys.stdout, fds).run()
        except BridgeError as error:
            json.dump({"error": error.message, "code": error.code}, sys.stdout)
        return
    try:
        found = _export(device_uuid)
    except BridgeError as error:
        # There is no memory for it now.
        found = {"untried": error.message}
    json.dump(found, sys.stdout)


def _export(device_uuid: str) -> dict[str, str]:
    with contextlib.ExitStack() as ending:
        # Two start at once: most of the time goes there.
        first, second = (ending.enter_context(_Peer(device_uuid)) for _ in range(2))
        return _exported(device_uuid, first, second)


def _exported(device_uuid: str, first: _Peer, second: _Peer) -> dict[str, str]:
    try:
        exporter = _Exporter(device_uuid)
        memory = _reason(lambda: exporter.share_memory(first, by_fd=False))
        memory_fds = _reason(lambda: exporter.share_memory(first, by_fd=True))
        events = (
            _NO_MEMORY if memory and memory_fds else _reason(lambda: exporter.share_events(first))
        )
        lost = _NO_EVENTS if events else _reason(lambda: exporter.lose_events(first, second))
        pinning = _reason(exporter.pin)
    except BridgeError as error:
        _pass_on_want(error)
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
        self._last_words = BridgeError("the other process has ended")

    def tell(self, message: dict[str, Any]) -> None:
        # Who has ended has said why, which is heard next.
        with contextlib.suppress(BrokenPipeError):
            self._outbound.write(json.dumps(message) + "\n")
            self._outbound.flush()

    def hear(self) -> dict[str, Any]:
        line = self._inbound.readline()
        if not line:
            raise self._last_words
        message: dict[str, Any] = json.loads(line)
        if message.get("error"):
            self._last_words = BridgeError(message["error"], ErrorCode(message["code"]))
            raise self._last_words
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        """Return what the other process answers; raises BridgeError."""
        self.tell(message)
        return self.hear()


class _Peer(_Lines):
    """A process that imports, and a socket for descriptors to it; it ends with this context."""

    def __init__(self, device_uuid: str) -> None:
        self.fds, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                check_command("import", device_uuid, str(theirs.fileno())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(theirs.fileno(),),
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        super().__init__(self.process.stdout, self.process.stdin)

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._outbound.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # It hangs in the driver.
            self.process.wait()
        self._inbound.close()
        self.fds.close()


class _Device:
    """Resources of all processes: device and stream."""

    def __init__(self, device_uuid: str) -> None:
        self.context = DeviceContext(find_device(device_uuid))
        self.copies = CopyStream(self.context)
        # Where memory lies here that both have.
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
        """Begin to copy a pattern to the front, behind much else; record an event of it."""
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
        seen = peer.ask(memory=segment.handle.hex())["seen"]
        if seen != pattern.hex():
            raise BridgeError("the other process reads other bytes than were written")
        if self.read(segment.pointer) != pattern[::-1]:
            raise BridgeError("what the other process has written is not seen")
        self.pointer = segment.pointer

    def share_events(self, peer: _Peer) -> None:
        # Either process records one: a stub records events that the server has made.
        events = self._events = SharedEvents.create(self.context, _KILLED + 1)
        peer.ask(events=[handle.hex() for handle in events.handles])
        pattern = os.urandom(_PATTERN)
        self.begin_slowly(self.pointer, pattern, events, 0)
        if peer.ask(recorded=0)["seen"] != pattern.hex():
            raise BridgeError("a stream of the other process did not wait for the event")
        pattern = bytes.fromhex(peer.ask(record=1)["written"])
        events.order(1, self.copies.handle)
        if self.read(self.pointer) != pattern:
            raise BridgeError("a stream did not wait for what the other process has recorded")

    def lose_events(self, recorder: _Peer, waiter: _Peer) -> None:
        """Kill a process before its work is complete; see when who waits for that goes on."""
        if is_under_mps(self.context.device):
            raise BridgeError("not tried: under MPS a process that is killed may take others along")
        events = self._events
        waiter.ask(events=[handle.hex() for handle in events.handles])
        recorder.ask(stall=_KILLED)
        waiter.ask(order=_KILLED)
        recorder.process.kill()
        recorder.process.wait()
        if _comes(lambda: bool(waiter.ask(passed=True)["passed"]), _LOOK_SECONDS):
            raise BridgeError(
                "streams that wait for a killed process go on by themselves, with undefined data"
            )
        events.record(_KILLED, self.copies.handle)
        if not _comes(lambda: bool(waiter.ask(passed=True)["passed"]), _RELEASE_SECONDS):
            raise BridgeError(
                "streams that wait for a killed process do not go on when another one records its "
                "event again"
            )

    def pin(self) -> None:
        # As arenas are: whole, and of memory that processes share.
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
        """Answer until the exporter has gone."""
        while True:
            try:
                message = self._lines.hear()
            except BridgeError:
                return
            try:
                answer = self._answer(message)
            except BridgeError as error:
                answer = {"error": error.message, "code": error.code}
            self._lines.tell(answer)

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
        if "order" in message:
            events.order(message["order"], self.copies.handle)
            return {}
        events.order(message["recorded"], self.copies.handle)
        return {"seen": self.read(self.pointer).hex()}

    def _stall(self) -> None:
        """Let the stream come to a function of the host that never returns."""
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


def _comes(look: Callable[[], bool], seconds: float) -> bool:
    """Return whether something comes to be within a time; raises what ``look`` raises."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _reason(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except BridgeError as error:
        _pass_on_want(error)
        return error.message
    return ""


def _pass_on_want(error: BridgeError) -> None:
    """Raise an error that says nothing of the driver: device memory is wanting."""
    if error.code is ErrorCode.UNAVAILABLE:
        raise error
