"""Commands that tests run until they end."""

import subprocess
import sys

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
"""A run of tests within a test."""


def run_command(command, **options) -> subprocess.CompletedProcess[str]:
    """Run a command for at most 150 s; return its exit code and the text that it printed.

    ``options`` are those of `subprocess.run`, in place of these.
    """
    options = {"capture_output": True, "text": True, "timeout": 150, "check": False, **options}
    return subprocess.run(command, **options)  # noqa: PLW1510
