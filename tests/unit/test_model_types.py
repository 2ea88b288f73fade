"""A type checker knows what a model imports: it passes right models and finds what is wrong in others."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RIGHT = """
import asyncio
import json
from typing import Any

import c_python_backend_utils as c
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.set_max_batch_size(8)
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config: dict[str, Any] = json.loads(args["model_config"])
        entry = pb_utils.get_output_config_by_name(config, "OUT")
        self.dtype = pb_utils.triton_string_to_numpy(entry["data_type"])
        pb_utils.Logger.log("up", pb_utils.Logger.WARNING)

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse | None]:
        responses: list[pb_utils.InferenceResponse | None] = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            array = tensor.as_numpy().astype(self.dtype)
            if request.is_cancelled():
                error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            total: int = tensor.shape()[0] + request.timeout()
            out = request.output("OUT", array.shape, np.float32)
            again = pb_utils.Tensor.from_dlpack("OUT", tensor.to_dlpack())
            responses.append(pb_utils.InferenceResponse([out, again], parameters={"n": total}))
        return responses

    def call(self, request: pb_utils.InferenceRequest) -> list[pb_utils.Tensor]:
        call = pb_utils.InferenceRequest(
            model_name="other",
            inputs=request.inputs(),
            requested_output_names=request.requested_output_names(),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
            trace=request.trace(),
        )
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        for each in call.exec(decoupled=True):
            each.output_tensors()
        return answer.output_tensors()

    async def call_both(self, calls: list[pb_utils.InferenceRequest]) -> int:
        answers = await asyncio.gather(*(call.async_exec() for call in calls))
        stream = await calls[0].async_exec(decoupled=True)
        async for each in stream:
            each.has_error()
        return sum(len(answer.output_tensors()) for answer in answers)

    def stream(self, sender: c.InferenceResponseSender) -> None:
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        print("bye")
"""
PLAIN = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        request = pb_utils.InferenceRequest("id", 0, [], ["OUT"], "other")
        return [pb_utils.InferenceResponse(request.exec().output_tensors()) for _ in requests]
"""
HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils
request = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
"""
WRONG = [
    ("pb_utils.get_input_by_name(request, 'IN')", 'Module has no attribute "get_input_by_name"'),
    ("pb_utils.Tensor('OUT')", 'Too few arguments for "Tensor"'),
    ("pb_utils.Tensor('OUT', [1, 2])", 'Argument 2 to "Tensor" has incompatible type "list[int]"'),
    ("pb_utils.Tensor('A', np.zeros(1)).numpy()", '"Tensor" has no attribute "numpy"'),
    ("pb_utils.get_input_tensor_by_name(request, 'A').numpy()", 'has no attribute "numpy"'),
    ("pb_utils.InferenceRequest(model_name='m')", "No overload variant"),
    ("pb_utils.InferenceResponse(pb_utils.Tensor('A', np.zeros(1)))", "incompatible type"),
    ("request.exec().responses()", '"InferenceResponse" has no attribute "responses"'),
    ("request.parameters()['a']", "Invalid index type"),
    ("pb_utils.TritonError('text', 'INTERNAL')", 'incompatible type "str"'),
    ("pb_utils.Logger.log_warning('text')", 'has no attribute "log_warning"'),
]


def mypy(folder, source, *flags):
    """Check a model as its author would; returns mypy's exit code and its lines."""
    (folder / "model.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), *flags, "model.py"],
        capture_output=True, text=True, timeout=110, check=False, cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder, so that what models import is read once."""
    pytest.importorskip("mypy")
    return tmp_path_factory.mktemp("typed")


def test_a_right_model_has_nothing_to_be_told(folder):
    assert mypy(folder, RIGHT, "--strict") == (0, ["Success: no issues found in 1 source file"])


def test_a_model_without_annotations_passes(folder):
    code, lines = mypy(folder, PLAIN, "--check-untyped-defs")
    assert code == 0, lines


def test_mistakes_are_found_on_their_lines(folder):
    code, lines = mypy(folder, HEAD + "\n".join(line for line, _ in WRONG) + "\n", "--strict")
    assert code == 1
    first = HEAD.count("\n") + 1
    told: dict[int, str] = {}
    for line in lines:
        found = re.match(r"model\.py:(\d+): error: (.*)", line)
        if found:
            told.setdefault(int(found[1]), found[2])
    assert sorted(told) == list(range(first, first + len(WRONG))), lines
    for number, (source, expected) in enumerate(WRONG, first):
        assert expected in told[number], source
