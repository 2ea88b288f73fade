"""A real gpubridge server for tests, and the models that it serves."""

import re
import tempfile
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.process import server_pool
from tests.process.server_process import (
    STARTED,
    Server,
    alive,
    children,
    descendants,
    is_fork_server,
    named_memory,
    open_files,
    send_request,
    start_server,
    state,
    wait_until,
)

__all__ = [
    "LITTLE_MEMORY",
    "LITTLE_OUTPUT",
    "MUCH_MEMORY",
    "NO_SPARES",
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
    "start_server",
    "state",
    "wait_until",
    "write_code_model",
    "write_model",
]

LITTLE_MEMORY = ("--request-arena-limit=25165824", "--output-arena-limit=25165824")
"""Flags of a server where a leak of a few bodies of megabytes is the end of memory."""
LITTLE_OUTPUT = "--output-arena-limit=1572864"
"""A flag of one where an output, or what is sent to another model, may have some megabyte."""
MUCH_MEMORY = ("--request-arena-limit=67108864", "--output-arena-limit=67108864")
"""Those of one for large messages, where a leak of some is the end of memory."""
NO_SPARES = ("--backend-config=python,spare-stub-seconds=0", "--request-arena-limit=8388608")
"""Those of one with no process more than its models have instances, and little memory."""
PURE = {"GPUBRIDGE_NO_NATIVE": "1"}
"""The environment of a server whose stubs are of the Python runtime."""


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
    where these depend on ``environment``. ``start`` starts it in place of `start_server`, on a ``machine``
    that is described so, and which ``prepare`` sets up before models are loaded; it gets ``prepare`` for a
    server of the block's own.
    """
    if isinstance(repositories, Path):
        repositories = [repositories]
    start = partial(start or start_server, environment=environment, command=command, name=name)
    with ExitStack() as stack:
        lent = None
        if len(repositories) == 1 and not (own or command or name != "serve" or not ready):
            described = machine, *sorted((environment or {}).items())
            lent = server_pool.lend(start, Path(repositories[0]), flags, described, prepare)
        if lent is None:
            if prepare is not None:
                start = partial(start, prepare=prepare)
            words = [word for path in repositories for word in ("--model-repository", str(path))]
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = start([*words, *flags], Path(folder))
            stack.callback(server.end)
            server.repositories = repositories
            if ready:
                wait_until(server.is_ready, "the server to be ready", server)
        else:
            server = stack.enter_context(lent)
        yield server


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
