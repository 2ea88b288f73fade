"""Clients' shared memory for tests: models that use it, and its registration."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tritonclient.utils import shared_memory as shm

from tests.process.gates import waiting_at
from tests.process.server import Server, running_server, write_model

SHM = Path("/dev/shm")

_MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(r, r.inputs()[0].as_numpy())])
                for r in requests]

    def answer(self, request, x):
{answer}
"""
ECHO = "return pb_utils.Tensor('OUT', x)"
# Whether NumPy may write to the input, and 1 where it was copied here.
EDIT = """
x += 1
return pb_utils.Tensor("OUT", x)
"""
KEEP = """
self.kept.append(x)
return pb_utils.Tensor("OUT", np.array([k[0] for k in self.kept]))
"""
FINAL = """
out = request.output("OUT", x.shape, x.dtype)
np.add(x, 1, out=out.as_numpy())
return out
"""
# Output tensors that go nowhere, twice, or into the response of a later request.
REUSE = """
request.output("OUT", x.shape, x.dtype).as_numpy()[:] = -1
if not self.kept:
    out = request.output("OUT", x.shape, x.dtype)
    out.as_numpy()[:] = x
    self.kept.append(out)
return self.kept[0]
"""
WAIT = """
{wait}
return pb_utils.Tensor("OUT", x)
"""


def model(answer):
    """Write the source of a model that answers a request by some lines, which see its input x."""
    return _MODEL.format(answer="\n".join(" " * 8 + line for line in answer.strip().splitlines()))


@contextmanager
def memory_server(repository: Path) -> Iterator[Server]:
    """Serve all these models; "wait" answers when a gate is opened that a test has in the repository's parent."""
    for name, answer in {"echo": ECHO, "edit": EDIT, "keep": KEEP, "final": FINAL}.items():
        write_model(repository, name, model(answer))
    write_model(repository, "reuse", model(REUSE))
    write_model(repository, "wait", model(WAIT.format(wait=waiting_at(repository.parent / "gate"))))
    write_model(repository, "spare", model(ECHO))
    copying = 'parameters { key: "INPUT_SHARING" value { string_value: "copy" } }'
    write_model(repository, "copying", model(EDIT), config=copying)
    strings = "IN STRING [-1] > OUT STRING [-1]"
    write_model(repository, "strings", model(ECHO), tensors=strings)
    batching = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 200000 }"
    write_model(repository, "batched_strings", model(ECHO), config=batching, tensors=strings)
    write_model(
        repository,
        "add",
        model("return pb_utils.Tensor('OUT', x + request.inputs()[1].as_numpy())"),
        tensors="IN FP32 [-1]; B FP32 [-1]",
    )
    with running_server(repository, "--allow-client-shm=true") as server:
        yield server


@contextmanager
def memory(nbytes):
    """Give a region's key and handle."""
    key = f"/gpubridge-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(key, key, nbytes)
    try:
        yield key, handle
    finally:
        shm.destroy_shared_memory_region(handle)


@contextmanager
def regions(client, *sizes):
    """Register regions "0", "1" ...; gives their handles."""
    with memory(sizes[0]) as (key, handle):
        name = str(len(sizes) - 1)
        client.register_system_shared_memory(name, key, sizes[0])
        if len(sizes) == 1:
            yield [handle]
            return
        with regions(client, *sizes[1:]) as others:
            yield [handle, *others]


def shared_input(library, region, shape, datatype="FP32", nbytes=None, offset=0):
    """Make an input that is in a region."""
    tensor = library.InferInput("IN", shape, datatype)
    tensor.set_shared_memory(region, 4 * shape[-1] if nbytes is None else nbytes, offset)
    return tensor


def shared_output(library, region, nbytes, offset=0):
    """Make an output that is wanted in a region."""
    output = library.InferRequestedOutput("OUT")
    output.set_shared_memory(region, nbytes, offset)
    return output


def infer(library, client, name, count, region_in="1", region_out="0"):
    """Send an input of FP32 that is in one region; the output goes to another, or comes back."""
    outputs = None if region_out is None else [shared_output(library, region_out, 4 * count)]
    return client.infer(name, [shared_input(library, region_in, [count])], outputs=outputs)
