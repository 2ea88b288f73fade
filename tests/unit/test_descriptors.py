"""The limit of descriptors follows the limits of connections, as far as the system lets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import logging, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from gpubridge.frontend.connection_limits import allow_connections
soft, hard, *limits = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_connections(limits)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limits", "left", "warned"),
    [
        (256, 4096, [100, 200], 1324, False),
        (2000, 4096, [100, 200], 2000, False),
        (256, 2048, [4096, 4096], 2048, True),
        (256, 2048, [0], 2048, False),
        (256, 2048, [], 1024, False),
    ],
)
def test_it_is_raised_as_far_as_needed_and_allowed(soft, hard, limits, left, warned):
    # In a process of its own: a hard limit that was lowered stays so.
    finished = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, (soft, hard, *limits))],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    *said, after = finished.stdout.splitlines()
    assert int(after) == left
    assert any("--http-max-connections" in line for line in said) == warned
