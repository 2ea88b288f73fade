"""Warm-up: what instances execute before they are ready, and which samples keep a model from loading."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.process.controlled import EXPLICIT, control, refusal
from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

# Notes each execute in a file: how many requests, and the first input's shape and sum.
NOTES = """
import json, os
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.instance = args["model_instance_name"]

    def execute(self, requests):
        noted = []
        for request in requests:
            value = request.inputs()[0].as_numpy()
            if value.dtype == object:
                noted.append([list(value.shape), b"|".join(value.ravel()).decode()])
            else:
                noted.append([list(value.shape), float(value.sum(dtype=np.float64))])
            if value.ravel()[0] == 666:
                raise ValueError("not this one")
            if value.ravel()[0] == 667:
                os._exit(5)
        with open(NOTES, "a") as file:
            file.write(json.dumps([self.instance, noted]) + "\\n")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
                for r in requests]
"""


def sample(name, content, *, dims="2", datatype="FP32", size=1, count=0, key="IN"):
    """Spell out one sample."""
    return (
        f'model_warmup [{{ name: "{name}" batch_size: {size} count: {count} inputs {{ key: "{key}" '
        f"value {{ data_type: TYPE_{datatype} dims: [{dims}] {content} }} }} }}]\n"
    )


def write_noting(repository, name, notes, config, *, datatype="FP32", files=()):
    source = NOTES.replace("NOTES", repr(str(notes)))
    tensors = f"IN {datatype} [-1] > OUT {datatype} [-1]"
    directory = write_model(repository, name, source, config=config, tensors=tensors)
    (directory / "warmup").mkdir()
    for file, content in files:
        (directory / "warmup" / file).write_bytes(content)


def read(notes: Path) -> list[list]:
    return [eval(line) for line in notes.read_text().splitlines()]


@pytest.fixture(scope="module")
def served(repository):
    """A repository, and its server, which loads what a test writes."""
    with running_server(repository, *EXPLICIT) as server:
        yield repository, server


def test_every_instance_executes_every_sample_before_it_is_ready(served, tmp_path):
    repository, server = served
    notes = {name: tmp_path / name for name in ("plain", "batched", "text", "many")}
    write_noting(
        repository,
        "plain",
        notes["plain"],
        sample("zero", "zero_data: true", dims="3")
        + sample("file", 'input_data_file: "raw"', count=2)
        + sample("random", "random_data: true", dims="100")
        + sample("none", "zero_data: true", size=0),
        files=[("raw", b"\0\0\x80\x3f" * 3)],
    )
    write_noting(
        repository, "batched", notes["batched"],
        "max_batch_size: 4\n" + sample("four", "zero_data: true", size=4),
    )  # fmt: skip
    write_noting(
        repository,
        "text",
        notes["text"],
        sample("empty", "zero_data: true", datatype="STRING")
        + sample("file", 'input_data_file: "raw"', datatype="STRING")
        + sample("random", "random_data: true", datatype="STRING"),
        datatype="STRING",
        files=[("raw", b"\2\0\0\0hi\1\0\0\0y")],
    )
    write_noting(
        repository, "many", notes["many"],
        "instance_group [{ count: 2 kind: KIND_CPU }]\n" + sample("s", "zero_data: true"),
    )  # fmt: skip
    for name in notes:
        assert control(server, "load", name) == (200, "")
    (zero, first, second, random) = [noted for _, noted in read(notes["plain"])]
    assert zero == [[[3], 0.0]]
    assert first == second == [[[2], 2.0]]
    ((shape, total),) = random
    assert shape == [100]
    assert 0 < total < 100
    # One execution of requests that each are one of the batch.
    assert read(notes["batched"]) == [["batched_0", [[[1, 2], 0.0]] * 4]]
    empty, given, words = [noted[0][1] for _, noted in read(notes["text"])]
    assert (empty, given, len(words)) == ("|", "hi|y", 9)
    assert sorted(name for name, _ in read(notes["many"])) == ["many_0_0", "many_0_1"]
    # They count, as at Triton.
    page = server.metrics()
    assert page['nv_inference_count{model="batched",version="1"}'] == 4
    assert page['nv_inference_exec_count{model="plain",version="1"}'] == 4
    assert "warmup sample 'none' has batch_size 0" in server.log()
    server.unload_all()


@pytest.fixture
def load(served):
    """Load the model m; it is gone after the test. Has the repository, and the server."""
    repository, server = served

    def load():
        assert control(server, "load") == (200, "")

    load.repository, load.server = served
    yield load
    control(server, "unload")
    wait_until(lambda: not server.stubs(), "the model to end", server)
    shutil.rmtree(repository / "m")


def test_a_stub_that_is_started_again_is_warmed_up_again(load, tmp_path):
    notes, server = tmp_path / "notes", load.server
    write_noting(load.repository, "m", notes, sample("s", "zero_data: true"))
    load()
    assert len(read(notes)) == 1
    (stub,) = server.stubs()
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: server.stubs() not in ([stub], []), "another stub", server)
    wait_until(lambda: server.is_ready("m"), "the model to be ready again", server)
    assert len(read(notes)) == 2


def test_decoupled_models_are_warmed_up(load, tmp_path):
    notes = tmp_path / "notes"
    write_model(
        load.repository,
        "m",
        sending(f"open({str(notes)!r}, 'a').write('executed\\n')\nsend(OUT=value)"),
        config="model_transaction_policy { decoupled: true }\n"
        + sample("s", "zero_data: true", count=3),
    )
    load()
    assert notes.read_text() == "executed\n" * 3


OUTSIDE = (
    "warmup data file '{}' of model '{}' leads out of {{folder}}: give a path inside that folder"
)
UNKNOWN = "[request id: <id_unknown>] "
FAILED = "failed to run warmup sample 's': "
BAD = {
    "missing": (
        sample("s", 'input_data_file: "nope"'),
        "failed to open text file for read {folder}/nope: No such file or directory",
    ),
    "short": (
        sample("s", 'input_data_file: "seven"'),
        UNKNOWN
        + "warmup setting expects 8 bytes, but the data provided from seven only has 7 bytes",
    ),
    "escape": (
        sample("s", 'input_data_file: "../config.pbtxt"'),
        OUTSIDE.format("../config.pbtxt", "escape"),
    ),
    "link": (sample("s", 'input_data_file: "link"'), OUTSIDE.format("link", "link")),
    "nodata": (
        sample("s", ""),
        UNKNOWN + "warmup setting expects input 'IN' to have input_data_type set",
    ),
    "variable": (
        sample("s", "zero_data: true", dims="-1"),
        "warmup setting expects all variable-size dimensions are specified for input 'IN'",
    ),
    "type": (
        sample("s", "zero_data: true", datatype="INT32"),
        UNKNOWN + "inference input 'IN' data-type is 'INT32', but model 'type' expects 'FP32'",
    ),
    "shape": (
        sample("s", "zero_data: true", dims="2, 2"),
        UNKNOWN + "unexpected shape for input 'IN' for model 'shape'. Expected [-1], got [2,2]. ",
    ),
    "batch": (
        sample("s", "zero_data: true", size=2),
        FAILED + "batch size 2 for 'batch', max allowed is 0; ",
    ),
    "huge": (
        sample("s", "zero_data: true", dims="1000000000"),
        "warmup input 'IN' of model 'huge': expected at most 1073741824 bytes, got 4000000000",
    ),
    "raises": (sample("s", 'input_data_file: "raises"', dims="1"), FAILED),
    "dies": (
        sample("s", 'input_data_file: "dies"', dims="1"),
        FAILED + "Stub process 'dies_0' is not healthy. It exited with code 5",
    ),
}


def test_samples_that_fail_keep_a_model_from_loading(served, tmp_path):
    repository, server = served
    files = [
        ("seven", b"\0" * 7),
        ("raises", b"\0\x80\x26\x44"),
        ("dies", b"\0\xc0\x26\x44"),
    ]
    for name, (config, _) in BAD.items():
        write_noting(repository, name, tmp_path / "notes", config, files=files)
    (repository / "link" / "warmup" / "link").symlink_to(tmp_path)
    write_ensemble(
        repository, "ensemble", "good IN=A > OUT=B", config=sample("s", "zero_data: true")
    )
    for name, (_, words) in BAD.items():
        reason = refusal(server, name)
        # Where the folder is, the server knows by another path.
        assert all(part in reason for part in words.split("{folder}")), reason
        assert name != "raises" or "not this one" in reason
    said = "model_warmup can not be specified for ensemble 'ensemble'"
    assert said in refusal(server, "ensemble")
    server.unload_all()


def test_inputs_that_are_not_declared_are_left_out_with_a_warning(load, tmp_path):
    more = 'inputs { key: "MORE" value { data_type: TYPE_FP32 dims: [3] zero_data: true } } }]'
    config = sample("s", "zero_data: true").replace("}]", more)
    write_noting(load.repository, "m", tmp_path / "notes", config)
    load()
    assert len(read(tmp_path / "notes")) == 1
    said = "warmup sample 's' has the input 'MORE', which the model has not: it is left out"
    assert f"model 'm': {said}" in load.server.log()


def test_samples_have_the_control_inputs_of_sequences(load, tmp_path):
    more = 'inputs { key: "START" value { data_type: TYPE_INT32 dims: [1] zero_data: true } } }]'
    source = answering(f"""
start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
open({str(tmp_path / "notes")!r}, "a").write(f"{{start.dtype}} {{start.tolist()}}\\n")
return respond(OUT=value)
""")
    control = "control_input { name: 'START' control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }"
    write_model(
        load.repository, "m", source,
        config=f"sequence_batching {{ {control} }} "
        + sample("s", "zero_data: true").replace("}]", more),
    )  # fmt: skip
    before = load.server.log().count("left out")
    load()
    assert (tmp_path / "notes").read_text() == "int32 [0]\n"
    assert load.server.log().count("left out") == before


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64"])
def test_random_numbers_of_every_kind(load, tmp_path, datatype):
    notes = tmp_path / "notes"
    write_noting(
        load.repository,
        "m",
        notes,
        sample("s", "random_data: true", dims="50", datatype=datatype),
        datatype=datatype,
    )
    load()
    ((_, [[shape, total]]),) = read(notes)
    assert shape == [50]
    assert 0 < total <= 50 * (127 if "INT" in datatype else 1)
