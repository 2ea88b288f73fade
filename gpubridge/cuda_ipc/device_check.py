"""The two processes of `check_device`: one exports memory and events, the other uses them.

The exporter, which also tries to pin memory, starts the importer, and they exchange lines of JSON. What they see is random each time,
so that nothing left in the memory can be taken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream, PinnedMemory
from gpubridge.cuda_ipc.devices import check_command, find_device
from gpubridge.cuda_ipc.events import SharedEvents
from gpubridge.cuda_ipc.segment import DeviceSegment
from gpubridge.errors import BridgeError

_SIZE = 2 << 20
_PATTERN = 64
# Where the pattern lies that is copied to the front, behind copies of a half of the segment.
_SOURCE = _SIZE // 2
_COPIES_BEFORE = 32
_NO_MEMORY = "not tried, since device memory is not shared"


def main(arguments: list[str]) -> None:
    """Run one of the two; the exporter prints what works, as `check_device` reads it."""
    role, device_uuid, *descriptor = arguments
    if role == "import":
        try:
            with socket.socket(fileno=int(descriptor[0])) as fds:
                _Importer(device_uuid, sys.stdin, sys.stdout, fds).run()
        except BridgeError as error:
            json.dump({"error": error.message}, sys.stdout)
        return
    json.dump(_export(device_uuid), sys.stdout)


def _export(device_uuid: str) -> dict[str, str]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        importer = subprocess.Popen(
            check_command("import", device_uuid, str(theirs.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        with importer:
            return _exported(device_uuid, importer, ours)


def _exported(
    device_uuid: str, importer: subprocess.Popen[str], fds: socket.socket
) -> dict[str, str]:
    assert importer.stdin is not None
    assert importer.stdout is not None
    try:
        exporter = _Exporter(device_uuid, importer.stdout, importer.stdin, fds)
        memory = _reason(lambda: exporter.share_memory(by_fd=False))
        memory_fds = _reason(lambda: exporter.share_memory(by_fd=True))
        events = _NO_MEMORY if memory and memory_fds else _reason(exporter.share_events)
        pinning = _reason(exporter.pin)
    except BridgeError as error:
        memory = memory_fds = pinning = error.message
        events = _NO_MEMORY
    finally:
        with contextlib.suppress(BrokenPipeError):
            importer.stdin.close()
    return {"memory": memory, "memory_fds": memory_fds, "events": events, "pinning": pinning}


class _Device:
    """Resources of both processes: device, stream, line pipes, and a socket for descriptors."""

    def __init__(
        self, device_uuid: str, inbound: IO[str], outbound: IO[str], fds: socket.socket
    ) -> None:
        self.context = DeviceContext(find_device(device_uuid))
        self.copies = CopyStream(self.context)
        self.fds = fds
        # Where memory lies here that both have.
        self.pointer = 0
        self._inbound = inbound
        self._outbound = outbound
        self._last_words = "the other process has ended"

    def tell(self, message: dict[str, Any]) -> None:
        # Who has ended has said why, which is heard next.
        with contextlib.suppress(BrokenPipeError):
            self._outbound.write(json.dumps(message) + "\n")
            self._outbound.flush()

    def hear(self) -> dict[str, Any]:
        line = self._inbound.readline()
        if not line:
            raise BridgeError(self._last_words)
        message: dict[str, Any] = json.loads(line)
        if message.get("error"):
            self._last_words = message["error"]
            raise BridgeError(self._last_words)
        return message

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
    def share_memory(self, *, by_fd: bool) -> None:
        segment = DeviceSegment.allocate(self.context, 0, _SIZE, by_fd=by_fd)
        pattern = os.urandom(_PATTERN)
        self.write(segment.pointer, pattern)
        if by_fd:
            with contextlib.suppress(OSError):
                socket.send_fds(self.fds, [b"m"], segment.fds)
        self.tell({"memory": segment.handle.hex()})
        seen = self.hear()["seen"]
        if seen != pattern.hex():
            raise BridgeError("the other process reads other bytes than were written")
        if self.read(segment.pointer) != pattern[::-1]:
            raise BridgeError("what the other process has written is not seen")
        self.pointer = segment.pointer

    def share_events(self) -> None:
        # Either process records one: a stub records events that the server has made.
        events = SharedEvents.create(self.context, 2)
        self.tell({"events": [handle.hex() for handle in events.handles]})
        self.hear()
        pattern = os.urandom(_PATTERN)
        self.begin_slowly(self.pointer, pattern, events, 0)
        self.tell({"recorded": 0})
        if self.hear()["seen"] != pattern.hex():
            raise BridgeError("a stream of the other process did not wait for the event")
        self.tell({"record": 1})
        pattern = bytes.fromhex(self.hear()["written"])
        events.order(1, self.copies.handle)
        if self.read(self.pointer) != pattern:
            raise BridgeError("a stream did not wait for what the other process has recorded")

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
        super().__init__(device_uuid, inbound, outbound, fds)
        self._events: SharedEvents | None = None

    def run(self) -> None:
        """Answer until the exporter has gone."""
        while True:
            try:
                message = self.hear()
            except BridgeError:
                return
            try:
                answer = self._answer(message)
            except BridgeError as error:
                answer = {"error": error.message}
            self.tell(answer)

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
        assert self._events is not None
        if "record" in message:
            pattern = os.urandom(_PATTERN)
            self.begin_slowly(self.pointer, pattern, self._events, message["record"])
            return {"written": pattern.hex()}
        self._events.order(message["recorded"], self.copies.handle)
        return {"seen": self.read(self.pointer).hex()}

    def _open(self, handle: bytes) -> DeviceSegment:
        if handle:
            return DeviceSegment.open(self.context, 0, handle, _SIZE)
        _, (fd,), _, _ = socket.recv_fds(self.fds, 1, 1)
        try:
            return DeviceSegment.open_fd(self.context, 0, fd, _SIZE)
        finally:
            os.close(fd)


def _reason(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except BridgeError as error:
        return error.message
    return ""
