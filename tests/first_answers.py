"""The way of a newcomer by a tutorial: its files written, its commands given as they are written there."""

import json
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

from tests.waits import poll

__all__ = ["PAGES", "commands", "first_answer"]

_TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
PAGES = {name: _TUTORIALS / f"{name}.md" for name in ("quickstart", "from-triton")}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# (\S+/\S+|\S+\.py)\n")
_PORT = "127.0.0.1:8000"
_START_SECONDS = 120


def commands(page: Path) -> list[str]:
    """Return the lines of the first way to an answer in a page: up to a client, or to what it prints."""
    lines: list[str] = []
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "sh":
            lines += text.splitlines()
        if language == "json" or text.startswith("# client.py\n"):
            break
    return lines


def first_answer(page: Path, folder: Path, programs: Path) -> str:
    """Follow a page in a folder, with the programs of an environment; return what its client prints."""
    for _, text in _BLOCK.findall(page.read_text()):
        named = _NAMED.match(text)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (serve,) = [line for line in commands(page) if line.startswith(("gpubridge", "tritonserver"))]
    curls = [shlex.split(line) for line in commands(page) if line.startswith("curl")]
    program, *words = shlex.split(serve)
    ports = folder / "ports.json"
    free = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--ports-file={ports}"]
    with subprocess.Popen([programs / program, *words, *free], cwd=folder) as server:
        try:
            address = _http_address(server, ports)
            if not curls:
                client = (folder / "client.py").read_text().replace(_PORT, address)
                command = [programs / "python", "-c", client]
                return subprocess.run(
                    command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
            (_, _, body, url) = curls[0]
            request = urllib.request.Request(url.replace(_PORT, address), body.encode())
            with urllib.request.urlopen(request, timeout=150) as answer:
                return answer.read().decode() + "\n"
        finally:
            server.terminate()


def _http_address(server: subprocess.Popen[bytes], ports: Path) -> str:
    """Return where a server listens, once it is ready."""
    assert poll(lambda: ports.exists() or server.poll() is not None, _START_SECONDS)
    assert server.poll() is None, "the server has ended"
    of = json.loads(ports.read_text())["http"]
    return f"{of['address']}:{of['port']}"
