"""Examples, served and shown: ``./dev demo``."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from devtools.console import Failed, say
from devtools.environment import Checkout, has_module, left_out, need
from devtools.processes import run

__all__ = ["READY", "demo", "service_address"]

READY = re.compile(r"\] ready: ")
"""What the server's log says once every model is up."""
_POLL_SECONDS = 0.1


def demo(checkout: Checkout, arguments: list[str]) -> None:
    """Serve examples on free ports, show them, and stop."""
    if arguments not in ([], ["--stay"]):
        raise Failed(f"unknown option of demo: {' '.join(arguments)}; expected --stay or none")
    need(checkout, "test", "torch", "demo")
    with tempfile.TemporaryDirectory() as folder:
        models = _repositories(checkout, Path(folder))
        say("starting gpubridge on free ports of 127.0.0.1")
        with _Server(checkout, models, Path(folder, "log")) as server:
            _show(checkout, server, stay=bool(arguments))
    output = checkout.root / "demo-output"
    say(f"all examples answered, the server stopped cleanly; look at the pictures in {output}")


def service_address(log: str, service: str) -> str:
    """Return HOST:PORT of one of the server's services, as its log says; "" where it says nothing."""
    found = re.search(rf"Started {service} at (\S+)", log)
    return found[1] if found else ""


def _repositories(checkout: Checkout, folder: Path) -> list[Path]:
    """Return the repositories to serve; those whose packages could not be installed are left out."""
    examples = checkout.root / "examples"
    found = [examples / "image_preproc" / "model_repository"]
    if has_module(checkout, "torch"):
        found.append(examples / "pytorch_addsub" / "model_repository")
    else:
        left_out(checkout, "torch", "torch", "pytorch_addsub")
    if has_module(checkout, "rapidocr"):
        install = [checkout.runner, examples / "ocr_pipeline" / "install_models.py", folder / "ocr"]
        if run(install, cwd=checkout.root, log=folder / "install.log"):
            sys.stderr.write((folder / "install.log").read_text(errors="replace"))
            raise Failed(
                "the models of examples/ocr_pipeline could not be made; see the message above"
            )
        found.append(folder / "ocr")
    else:
        left_out(checkout, "demo", "rapidocr", "ocr_pipeline")
    if all(has_module(checkout, name) for name in ("wordllama", "tokenizers", "safetensors")):
        found.append(examples / "text_topics" / "model_repository")
    else:
        left_out(checkout, "demo", "wordllama", "text_topics")
    return found


class _Server:
    """The demo's server; owns its process, which ends with the ``with`` block."""

    def __init__(self, checkout: Checkout, models: list[Path], log: Path) -> None:
        self._log = log
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        named = [word for path in models for word in ("--model-repository", str(path))]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(checkout.runner), "-m", "gpubridge", "serve", *ports, *named],
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._process.terminate()
        code = self._process.wait()
        if kind is None and code:
            raise self.failure(f"the server ended with exit code {code} instead of 0")

    def text(self) -> str:
        """Return its log so far."""
        return self._log.read_text(errors="replace")

    def runs(self) -> bool:
        """Return whether its process runs."""
        return self._process.poll() is None

    def failure(self, what: str) -> Failed:
        """Print its log; return the error that says so."""
        sys.stderr.write(self.text())
        return Failed(f"{what}; its log is above")


def _show(checkout: Checkout, server: _Server, *, stay: bool) -> None:
    while not READY.search(server.text()):
        if not server.runs():
            raise server.failure("the server ended before it was ready")
        time.sleep(_POLL_SECONDS)
    url = service_address(server.text(), "HTTPService")
    say(f"the server is ready at http://{url}; running examples/demo.py")
    output = checkout.root / "demo-output"
    for picture in output.glob("*.png"):
        picture.unlink()
    program = checkout.root / "examples" / "demo.py"
    command = [checkout.runner, program, "--url", url, "--output", output]
    if run(command, cwd=Path.cwd()):
        raise server.failure("the demo failed, or the server did")
    if stay:
        _stay_until_interrupted(server, url)
    say("stopping the server")


def _stay_until_interrupted(server: _Server, url: str) -> None:
    text = server.text()
    say(
        f"the server keeps running at http://{url} (gRPC: {service_address(text, 'GRPCInferenceService')})"
    )
    page = f"http://{service_address(text, 'Metrics Service')}/"
    with contextlib.suppress(OSError, urllib.error.URLError):
        urllib.request.urlopen(page, timeout=10).close()
        say(f"its status page is {page}")
    # Ctrl-C, or SIGTERM.
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        say("Ctrl-C ends it")
        while server.runs():
            time.sleep(_POLL_SECONDS)
