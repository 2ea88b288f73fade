"""Commands of gpubridge, each forked from a process that has imported it: most of their time is imports."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["RUN", "ForkedCommands", "forked_commands"]

# The child goes on after the loop, and ends as any process does.
_PARENT = """
import contextlib, importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.chdir(job["folder"])
    for number, mode in enumerate(("r", "w", "w")):
        file = os.open(job["streams"][number], os.O_RDONLY if mode == "r" else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    sys.argv = ["gpubridge", *job["words"]]
    break
else:
    sys.exit()
from gpubridge.cli import main
sys.exit(main())
"""


class ForkedCommands:
    """Runs commands of gpubridge, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, *words: str, stdin: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gpubridge WORDS``; returns its exit code and what it printed."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            for path in streams:
                path.write_text(stdin if path.name == "stdin" else "")
            job = {
                "words": words,
                "folder": str(cwd or Path.cwd()),
                "streams": [*map(str, streams)],
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            out, err = (path.read_text() for path in streams[1:])
        return subprocess.CompletedProcess(words, code, out, err)


RUN = (
    "gpubridge.cli.run",
    "gpubridge.develop.session",
    "gpubridge.develop.one_instance",
    "cuda.bindings.driver",
)
"""Most modules that ``gpubridge run`` imports."""


@contextmanager
def forked_commands(*modules: str) -> Iterator[ForkedCommands]:
    """Keep a process from which commands are forked, for as long as the block runs.

    It has imported these modules, those of them that there are.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, json.dumps(["gpubridge.cli", *modules])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield ForkedCommands(process)
        finally:
            process.stdin.close()
            process.stdout.close()
