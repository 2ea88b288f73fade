"""Edges between models on GPUs: what stays there, and what it costs to leave."""

import json

import numpy as np
import pytest

from tests.process.device_models import (
    DOUBLE,
    HANDLES,
    LARGE_ARENA,
    on_device,
    running_device_server,
    write_device_model,
)
from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering
from tests.process.server import write_model

COUNT = 20_000
NBYTES = 4 * COUNT


def doubling_into(tensor):
    """Return the source of a model that doubles its input on the GPU, into the output that an expression makes."""
    return (
        DOUBLE.replace(
            'out = library.array("out", given.shape())',
            f"tensor = {tensor}\n"
            "        out = Array(library.pointer(tensor), given.shape(), np.float32, None)",
        ).replace('[pb_utils.Tensor.from_dlpack("OUT", out)]', "[self.written(tensor)]")
        + """
    def written(self, tensor):
        # The legacy stream, on which the tensor was handed out, waits for the kernel.
        event = ok(d.cuEventCreate(2))
        ok(d.cuEventRecord(event, self.library.stream))
        ok(d.cuStreamWaitEvent(1, event, 0))
        return tensor
"""
    )


IN_ARENA = doubling_into('pb_utils.Tensor.empty("OUT", given.shape(), np.float32, "cuda")')

# Has memory of its own from the start.
EARLY = (
    'self.library = Library(args)\n        pb_utils.Tensor.empty("OWN", [1], np.float32, "cuda")'
)

# Hands its input to another model, and answers with what that has answered.
CALLER = on_device(
    """
if given.is_cpu():
    values = given.as_numpy()
    own = library.array("own", values.shape)
    pointer = own.__cuda_array_interface__["data"][0]
    ok(d.cuMemcpyHtoDAsync(pointer, values.tobytes(), values.nbytes, library.stream))
    given = pb_utils.Tensor.from_dlpack("IN", own)
called = self.args["model_name"].partition("_")[2]
answer = pb_utils.InferenceRequest(
    model_name=called, requested_output_names=["OUT"], inputs=[given]).exec()
if answer.has_error():
    raise pb_utils.TritonModelException(answer.error().message())
(tensor,) = answer.output_tensors()
print("answer on host" if tensor.is_cpu() else "answer on device", flush=True)
return tensor
"""
)

HOST = answering(
    """
assert all(tensor.is_cpu() for tensor in request.inputs())
return respond(OUT=2 * value)
"""
)


def ensemble(repository, name, members, tensors="IN FP32 [-1] > OUT FP32 [-1]"):
    """Write an ensemble of models behind each other."""
    between = ["IN", *[f"between_{i}" for i in range(1, len(members))], "OUT"]
    steps = [
        f"{member} IN={given} > OUT={made}"
        for member, given, made in zip(members, between, between[1:], strict=False)
    ]
    write_ensemble(repository, name, *steps, tensors=tensors)


@pytest.fixture(scope="module", params=HANDLES)
def served(tmp_path_factory, request):
    repository = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        write_device_model(repository, name, DOUBLE)
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    for called in ("second", "host", "both"):
        write_device_model(repository, f"call_{called}", CALLER)
    ensemble(repository, "both", ["first", "second"])
    ensemble(repository, "by_host", ["first", "host", "second"])
    with running_device_server(repository, handles=request.param) as served:
        yield served


def values():
    return np.random.default_rng().random(COUNT, np.float32)


def test_the_status_has_copies_by_kind_and_memory_on_the_gpu(served):
    assert served.infer("both", values())[0] == 200
    document = json.loads(served.server.request("GET", "/v2/gpubridge/status")[2])
    first = next(model for model in document["models"] if model["name"] == "first")
    copies = first["statistics"]["copies"]
    assert copies["d2d"]["count"] > 0
    assert copies["d2d"]["bytes"] == NBYTES * copies["d2d"]["count"]
    (instance,) = first["instances"]
    assert instance["device"] == 0
    assert instance["device_memory_bytes"] >= NBYTES


def test_an_edge_to_a_model_on_the_host_and_back(served):
    given = values()
    with (
        served.doing("first", d2h=(NBYTES, 1), waits=1),
        served.doing("second", d2h=(NBYTES, 1), waits=1),
    ):
        assert served.infer("by_host", given) == (200, (8 * given).tolist())


def test_a_call_of_a_model_on_the_same_gpu(served):
    before = len(served.server.log())
    for _ in range(3):
        given = values()
        with (
            # Its own memory once into the arena; the answer once to the host.
            served.doing("call_second", d2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1),
            served.doing("second", d2d=(NBYTES, 1)),
        ):
            assert served.infer("call_second", given) == (200, (2 * given).tolist())
    logged = served.server.log()[before:]
    assert "answer on host" not in logged
    assert "answer on device" in logged


def test_a_call_of_a_model_on_the_host_is_brought_to_it_by_the_server(served):
    given = values()
    with (
        served.doing("call_host", d2d=(NBYTES, 1)),
        served.doing("host", d2h=(NBYTES, 1), waits=1),
    ):
        assert served.infer("call_host", given) == (200, (2 * given).tolist())


def test_a_call_of_an_ensemble_leaves_its_answer_on_the_gpu(served):
    given = values()
    with (
        served.doing("call_both", d2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1),
        served.doing("first", d2d=(NBYTES, 1)),
        served.doing("second", d2d=(NBYTES, 1)),
    ):
        assert served.infer("call_both", given) == (200, (4 * given).tolist())


def test_a_trace_does_not_show_what_is_on_a_gpu(tmp_path):
    for name in ("first", "second"):
        write_device_model(tmp_path, name, DOUBLE)
    ensemble(tmp_path, "both", ["first", "second"])
    file = tmp_path / "traces.json"
    flags = (f"triton,file={file}", "level=TIMESTAMPS", "level=TENSORS", "rate=1")
    with running_device_server(tmp_path, *[f"--trace-config={flag}" for flag in flags]) as served:
        assert served.infer("both", [1.5, 2.5]) == (200, [6, 10])
    models = {
        entry["id"]: entry["model_name"]
        for entry in json.loads(file.read_text())
        if "model_name" in entry
    }
    outputs = {
        models[entry["id"]]: entry["tensor"].get("data")
        for entry in json.loads(file.read_text())
        if entry.get("activity") == "TENSOR_BACKEND_OUTPUT"
    }
    assert outputs["first"] in (None, "")
    assert "6" in outputs["second"]


def test_tensors_cross_in_host_memory_if_the_gpu_is_full(tmp_path):
    write_device_model(tmp_path, "first", DOUBLE)
    write_device_model(tmp_path, "second", DOUBLE)
    ensemble(tmp_path, "both", ["first", "second"])
    with running_device_server(tmp_path, arena=LARGE_ARENA) as served:
        full = 'gpubridge_fallbacks_total{model="first",reason="device_memory_full",version="1"}'
        # A framework has the rest, for the moment.
        served.machine.set_memory(24 << 20)
        for _ in range(3):
            assert served.infer("both", [1.0]) == (200, [4.0])
        assert served.server.metrics()[full] == 3
        assert served.server.log().count("while it has no memory for them") == 1
        served.machine.set_memory(1 << 30)
        with served.doing("first", d2d=(4, 1)), served.doing("second", d2h=(4, 1), waits=1):
            assert served.infer("both", [1.0]) == (200, [4.0])
        assert served.server.metrics()[full] == 3
