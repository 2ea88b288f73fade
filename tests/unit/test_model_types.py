"""A type checker knows what a model imports: it passes right models and finds what is wrong in others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# What mypy has read of NumPy, for the next run.
CACHE = ROOT / ".mypy_cache" / "models"

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
# Its author does not ask for annotations.
PLAIN = """
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
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


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Check all models in one run, which reads once what they import; gives what it says of each."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typed")
    wrong = HEAD + "\n".join(line for line, _ in WRONG) + "\n"
    guide = (ROOT / "docs" / "how-to" / "models.md").read_text()
    (shown,) = re.findall(
        r"^```python\n# models/softmax/1/model.py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL
    )
    sources = {"right": RIGHT, "plain": PLAIN, "guide": shown, "wrong": wrong}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", CACHE, "--strict", *folder.glob("*.py")],
        capture_output=True, text=True, timeout=250, check=False, cwd=folder,
    )  # fmt: skip
    *found, total = done.stdout.splitlines()
    assert total.endswith("in 1 file (checked 4 source files)"), done
    return found


@pytest.mark.parametrize("name", ["right", "plain", "guide"])
def test_a_right_model_has_nothing_to_be_told(lines, name):
    """Also one without annotations, and that of the guide to models."""
    assert [line for line in lines if line.startswith(f"{name}.py:")] == []


def test_mistakes_are_found_on_their_lines(lines):
    first = HEAD.count("\n") + 1
    told: dict[int, str] = {}
    for line in lines:
        found = re.match(r"wrong\.py:(\d+): error: (.*)", line)
        if found:
            told.setdefault(int(found[1]), found[2])
    assert sorted(told) == list(range(first, first + len(WRONG))), lines
    for number, (source, expected) in enumerate(WRONG, first):
        assert expected in told[number], source
