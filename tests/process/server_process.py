"""The process of a gpubridge server that tests use: it is started, asked, looked at, and ended for sure."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests import server_starts
from tests.forks import Fork, adopt, execute
from tests.process.forked_commands import fork_command
from tests.waits import poll

if TYPE_CHECKING:
    from tests.simcuda.machine import Machine

# With one of these, a copy of a process differs from one that has started.
_AS_STARTED = ("LD_PRELOAD", "COVERAGE_")
STARTED = ("-m", "gpubridge")
"""What an interpreter is given before the command, for a server that is not to be forked."""

_START_SECONDS = 120
_STOP_SECONDS = 60


class Server:
    """A running server; ``http_url``, ``grpc_url`` and ``metrics_url`` are ``host:port``.

    ``machine`` is the simulated one that it is on, if it is on one.
    """

    def __init__(self, process: Fork, folder: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.folder = folder
        self.repositories: Sequence[Path] = ()
        self.machine: Machine | None = None
        self._log_path = folder / "log"
        self._log_start = 0
        self.http_url = ""
        self.metrics_url = ""
        self.grpc_url = ""

    @classmethod
    def taken_over(cls, folder: Path, described: dict) -> Server:
        """Return a server that another worker has started, and described, in a folder."""
        server = cls(adopt(Path(described["parent"]), described["pid"]), folder)
        server.http_url, server.grpc_url, server.metrics_url = described["urls"]
        if described["machine"]:
            from tests.simcuda.machine import Machine

            server.machine = Machine(Path(described["machine"]))
        return server

    def described(self) -> dict:
        """Return what `taken_over` needs."""
        return {
            "pid": self.pid,
            "parent": str(self.process.parent),
            "urls": [self.http_url, self.grpc_url, self.metrics_url],
            "machine": self.machine and str(self.machine.folder),
        }

    def lent(self, repository: Path) -> Server:
        """Return the same server for a test that has a repository of its own: its log, and the calls of
        its machine's driver, begin here."""
        lent = copy.copy(self)
        lent.repositories = [repository]
        lent._log_start = self._log_path.stat().st_size
        if self.machine is not None:
            self.machine.begin()
        return lent

    def log(self) -> str:
        """Return the output of the server and its models so far, from where it was lent to the test."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def stubs(self) -> list[int]:
        """Process ids of its stubs (its live children)."""
        return [pid for pid in children(self.pid) if alive(pid)]

    def request(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict | None = None
    ) -> tuple[int, dict, bytes]:
        """Send one HTTP request on a connection of its own; returns status, headers, body."""
        return send_request(self.http_url, method, path, body, headers)

    def ask(self, code: str, model: str = "m") -> tuple[int, str]:
        """Have a model of :func:`write_code_model` run some code; returns status, answer or error."""
        tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
        path = f"/v2/models/{model}/infer"
        status, _, body = self.request("POST", path, json.dumps({"inputs": [tensor]}))
        answer = json.loads(body)
        return status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]

    def is_ready(self, model: str | None = None) -> bool:
        """Return whether the server, or one of its models, says that it is ready."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        try:
            return self.request("GET", path)[0] == 200
        except ConnectionError:
            return False

    def index(self) -> dict[tuple[str, int], dict]:
        """The repository index: row by name and version (0 when it has none)."""
        rows = json.loads(self.request("POST", "/v2/repository/index")[2])
        return {(row["name"], int(row.get("version", 0))): row for row in rows}

    def metrics(self) -> dict[str, float]:
        """The metrics page: value by ``name{labels}``."""
        # Servers with the flags FORWARDING ask for this field.
        key = {"X-Secret": "w"}
        page = send_request(self.metrics_url, "GET", "/metrics", None, key)[2].decode()
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def open_requests(self, model: str = "m") -> float:
        """Return how many requests to the model's first version are not answered yet."""
        return self.metrics()[f'gpubridge_open_requests{{model="{model}",version="1"}}']

    def copied(self, model: str) -> float:
        """Return how many bytes were copied in host memory for the model's first version."""
        labels = f'{{kind="host",model="{model}",version="1"}}'
        return self.metrics()["gpubridge_copied_bytes_total" + labels]

    def statistics(self, model: str) -> dict:
        """Return the statistics of a model that has one version."""
        (found,) = json.loads(self.request("GET", f"/v2/models/{model}/stats")[2])["model_stats"]
        return found

    def unload_all(self) -> None:
        """Unload its models, and wait for the end of their processes and of what these log."""
        for name, _ in self.index():
            self.request("POST", f"/v2/repository/models/{name}/unload")
        wait_until(self.has_unloaded, "the models to end", self)

    def has_unloaded(self) -> bool:
        """Return whether the models that were unloaded have ended, and all that they said is logged."""
        states = {row.get("state") for row in self.index().values()}
        return not self.stubs() and "UNLOADING" not in states

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_STOP_SECONDS)

    def end(self) -> None:
        """End it and all its processes; a machine that it is on goes with it."""
        stubs = descendants(self.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        self.process.close()
        for pid in stubs:
            wait_until(lambda pid=pid: not alive(pid), f"stub {pid} to be gone")
        if self.machine is not None:
            self.machine.end()


def send_request(
    url: str, method: str, path: str, body: bytes | str | None = None, headers: dict | None = None
) -> tuple[int, dict, bytes]:
    """Send one HTTP request to ``host:port`` on a connection of its own; returns status, headers, body."""
    connection = http.client.HTTPConnection(url, timeout=150)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def start_server(
    words: Sequence[str],
    folder: Path,
    environment: dict[str, str] | None = None,
    command: Sequence[str] = (),
    name: str = "serve",
    *,
    stays: bool = False,
) -> Server:
    """Start a server that logs into a folder, wait for its endpoints, and return it.

    With ``stays`` it ends with the run of tests at the latest, without it with this process.
    """
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    server_starts.count()
    with (folder / "log").open("wb") as log, Path(os.devnull).open() as nothing:
        words = [*name.split(), *ports, *words]
        streams = nothing.fileno(), log.fileno(), log.fileno()
        process = _start(command, words, streams, {**os.environ, **(environment or {})}, stays)
    server = Server(process, folder)
    try:
        _wait_for_endpoints(server)
    except BaseException:
        server.end()
        raise
    return server


def _start(
    command: Sequence[str],
    words: Sequence[str],
    streams: Sequence[int],
    environment: dict[str, str],
    stays: bool,
) -> Fork:
    set_apart = {name for name in environment if name.startswith(_AS_STARTED)}
    if command or any(map(environment.get, set_apart)):
        interpreter = [*(command or STARTED), *words]
        return execute(interpreter, environment, streams, stays=stays)
    # Empty ones are as none.
    variables = {name: environment[name] for name in environment.keys() - set_apart}
    return fork_command(words, streams, environment=variables, stays=stays)


def _wait_for_endpoints(server: Server) -> None:
    def found() -> bool:
        log = server.log()
        http_endpoint = re.search(r"Started HTTPService at (\S+)", log)
        metrics_endpoint = re.search(r"Started Metrics Service at (\S+)", log)
        if http_endpoint and metrics_endpoint:
            grpc_endpoint = re.search(r"Started GRPCInferenceService at (\S+)", log)
            server.grpc_url = grpc_endpoint[1] if grpc_endpoint else ""
            server.http_url, server.metrics_url = http_endpoint[1], metrics_endpoint[1]
            return True
        return False

    wait_until(found, "the server's endpoints", server)


def wait_until(condition, what: str, server: Server | None = None) -> None:
    """Wait until ``condition()`` holds; fails with the server's log when it does not come true."""

    def is_over() -> bool:
        if condition():
            return True
        if server is not None and server.process.poll() is not None:
            raise AssertionError(
                f"waited for {what}; the server exited with {server.process.returncode}:\n"
                f"{server.log()}"
            )
        return False

    if not poll(is_over, _START_SECONDS):
        log = server.log() if server is not None else ""
        raise AssertionError(f"waited {_START_SECONDS} s for {what}\n{log}")


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, without fork servers."""
    return [child for child in _all_children(pid) if not is_fork_server(child)]


def is_fork_server(pid: int) -> bool:
    """Return whether a process forks stubs; it may end meanwhile."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "gpubridge-forks\n"
    except OSError:
        return False


def _all_children(pid: int) -> list[int]:
    found = []
    # It, or a thread of it, may end meanwhile.
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(word) for word in task.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, and of theirs, with fork servers."""
    found = _all_children(pid)
    for child in found:
        found += _all_children(child)
    return found


def open_files(pid: int) -> list[str]:
    """Return the targets of a process's descriptors: paths, ``socket:[…]``, ``/memfd:…``, one for each.

    One that has ended has none.
    """
    found = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            # It may be closed meanwhile.
            with suppress(OSError):
                found.append(str(entry.readlink()))
    return found


def named_memory(pid: int) -> set[str]:
    """The objects of /dev/shm that a process has open or mapped; one that has ended has none."""
    mapped = []
    with suppress(OSError):
        mapped = re.findall(r"/.*", Path(f"/proc/{pid}/maps").read_text())
    return {path for path in (*open_files(pid), *mapped) if path.startswith("/dev/shm/")}


def state(pid: int) -> str:
    """The kernel's letter for a process's state; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    return state(pid) not in ("", "Z")
