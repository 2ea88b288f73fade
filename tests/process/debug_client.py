"""A debugger for tests: as much of the debug adapter protocol as setting and meeting a breakpoint takes."""

import itertools
import json
import socket


class DebugClient:
    """Attached to a debuggee; ``address`` is ``host:port``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=150)
        self._stream = self._socket.makefile("rwb")
        self._numbers = itertools.count(1)
        self._seen: list[dict] = []

    def attach(self, path: str, line: int) -> None:
        """Attach with one breakpoint set, and let the debuggee run."""
        self.ask("initialize", adapterID="test")
        attach = self._send("attach", {"justMyCode": False})
        self.event("initialized")
        self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])
        self.ask("configurationDone")
        self._answer(attach)

    def ask(self, command: str, **arguments: object) -> dict:
        """Send a request; returns the body of its response."""
        return self._answer(self._send(command, arguments))

    def event(self, name: str) -> dict:
        """Wait for an event; returns its body."""
        return self._wait(lambda m: m["type"] == "event" and m["event"] == name).get("body", {})

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
        self._socket.close()

    def _send(self, command: str, arguments: dict) -> int:
        number = next(self._numbers)
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()
        return number

    def _answer(self, number: int) -> dict:
        answer = self._wait(lambda m: m["type"] == "response" and m["request_seq"] == number)
        assert answer["success"], answer
        return answer.get("body", {})

    def _wait(self, wanted) -> dict:
        for message in self._seen:
            if wanted(message):
                self._seen.remove(message)
                return message
        while True:
            length = 0
            while (line := self._stream.readline().strip()) != b"":
                length = int(line.partition(b":")[2])
            assert length, "the debuggee hung up"
            message = json.loads(self._stream.read(length))
            if wanted(message):
                return message
            self._seen.append(message)
