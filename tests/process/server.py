"""A real gpubridge server for tests: a process of its own, ended for sure."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests import server_starts
from tests.forks import Fork
from tests.process import server_pool
from tests.process.forked_commands import fork_command
from tests.waits import poll

if TYPE_CHECKING:
    from tests.simcuda.machine import Machine

__all__ = [
    "LITTLE_MEMORY",
    "PURE",
    "STARTED",
    "Server",
    "alive",
    "children",
    "declared",
    "descendants",
    "is_fork_server",
    "named_memory",
    "open_files",
    "running_server",
    "send_request",
    "started_server",
    "state",
    "wait_until",
    "write_code_model",
    "write_model",
]

# With one of these, a copy of a process differs from one that has started.
_AS_STARTED = ("LD_PRELOAD", "COVERAGE_")
LITTLE_MEMORY = ("--request-arena-limit=25165824", "--output-arena-limit=25165824")
"""Flags of a server where a leak of a few bodies of megabytes is the end of memory."""
PURE = {"GPUBRIDGE_NO_NATIVE": "1"}
"""The environment of a server whose stubs are of the Python runtime."""
STARTED = ("-m", "gpubridge")
"""What an interpreter is given before the command, for a server that is not to be forked."""

_START_SECONDS = 120
_STOP_SECONDS = 60


class Server:
    """A running server; ``http_url``, ``grpc_url`` and ``metrics_url`` are ``host:port``.

    ``machine`` is the simulated one that it is on, if it is on one.
    """

    def __init__(self, process: subprocess.Popen[bytes] | Fork, log_path: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.repositories: Sequence[Path] = ()
        self.machine: Machine | None = None
        self._log_path = log_path
        self._log_start = 0
        self.http_url = ""
        self.metrics_url = ""
        self.grpc_url = ""

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
        page = send_request(self.metrics_url, "GET", "/metrics")[2].decode()
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

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


@contextmanager
def running_server(
    repositories: Path | Sequence[Path],
    *flags: str,
    ready: bool = True,
    environment: dict[str, str] | None = None,
    command: Sequence[str] = (),
    name: str = "serve",
    own: bool = False,
    start: server_pool.Start | None = None,
    machine: Hashable = None,
    prepare: server_pool.Prepare | None = None,
) -> Iterator[Server]:
    """Serve the repositories on free ports of loopback for as long as the block runs.

    A server of one repository is lent by `tests.process.server_pool`: one with the same flags and environment,
    which has served other tests before. It is in explicit mode, with the models loaded that it would have
    loaded at its start. With ``own`` true, or an argument below, the block gets a server that is started for
    it alone: for tests of starts, polls and figures of the whole server. One that a block ends or changes is
    not lent again.

    With ``ready`` false it only waits for the HTTP endpoint, not for the models. ``name`` is the command of
    `gpubridge`, and ``command`` what an interpreter is given before it. Without ``command`` the server is
    forked from a process that has made its imports, which are most of the time of a start: give `STARTED`
    where these depend on ``environment``. ``start`` starts it in place of `started_server`, on a ``machine``
    that is described so, and which ``prepare`` sets up before models are loaded; it gets ``prepare`` for a
    server of the block's own.
    """
    if isinstance(repositories, Path):
        repositories = [repositories]
    start = partial(start or started_server, environment=environment, command=command, name=name)
    with ExitStack() as stack:
        lent = None
        if len(repositories) == 1 and not (own or command or name != "serve" or not ready):
            described = machine, *sorted((environment or {}).items())
            lent = server_pool.lend(start, Path(repositories[0]), flags, described, prepare)
        if lent is None:
            if prepare is not None:
                start = partial(start, prepare=prepare)
            words = [word for path in repositories for word in ("--model-repository", str(path))]
            server = stack.enter_context(start([*words, *flags]))
            server.repositories = repositories
            if ready:
                wait_until(server.is_ready, "the server to be ready", server)
        else:
            server = stack.enter_context(lent)
        yield server


@contextmanager
def started_server(
    words: Sequence[str],
    environment: dict[str, str] | None = None,
    command: Sequence[str] = (),
    name: str = "serve",
) -> Iterator[Server]:
    """Start a server with these flags for the block, and wait for its endpoints; it is ended for sure."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    server_starts.count()
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = _start(
                command,
                [*name.split(), *ports, *words],
                {**os.environ, **(environment or {})},
                log.fileno(),
            )
        server = Server(process, log_path)
        try:
            _wait_for_endpoints(server)
            yield server
        finally:
            stubs = descendants(process.pid)
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_SECONDS)
            if isinstance(process, Fork):
                process.close()
            for pid in stubs:
                wait_until(lambda pid=pid: not alive(pid), f"stub {pid} to be gone")


def _start(
    command: Sequence[str], words: Sequence[str], environment: dict[str, str], log: int
) -> subprocess.Popen[bytes] | Fork:
    set_apart = {name for name in environment if name.startswith(_AS_STARTED)}
    if command or any(map(environment.get, set_apart)):
        return subprocess.Popen(
            [sys.executable, *(command or STARTED), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    # Empty ones are as none.
    variables = {name: environment[name] for name in environment.keys() - set_apart}
    with Path(os.devnull).open() as nothing:
        return fork_command(words, (nothing.fileno(), log, log), environment=variables)


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
    """Return the targets of a process's descriptors: paths, ``socket:[…]``, ``/memfd:…``, one for each."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
    return found


def named_memory(pid: int) -> set[str]:
    """The objects of /dev/shm that a process has open or mapped."""
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


def write_model(
    repository: Path,
    name: str,
    source: str,
    *,
    config: str = "",
    tensors: str = "",
    version: int = 1,
) -> Path:
    """Write a Python model; returns its directory.

    ``tensors`` are its inputs and outputs, as ``A FP32 [-1]; B STRING [1] optional: true > OUT FP32 [-1]``; a
    side that is left out is a vector of FP32, ``IN`` or ``OUT``. ``config`` is added to its config.pbtxt
    (``max_batch_size`` and whatever else).
    """
    directory = repository / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / str(version) / "model.py").write_text(source)
    inputs, _, outputs = tensors.partition(">")
    both = declared("input", inputs or "IN FP32 [-1]") + declared(
        "output", outputs or "OUT FP32 [-1]"
    )
    (directory / "config.pbtxt").write_text(f'backend: "python"\n{both}{config}\n')
    return directory


def declared(kind: str, tensors: str) -> str:
    """Return the inputs or outputs of a config.pbtxt; ``kind`` is which."""
    found = re.finditer(r" *(.+?) ([A-Z0-9]+) (\[.*?) *(?:;|$)", tensors)
    return "".join(
        f'{kind} [{{ name: "{name}" data_type: TYPE_{datatype} dims: {rest} }}]\n'
        for name, datatype, rest in (each.groups() for each in found)
    )


_CODE_MODEL = """
import ctypes, os, resource, signal, socket, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
{initialize}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.said = ""
        code = request.inputs()[0].as_numpy()[0].decode()
        exec(code, {{**globals(), "self": self, "request": request}})
        said = np.array([str(self.said).encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)])

    def finalize(self):
{finalize}
"""


def write_code_model(
    repository: Path,
    name: str = "m",
    *,
    initialize: str = "self.args = args",
    finalize: str = "print('Finalize', flush=True)",
    config: str = "",
    version: int = 1,
) -> Path:
    """Write a model that runs the code it is sent (:meth:`Server.ask`); returns its directory.

    The code sees ``self`` and ``request``, and answers what it puts into ``self.said``.
    """
    return write_model(
        repository,
        name,
        _CODE_MODEL.format(
            initialize=textwrap.indent(initialize, " " * 8),
            finalize=textwrap.indent(finalize, " " * 8),
        ),
        config=config,
        tensors="IN STRING [1] > OUT STRING [1]",
        version=version,
    )
