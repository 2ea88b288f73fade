"""Commands of a user who builds the package."""

from __future__ import annotations

import subprocess

__all__ = ["run"]


def run(*command, cwd, variables):
    """Run a command that has to succeed; return what it printed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    return done.stdout
