"""A model that captures a graph while the bridge pins memory beside it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.process.device_models import LIBRARY, running_device_server, write_device_model
from tests.process.test_device_network import pids_of, placement

GLOBAL = 0

# Captures the doubling of its input in its first execute, and launches that from then on. While it
# captures, it asks for memory, until some has been pinned.
CAPTURING = (
    LIBRARY
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.library = Library()
        self.graph = None

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (given,) = request.inputs()
        library, count = self.library, int(np.prod(given.shape()))
        values = library.array("values", given.shape())
        out = library.array("out", given.shape())
        there = values.__cuda_array_interface__["data"][0]
        library.double(there, there, count)
        ok(d.cuStreamSynchronize(library.stream))
        host = np.ascontiguousarray(given.as_numpy())
        if self.graph is None:
            ok(d.cuStreamBeginCapture(library.stream, d.CUstreamCaptureMode(MODE)))
            library.double(there, out.__cuda_array_interface__["data"][0], count)
            self.kept = [self.memory(request, number) for number in range(40)]
            self.graph = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(library.stream)), 0))
        ok(d.cuMemcpyHtoD(there, host, host.nbytes))
        ok(d.cuGraphLaunch(self.graph, library.stream))
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", out)])

    def memory(self, request, number):
        # Outputs of growing sizes are in segments of their own, each of which is pinned.
        time.sleep(0.005)
        return (request.output("OUT", [(number + 1) << 17], np.uint8, "cpu"),
                pb_utils.Tensor.empty("DEVICE", [4096], np.uint8, "cuda"))
"""
)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("where", ["source", "device"])
def test_a_graph_is_captured_while_memory_grows(tmp_path, mode, where):
    source = CAPTURING.replace("MODE", str(mode))
    write_device_model(tmp_path, "captures", source, config=placement(where))
    with running_device_server(tmp_path) as served:
        for _ in range(3):
            values = np.random.default_rng().random(1000, np.float32)
            status, answer = served.infer("captures", values)
            assert (status, answer) == (200, (2 * values).tolist())
        (pid,) = pids_of(served, "captures")
        names = [call.name for call in served.machine.calls(pid=pid)]
        begun, ended = names.index("cuStreamBeginCapture"), names.index("cuStreamEndCapture")
        assert "cuMemHostRegister" in names[begun:ended]
