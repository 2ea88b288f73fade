"""Models that complete their own configuration, and say who did what, for tests with real servers."""

import textwrap
from pathlib import Path

FULL = """
c.add_input({"name": "IN", "data_type": "TYPE_STRING", "dims": [1]})
c.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]})
return c
"""

_SOURCE = """
import ctypes, json, os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = {folder!r}


def note(what):
    with open(os.path.join(FOLDER, "log"), "a") as log:
        log.write(what + " " + str(os.getpid()) + "\\n")


note("import")
{imported}


class TritonPythonModel:
    completed_here = False

    @{kind}
    def auto_complete_config({arguments}):
        note("complete")
        TritonPythonModel.completed_here = True
{complete}

    def initialize(self, args):
        note("initialize")
        self.args = args
{initialize}

    def execute(self, requests):
        note("execute")
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.said = ""
        code = request.inputs()[0].as_numpy().flat[0].decode()
        exec(code, {{**globals(), "self": self, "request": request}})
        said = np.full_like(request.inputs()[0].as_numpy(), str(self.said).encode())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)])
"""


def write_completing(
    repository: Path,
    name: str = "m",
    complete: str = FULL,
    *,
    config: str | None = None,
    initialize: str = "pass",
    imported: str = "",
    kind: str = "staticmethod",
    version: int = 1,
) -> Path:
    """Write a model whose ``auto_complete_config(c)`` is this code; returns its directory.

    It runs the code it is sent (``Server.ask``), and notes in ``NAME.notes/log`` beside the repository
    which process imported, completed, initialized and executed.
    """
    directory = repository / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    folder = _notes(repository, name)
    folder.mkdir(exist_ok=True)
    (directory / str(version) / "model.py").write_text(
        _SOURCE.format(
            folder=str(folder),
            imported=imported,
            kind=kind,
            arguments="c" if kind == "staticmethod" else "cls, c",
            complete=textwrap.indent(complete, " " * 8),
            initialize=textwrap.indent(initialize, " " * 8),
        )
    )
    if config is not None:
        (directory / "config.pbtxt").write_text(config)
    return directory


def said(repository: Path, name: str = "m") -> dict[str, list[int]]:
    """Return a model's notes: process ids by their actions."""
    noted: dict[str, list[int]] = {"import": [], "complete": [], "initialize": [], "execute": []}
    log = _notes(repository, name) / "log"
    for line in log.read_text().splitlines() if log.exists() else ():
        what, pid = line.split()
        noted[what].append(int(pid))
    return noted


def _notes(repository: Path, name: str) -> Path:
    return repository.parent / f"{name}.notes"
