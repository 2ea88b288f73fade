"""The two processes of `check_device`: one exports memory and events, the other uses them.

The exporter, which also tries to pin memory, starts the importer, and they exchange lines of JSON. What they see is random each time,
so that nothing left in the memory can be taken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream
from gpubridge.cuda_ipc.devices import find_device
from gpubridge.cuda_ipc.events import SharedEvents
from gpubridge.cuda_ipc.pinned import PinnedMemory
from gpubridge.cuda_ipc.probe import check_command
from gpubridge.cuda_ipc.segment import DeviceSegment
from gpubridge.errors import BridgeError

__all__ = ["main"]

_SIZE = 2 << 20
_PATTERN = 64
# Where the pattern lies that is copied to the front, behind copies of a half of the segment.
_SOURCE = _SIZE // 2
_COPIES_BEFORE = 32
_NO_MEMORY = "not tried, since device memory is not shared"


def main(arguments: list[str]) -> None:
    """Run one of the two; the exporter prints what works, as `check_device` reads it."""
    role, device_uuid = arguments
    if role == "import":
        try:
            _Importer(device_uuid, sys.stdin, sys.stdout).run()
        except BridgeError as error:
            json.dump({"error": error.message}, sys.stdout)
        return
    json.dump(_export(device_uuid), sys.stdout)


def _export(device_uuid: str) -> dict[str, str]:
    with subprocess.Popen(
        check_command("import", device_uuid),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as importer:
        assert importer.stdin is not None
        assert importer.stdout is not None
        try:
            exporter = _Exporter(device_uuid, importer.stdin, importer.stdout)
            memory = _reason(exporter.share_memory)
            events = _NO_MEMORY if memory else _reason(exporter.share_events)
            pinning = _reason(exporter.pin)
        except BridgeError as error:
            memory, events, pinning = error.message, _NO_MEMORY, error.message
        finally:
            with contextlib.suppress(BrokenPipeError):
                importer.stdin.close()
    return {"memory": memory, "events": events, "pinning": pinning}


class _Device:
    """What both have: the device, a stream, and the other one's lines."""

    def __init__(self, device_uuid: str, inbound: IO[str], outbound: IO[str]) -> None:
        self.context = DeviceContext(find_device(device_uuid))
        self.copies = CopyStream(self.context)
        self._inbound = inbound
        self._outbound = outbound

    def tell(self, message: dict[str, Any]) -> None:
        # Who has ended has said why, which is heard next.
        with contextlib.suppress(BrokenPipeError):
            self._outbound.write(json.dumps(message) + "\n")
            self._outbound.flush()

    def hear(self) -> dict[str, Any]:
        line = self._inbound.readline()
        if not line:
            raise BridgeError("the other process has ended")
        message: dict[str, Any] = json.loads(line)
        if message.get("error"):
            raise BridgeError(message["error"])
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
    def __init__(self, device_uuid: str, outbound: IO[str], inbound: IO[str]) -> None:
        super().__init__(device_uuid, inbound, outbound)
        self._pointer = 0

    def share_memory(self) -> None:
        segment = DeviceSegment.allocate(self.context, 0, _SIZE)
        self._pointer = segment.pointer
        pattern = os.urandom(_PATTERN)
        self.write(segment.pointer, pattern)
        self.tell({"memory": segment.handle.hex()})
        seen = self.hear()["seen"]
        if seen != pattern.hex():
            raise BridgeError("the other process reads other bytes than were written")
        if self.read(segment.pointer) != pattern[::-1]:
            raise BridgeError("what the other process has written is not seen")

    def share_events(self) -> None:
        # Either process records one: a stub records events that the server has made.
        events = SharedEvents.create(self.context, 2)
        self.tell({"events": [handle.hex() for handle in events.handles]})
        self.hear()
        pattern = os.urandom(_PATTERN)
        self.begin_slowly(self._pointer, pattern, events, 0)
        self.tell({"recorded": 0})
        if self.hear()["seen"] != pattern.hex():
            raise BridgeError("a stream of the other process did not wait for the event")
        self.tell({"record": 1})
        pattern = bytes.fromhex(self.hear()["written"])
        events.order(1, self.copies.handle)
        if self.read(self._pointer) != pattern:
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
    def __init__(self, device_uuid: str, inbound: IO[str], outbound: IO[str]) -> None:
        super().__init__(device_uuid, inbound, outbound)
        self._pointer = 0
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
            handle = bytes.fromhex(message["memory"])
            self._pointer = DeviceSegment.open(self.context, 0, handle, _SIZE).pointer
            seen = self.read(self._pointer)
            self.write(self._pointer, seen[::-1])
            return {"seen": seen.hex()}
        if "events" in message:
            handles = [bytes.fromhex(handle) for handle in message["events"]]
            self._events = SharedEvents.open(self.context, handles)
            return {}
        assert self._events is not None
        if "record" in message:
            pattern = os.urandom(_PATTERN)
            self.begin_slowly(self._pointer, pattern, self._events, message["record"])
            return {"written": pattern.hex()}
        self._events.order(message["recorded"], self.copies.handle)
        return {"seen": self.read(self._pointer).hex()}


def _reason(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except BridgeError as error:
        return error.message
    return ""
