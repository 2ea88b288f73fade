"""Commands of gpubridge, each forked from a process that has imported it: most of their time is imports."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from gpubridge.transport.fork_requests import MARK
from tests.forks import Fork, fork

_IMPORTS = "from tests.process.forked_server import main"
_PROGRAM = "sys.exit(main())"
SCRIPT_IMPORTS = "import os, runpy, numpy, PIL.Image, tritonclient.grpc, tritonclient.http"
_SCRIPT = """
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_MARK_LETTERS = 17
_SECONDS = 150


def fork_command(
    words: Sequence[str],
    streams: Sequence[int],
    *,
    folder: Path | None = None,
    session: bool = False,
    stays: bool = False,
    environment: Mapping[str, str] | None = None,
    imports: str = _IMPORTS,
    program: str = _PROGRAM,
) -> Fork:
    """Start ``gpubridge WORDS``; the other arguments are those of `fork`."""
    # Where a fork server finds the place for its stubs'.
    variables = {**(environment or os.environ), MARK: "0" * _MARK_LETTERS}
    return fork(imports, program, variables, streams, words, folder, session=session, stays=stays)


def run_forked(
    *words: str,
    stdin: str = "",
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    imports: str = _IMPORTS,
    program: str = _PROGRAM,
) -> subprocess.CompletedProcess[str]:
    """Run ``gpubridge WORDS``; return its exit code and what it printed.

    ``imports`` and ``program`` are those of a command that is changed for a test (`tests.forks.fork`).

    Raises
    ------
    subprocess.TimeoutExpired
        The command has not ended in time.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        process = fork_command(
            words,
            [file.fileno() for file in files],
            folder=cwd,
            environment=environment,
            imports=imports,
            program=program,
        )
        opened.callback(process.close)
        code = process.wait(_SECONDS)
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(words, code, files[1].read(), files[2].read())


def run_script(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, a client's script, by a process that has imported tritonclient; as `run_forked`."""
    return run_forked(*words, cwd=cwd, imports=SCRIPT_IMPORTS, program=_SCRIPT)


@contextmanager
def servers_are_forked() -> Iterator[None]:
    """Have each `gpubridge.Server` of the block start a server that is forked."""

    def start(words: Sequence[str], log: IO[bytes]) -> Fork:
        with Path(os.devnull).open() as nothing:
            streams = [nothing.fileno(), log.fileno(), log.fileno()]
            return fork_command(words, streams, session=True)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("gpubridge.develop.child_server._start", start)
        yield
