"""Programs of others as clients, and the model that they ask."""

import os
import shutil
import subprocess

import pytest

from tests.process.model_sources import answering
from tests.process.server import write_model

ADD_SUB = answering(
    """
other = request.inputs()[1].as_numpy()
return respond(SUM=value + other, DIFFERENCE=value - other)
"""
)


def write_add_sub(repository):
    """Write a model of two vectors of 16 FP32: their sum and their difference."""
    tensors = "A FP32 [16]; B FP32 [16] > SUM FP32 [16]; DIFFERENCE FP32 [16]"
    write_model(repository, "add_sub", ADD_SUB, tensors=tensors)


def tool(name: str) -> str:
    """Return the path of a program; the test is skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH")
    return path


def run(*command, **environment) -> str:
    """Run a client; returns what it printed."""
    finished = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        timeout=150,
        check=False,
        env={**os.environ, **environment},
    )
    said = (finished.stdout + finished.stderr).decode(errors="replace")
    assert finished.returncode == 0, said
    return said
