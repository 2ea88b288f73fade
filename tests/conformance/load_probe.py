"""Record what a server says of models that do not load, and of stubs that die.

    python -m tests.conformance.load_probe --json OUT --port 8000 -- COMMAND ... {repository} ...

COMMAND starts the server; ``{repository}`` in it becomes the directory of generated models, and the flags
of each part (``--http-port``, ``--model-control-mode`` ...) are appended. Written for a server whose
stubs are child processes with ``stub`` in their command line.
"""

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.conformance.http_record import steady
from tests.conformance.load_cases import BROKEN, Broken
from tests.waits import poll

REQUEST = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"INT32","data":[7]}]}'
START = 60.0  # seconds in which a server must be live or gone
ANSWER = 20.0  # seconds after which a server counts as silent
SETTLE = 6.0  # seconds given to finalize, which runs after the answer to unload
# Warnings that tell of the machine, not of the server
MACHINE = ("CudaDriverHelper", "DCGM", "pinned", "CUDA driver")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMP = re.compile(r'^([IWE])\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(.*?)"?$')
Record = dict[str, Any]


class Server:
    """A running server: its process, its log and where it listens. ``close()`` ends it."""

    def __init__(self, command: list[str], repository: Path, port: int, log: Path) -> None:
        self.port = port
        self.repository = repository
        self.log = log
        flags = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
        flags += [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [part.replace("{repository}", str(repository)) for part in command] + flags,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,  # a Python stub imports from where its server was started
            )

    def wait_until_live(self) -> bool:
        """True once it is live, False if it went away."""

        def is_live() -> bool:
            with suppress(OSError):
                return self.ask("GET", "/v2/health/live")["status"] == 200
            return False

        poll(lambda: is_live() or self.process.poll() is not None, START)
        return self.process.poll() is None and is_live()

    def ask(self, method: str, path: str, body: bytes = b"", limit: float = ANSWER) -> Record:
        """One request; OSError where there is no server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return {"status": response.status, "text": self.clean(response.read().decode())}
        except TimeoutError:
            return {"status": 0, "text": "no answer"}
        finally:
            connection.close()

    def clean(self, text: str) -> str:
        """Text without what names this machine or this run."""
        text = steady(text).replace(str(self.repository), "<repository>")
        text = re.sub(r"(?:/[\w.+-]+)+/backends", "<backends>", text)
        text = re.sub(r"(?<=^\[libprotobuf )(\w+) [^\]]*", r"\1", text)
        return re.sub(r"shm_region_[\w-]+", "shm_region_*", text)

    def lines(self, start: int = 0) -> list[str]:
        """Warnings and errors of the log from byte ``start`` on, without stamps; prints and protobuf's as they are."""
        text = self.log.read_bytes()[start:].decode("utf-8", "replace")
        found = []
        for line in text.splitlines():
            match = STAMP.match(COLOUR.sub("", line))
            if any(word in line for word in MACHINE):
                continue
            if match is not None and match[1] in "WE":
                found.append(f"{match[1]} {self.clean(match[2])}")
            elif match is None and line.startswith(("planted", "[libprotobuf")):
                found.append(self.clean(line))
        return found

    def stubs(self) -> list[int]:
        """Process ids of the stubs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue  # it went away while we looked
            if parent == self.process.pid and b"stub" in command:
                found.append(int(entry.name))
        return found

    def close(self) -> int | str:
        """End it by SIGTERM (SIGKILL after a while); its exit status, or ``killed``."""
        self.process.terminate()
        try:
            return self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "killed"


@contextmanager
def serving(
    command: list[str], models: list[Broken], port: int, flags: list[str]
) -> Iterator[Server]:
    """A server over a temporary repository of these models."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        write_repository(repository, models)
        server = Server(command + flags, repository, port, Path(folder) / "log")
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.close()


def write_repository(repository: Path, models: list[Broken]) -> None:
    """Write the model directories."""
    repository.mkdir()
    for model in models:
        for name, text in model.files.items():
            path = repository / model.name / name
            if text is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


def index_of(server: Server, name: str) -> Any:
    """The entries of one model in the repository index, once it is neither loading nor unloading."""
    found: Any = None

    def is_settled() -> bool:
        nonlocal found
        answer = server.ask("POST", "/v2/repository/index")
        if answer["status"] != 200:
            found = answer["text"]
            return True
        found = [entry for entry in json.loads(answer["text"]) if entry["name"] == name]
        return not {entry.get("state") for entry in found} & {"LOADING", "UNLOADING"}

    poll(is_settled, SETTLE)
    return found


def load_alone(server: Server, model: Broken) -> Record:
    """Load one model, look at it, ask it where it loaded, unload it."""
    path = quote(model.name, safe=";")
    start = server.log.stat().st_size
    record: Record = {"load": server.ask("POST", f"/v2/repository/models/{path}/load")}
    if record["load"]["status"] == 0:
        record["log"] = server.lines(start)
        return record
    record["index"] = index_of(server, model.name)
    record["ready"] = server.ask("GET", f"/v2/models/{path}/ready")
    if record["load"]["status"] == 200:
        if model.gets_request:
            record["infer"] = server.ask("POST", f"/v2/models/{path}/infer", REQUEST)
            record["index after infer"] = index_of(server, model.name)
            record["ready after infer"] = server.ask("GET", f"/v2/models/{path}/ready")
        record["unload"] = server.ask("POST", f"/v2/repository/models/{path}/unload")
        record["index after unload"] = index_of(server, model.name)
    record["log"] = server.lines(start)
    return record


def load_one_by_one(command: list[str], port: int) -> Record:
    """Explicit mode: each model alone, so that its log lines are its own.

    A load that is never answered can hold up the whole server, so the next model gets a new one.
    """
    answers: Record = {}
    waiting = list(BROKEN)
    while waiting:
        with serving(command, list(BROKEN), port, ["--model-control-mode=explicit"]) as server:
            server.wait_until_live()
            answered = True
            while waiting and answered:
                model = waiting.pop(0)
                answers[model.name] = load_alone(server, model)
                answered = answers[model.name]["load"]["status"] != 0
            if not answered:
                server.process.kill()
                server.process.wait()
    return answers


def start_with(command: list[str], port: int, names: list[str], flags: list[str]) -> Record:
    """Mode none: start with these models and flags, and see whether the server stays."""
    models = [model for model in BROKEN if model.name in names]
    with serving(command, models, port, flags) as server:
        record: Record = {"models": names, "flags": flags, "live": server.wait_until_live()}
        if record["live"]:
            record["ready"] = server.ask("GET", "/v2/health/ready")
            record["index"] = json.loads(server.ask("POST", "/v2/repository/index")["text"])
            record["infer good"] = server.ask("POST", "/v2/models/good/infer", REQUEST)["status"]
            record["exit"] = server.close()
        else:
            record["exit"] = server.process.wait(START)
        record["log"] = sorted(set(server.lines()))
    return record


def starts(command: list[str], port: int) -> list[Record]:
    """Record which flags make a broken model end the server."""
    both, alone = ["good", "initialize_raises"], ["good"]
    tolerant = "--exit-on-error=false"
    return [
        start_with(command, port, alone, []),
        start_with(command, port, both, []),
        start_with(command, port, both, [tolerant]),
        start_with(command, port, both, [tolerant, "--strict-readiness=false"]),
        start_with(command, port, ["good", "config_not_text_format"], []),
        start_with(command, port, ["good", "config_not_text_format"], [tolerant]),
        start_with(command, port, both, ["--model-control-mode=explicit", "--load-model=good"]),
        start_with(
            command, port, both, ["--model-control-mode=explicit", "--load-model=initialize_raises"]
        ),
        start_with(command, port, alone, ["--model-control-mode=explicit", "--load-model=absent"]),
        start_with(command, port, [], []),
    ]


def state(server: Server) -> Record:
    """Return the visible state of the model ``good``."""
    return {
        "infer": server.ask("POST", "/v2/models/good/infer", REQUEST),
        "model ready": server.ask("GET", "/v2/models/good/ready"),
        "server ready": server.ask("GET", "/v2/health/ready"),
        "index": index_of(server, "good"),
    }


def kill_stub(command: list[str], port: int, number: int) -> Record:
    """A stub is killed while idle; then requests, then a reload."""
    good = [model for model in BROKEN if model.name == "good"]
    with serving(
        command, good, port, ["--model-control-mode=explicit", "--load-model=good"]
    ) as server:
        server.wait_until_live()
        record: Record = {"before": state(server), "stubs": len(server.stubs())}
        for pid in server.stubs():
            os.kill(pid, number)
        time.sleep(0.5)
        record["ready at once"] = server.ask("GET", "/v2/models/good/ready")
        record["after"] = state(server)
        record["again"] = state(server)
        record["stubs after"] = len(server.stubs())
        record["reload"] = server.ask("POST", "/v2/repository/models/good/load")
        record["after reload"] = state(server)
        record["unload"] = server.ask("POST", "/v2/repository/models/good/unload")
        record["load"] = server.ask("POST", "/v2/repository/models/good/load")
        record["after unload and load"] = state(server)
        record["exit"] = server.close()
        record["log"] = server.lines()
    return record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the answers go")
    parser.add_argument(
        "--port", type=int, default=8000, help="HTTP port; the next two are used too"
    )
    parser.add_argument("command", nargs="+", help="command that starts the server, after --")
    options = parser.parse_args(arguments)
    answers = {
        "models": load_one_by_one(options.command, options.port),
        "starts": starts(options.command, options.port),
        "stub killed": kill_stub(options.command, options.port, signal.SIGKILL),
    }
    options.json.write_text(
        json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
