"""Programs of others as clients, and the model that they ask."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.process.server import write_model

__all__ = ["run", "tool", "write_add_sub"]

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (tensor.as_numpy() for tensor in request.inputs())
            outputs = [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""


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
