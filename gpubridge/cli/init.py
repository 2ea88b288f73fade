"""``gpubridge init``: a small example model."""

from __future__ import annotations

import argparse
import shlex
import sys
import urllib.parse
from pathlib import Path

from gpubridge.errors import BridgeError, ErrorCode, invalid

USAGE = "MODEL_DIR"
DESCRIPTION = (
    "Write a small model with its configuration into a new directory of its name, and print the commands "
    "that serve, call and run it."
)
_CONFIG = """\
# What clients send and get, and how requests are batched.
backend: "python"
max_batch_size: 8
input [{ name: "NUMBERS" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "TOTAL" data_type: TYPE_FP32 dims: [1] }]
dynamic_batching { }
"""
_MODEL = '''\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Load weights here: it is called once, in the process that then executes."""

    def execute(self, requests):
        """Answer each request of a batch with a response."""
        responses = []
        for request in requests:
            numbers = pb_utils.get_input_tensor_by_name(request, "NUMBERS").as_numpy()
            total = pb_utils.Tensor("TOTAL", numbers.sum(axis=1, keepdims=True))
            responses.append(pb_utils.InferenceResponse([total]))
        return responses
'''
_NEXT = """\
written: {config} and {model}
serve it:  gpubridge serve {directory}
ask it:    curl -d '{{"inputs": [{{"name": "NUMBERS", "datatype": "FP32", "shape": [1, 3], "data": \
[1, 2, 3.5]}}]}}' http://127.0.0.1:8000/v2/models/{name}/infer
run it without a server:  gpubridge run {directory} --input 'NUMBERS=[1, 2, 3.5]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="MODEL_DIR", help="such as models/sum")


def run(options: argparse.Namespace) -> int:
    """Write the files; returns the exit code."""
    directory: Path = options.directory
    if directory.name.startswith(".") or not directory.name:
        raise invalid(f"expected a directory with the name of the model, got {directory}")
    config, model = directory / "config.pbtxt", directory / "1" / "model.py"
    try:
        directory.mkdir(parents=True)
        model.parent.mkdir()
        config.write_text(_CONFIG, encoding="utf-8")
        model.write_text(_MODEL, encoding="utf-8")
    except FileExistsError:
        raise BridgeError(f"{directory} already exists", ErrorCode.ALREADY_EXISTS) from None
    except OSError as error:
        raise invalid(f"cannot write {directory}: {error.strerror}") from error
    sys.stdout.write(
        _NEXT.format(
            config=config,
            model=model,
            directory=shlex.quote(str(directory)),
            name=urllib.parse.quote(directory.name, safe=""),
        )
    )
    return 0
