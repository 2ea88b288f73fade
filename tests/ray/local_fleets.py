"""A fleet on this machine for tests: started as a user starts it, with its processes."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpubridge.ray.local_fleet import ask_fleet
from tests.commands import run_command
from tests.process.server import alive, descendants, wait_until
from tests.ray.proxies import free_ports
from tests.waits import poll

START_SECONDS = 180


def require_namespaces():
    """Skip where this machine allows no namespaces."""
    probe = subprocess.run(["unshare", "-rn", "--pid", "--fork", "true"], check=False)
    if probe.returncode:
        pytest.skip("this machine allows no user namespaces")


class LocalFleet:
    """A running ``gpubridge ray up``; ``http_url`` and ``grpc_url`` are its relay's."""

    def __init__(self, process, log, ports):
        self.process = process
        self._log = log
        self.http_url, self.grpc_url, self.metrics_url = (f"127.0.0.1:{port}" for port in ports)

    def log(self):
        """Return what the command has printed."""
        return self._log.read_text(errors="replace")

    def status(self):
        return ask_fleet({"command": "status"})

    def serving(self):
        """Replicas that serve, by key."""
        rows = self.status()["replicas"]
        return {row["key"]: row for row in rows if not row["server"]["draining"]}

    def processes(self):
        """Each process of the fleet by its number within the fleet."""
        found = {}
        pending = [self.process.pid]
        while pending:
            pid = pending.pop()
            pending += descendants(pid)
            with contextlib.suppress(OSError, TypeError):
                status = Path(f"/proc/{pid}/status").read_text()
                found[int(re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)[1])] = pid
        return found

    def named(self, words):
        """Process ids of those whose command line has some words."""
        found = []
        for pid in self.processes().values():
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(pid)
        return found

    def wait_for(self, count, gone=()):
        """Wait until so many replicas serve, none of them one of ``gone``."""

        def there():
            with contextlib.suppress(Exception):
                serving = self.serving()
                return len(serving) == count and not serving.keys() & set(gone)
            return False

        wait_until(there, f"{count} replicas: {self.log()}")

    def update(self, repository, *flags):
        """Run ``gpubridge ray update`` with the fleet's ports."""
        updated = self.command("update", str(repository), *flags, *self.ports)
        assert updated.returncode == 0, updated.stderr

    def ray(self, *words):
        """Run a command of Ray within the fleet's namespaces."""
        (raylet, *_) = self.named("raylet/raylet")
        line = Path(f"/proc/{raylet}/cmdline").read_text()
        gcs = re.search(r"--gcs-address=([\w.:]+)", line)[1]
        enter = ["nsenter", "--preserve-credentials", "-U", "-n", "-p", "-m"]
        enter += ["-t", str(self.processes()[1]), sys.executable, "-m", "ray.scripts.scripts"]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [*enter, *words, f"--address={gcs}"]
        done = run_command(command, env=environment)
        assert done.returncode == 0, done.stderr

    def add_node(self, address):
        """Add a node with an address of loopback; returns its raylet."""
        before = set(self.named("raylet/raylet"))
        resources = ("--num-cpus=2", "--object-store-memory=80000000")
        self.ray("start", f"--node-ip-address={address}", *resources)
        (raylet,) = set(self.named("raylet/raylet")) - before
        return raylet

    def command(self, *words):
        """Run ``gpubridge ray`` with some words."""
        command = [sys.executable, "-m", "gpubridge", "ray", *words]
        return run_command(command)


@contextlib.contextmanager
def local_fleet(repository, *flags):
    """Run a fleet for as long as the block runs; all its processes are gone behind it."""
    require_namespaces()
    ports = free_ports(3)
    names = ("http", "grpc", "metrics")
    words = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    command = [sys.executable, "-m", "gpubridge", "ray", "up", str(repository), *flags, *words]
    with tempfile.TemporaryDirectory(prefix="gpb") as folder, pytest.MonkeyPatch.context() as patch:
        # The fleets of several workers are several users' ones; paths of sockets are short.
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        fleet = LocalFleet(process, log, ports)
        fleet.ports = words
        try:
            said = re.compile(r"^ready$", re.MULTILINE)
            ready = poll(lambda: said.search(fleet.log()) or process.poll(), START_SECONDS)
            assert ready, fleet.log()
            assert "serving at http://localhost:" in fleet.log()
            assert process.poll() is None, fleet.log()
            yield fleet
        finally:
            processes = fleet.processes().values()
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in processes:
                wait_until(lambda pid=pid: not alive(pid), f"process {pid} to be gone")


def infer_body(code):
    """Return a JSON request that has a model of `write_code_model` run some code."""
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
    return json.dumps({"inputs": [tensor]})
