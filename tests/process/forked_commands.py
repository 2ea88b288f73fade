"""Commands of gpubridge, each forked from a process that has imported it: most of their time is imports."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.forks import fork

__all__ = ["run_forked"]

# Most modules that ``gpubridge run`` imports.
_IMPORTS = """
import contextlib
import gpubridge.cli.run, gpubridge.develop.one_instance, gpubridge.develop.session
with contextlib.suppress(ImportError):
    import cuda.bindings.driver
from gpubridge.cli import main
"""
_SECONDS = 150


def run_forked(
    *words: str, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``gpubridge WORDS``; return its exit code and what it printed.

    Raises
    ------
    subprocess.TimeoutExpired
        The command has not ended in time.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        streams = [file.fileno() for file in files]
        process = fork(_IMPORTS, "sys.exit(main())", os.environ, streams, words, folder=cwd)
        opened.callback(process.close)
        code = process.wait(_SECONDS)
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(words, code, files[1].read(), files[2].read())
