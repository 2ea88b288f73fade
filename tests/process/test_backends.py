"""Backends that are written in Python, under a server: shipped ones, and a user's own."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.process.ensembles import write_ensemble
from tests.process.forked_commands import run_forked
from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

OWN_BACKEND = """
import json, os, sys
import numpy as np
import sibling
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "words.txt")) as file:
            self.words = file.read()
        self.args = args

    def execute(self, requests):
        told = {
            "args": self.args,
            "file": __file__,
            "name": __name__,
            "model_dir": pb_utils.get_model_dir(),
            "path": sys.path,
            "python": sys.prefix,
            "sibling": sibling.VALUE,
            "words": self.words,
        }
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            raise ValueError("planted")
        said = np.array([json.dumps(told).encode()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)]) for _ in requests]
"""
TWICE = answering(
    """
tensors = [pb_utils.Tensor("X", value)]
response = pb_utils.InferenceRequest(
    model_name="double", requested_output_names=["DOUBLED"], inputs=tensors
).exec()
if response.has_error():
    return pb_utils.InferenceResponse([], response.error())
return respond(OUT=response.output_tensors()[0].as_numpy() * 10)
"""
)


def own_model(repository: Path, name: str, backend: str) -> Path:
    directory = write_model(repository, name, "raise SystemExit", tensors="> OUT STRING [1]")
    # Its own model.py is none of this backend's business.
    config = (directory / "config.pbtxt").read_text().replace('"python"', f'"{backend}"')
    (directory / "config.pbtxt").write_text(config)
    (directory / "1" / "words.txt").write_text("of the version")
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder, and a server of the backends and models in it: one brings an environment, one is hidden."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("own", "packed"):
        directory = folder / "backends" / name
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(OWN_BACKEND)
        (directory / "sibling.py").write_text("VALUE = 7\n")
        own_model(folder / "models", f"model_of_{name}", name)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "venv",
            "--without-pip",
            "--system-site-packages",
            directory / "venv",
        ],
        check=True,
        timeout=150,
    )
    # The tests' own environment is no system's: it is named.
    site = next((directory / "venv" / "lib").glob("python3*/site-packages"))
    (site / "numpy.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    # The folder is named as the library that its backend imports: that is none, either.
    lacking = folder / "backends" / "onnxruntime"
    lacking.mkdir()
    shipped = Path(__file__).parents[2] / "gpubridge" / "backends" / "onnxruntime" / "model.py"
    hidden = "import sys\nsys.modules['onnxruntime'] = None\n"
    source = shipped.read_text().replace("from collections.abc", hidden + "from collections.abc", 1)
    (lacking / "model.py").write_text(source)
    graph = folder / "models" / "lacking"
    (graph / "1").mkdir(parents=True)
    (graph / "1" / "model.onnx").touch()
    (graph / "config.pbtxt").write_text(
        'input [{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }]'
        'output [{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }]'
    )
    flags = (
        f"--backend-directory={folder / 'backends'}",
        "--exit-on-error=false",
        "--strict-readiness=false",
    )
    with running_server(folder / "models", *flags, own=True) as server:
        yield folder, server


def ask(server, model, name, values):
    tensor = {
        "name": name,
        "datatype": "FP32",
        "shape": list(np.shape(values)),
        "data": np.ravel(values).tolist(),
    }
    path = f"/v2/models/{model}/infer"
    status, _, body = server.request("POST", path, json.dumps({"inputs": [tensor]}))
    answer = json.loads(body)
    return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]


def test_a_backend_of_the_users_runs_models_by_their_files(own):
    folder, server = own
    backend, directory = folder / "backends" / "own", folder / "models" / "model_of_own"
    status, data = ask(server, "model_of_own", "IN", [1.0])
    assert status == 200, data
    told = json.loads(data[0])
    assert told["words"] == "of the version"
    assert told["model_dir"] == str(directory / "1")
    assert told["file"] == str(backend / "model.py")
    assert told["name"] == "model"
    assert told["sibling"] == 7
    assert str(backend) in told["path"]
    assert str(backend.parent) not in told["path"]
    assert told["args"]["model_repository"] == str(directory)
    config = json.loads(told["args"]["model_config"])
    assert (config["backend"], config["runtime"]) == ("own", "model.py")
    # The error is Triton's, with the places in the backend's file.
    status, error = ask(server, "model_of_own", "IN", [-1.0])
    assert (status, error.partition("\n")[0]) == (
        500,
        "Failed to process the request(s) for model 'model_of_own_0', message: ValueError: planted",
    )
    assert f"{backend / 'model.py'}(" in error
    metadata = json.loads(server.request("GET", "/v2/models/model_of_own")[2])
    assert metadata["platform"] == "own"
    rows = [line.split() for line in server.log().splitlines() if line.startswith("| ")]
    assert ["|", "Backend", "|", "Path", "|", "Config", "|"] in rows
    (row,) = [row for row in rows if row[1] == "own"]
    assert "python" in [row[1] for row in rows]
    assert row[3] == str(backend / "model.py")
    assert json.loads(row[5])["cmdline"]["backend-directory"] == str(folder / "backends")


def test_a_backend_brings_its_environment(own):
    folder, server = own
    told = json.loads(ask(server, "model_of_packed", "IN", [1.0])[1][0])
    assert told["python"] == str(folder / "backends" / "packed" / "venv")


def test_a_library_that_is_missing_is_named_with_its_installation(own):
    reason = own[1].index()["lacking", 1]["reason"]
    assert "the backend 'onnxruntime' needs onnxruntime" in reason
    assert "-m pip install onnxruntime" in reason


def test_a_wrong_backend_directory_is_refused_at_the_start(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "none").touch()
    finished = run_forked(
        "serve", str(tmp_path / "models"), "--backend-directory", str(tmp_path / "none")
    )
    assert finished.returncode == 1
    assert f"--backend-directory expects a directory, got {tmp_path / 'none'}" in finished.stderr


def write_addition(directory: Path, inputs: tuple[str, str], outputs: tuple[str, ...]) -> None:
    """Write a graph whose outputs are all the sum of its inputs, FP32 of two columns."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", inputs, [name]) for name in outputs],
        "g",
        [value(name, 1, ["n", 2]) for name in dict.fromkeys(inputs)],
        [value(name, 1, ["n", 2]) for name in outputs],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    (directory / "1").mkdir(parents=True)
    onnx.save(model, directory / "1" / "model.onnx")


def write_double(repository: Path) -> None:
    write_addition(repository / "double", ("X", "X"), ("DOUBLED",))
    (repository / "double" / "config.pbtxt").write_text(
        """platform: "onnxruntime_onnx" max_batch_size: 4
        input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "DOUBLED" data_type: TYPE_FP32 dims: [ 2 ] }
        dynamic_batching { max_queue_delay_microseconds: 1000 }"""
    )


def write_negate(repository: Path) -> None:
    torch = pytest.importorskip("torch")
    directory = repository / "negate" / "1"
    directory.mkdir(parents=True)
    with warnings.catch_warnings():
        # TorchScript is deprecated; existing repositories are full of it.
        warnings.simplefilter("ignore")
        negate = torch.jit.trace(torch.neg, torch.ones(1, 2))
        negate.save(str(directory / "model.pt"))
    (directory.parent / "config.pbtxt").write_text(
        """platform: "pytorch_libtorch" max_batch_size: 4
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }"""
    )


def write_sum(repository: Path) -> None:
    write_addition(repository / "sum", ("X", "STATE_IN"), ("SUM", "STATE_OUT"))
    (repository / "sum" / "config.pbtxt").write_text(
        """max_batch_size: 4
        input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] }
        sequence_batching { state {
          input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 2 ] } }"""
    )


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A server of models of shipped backends, and of those that ask them."""
    folder = tmp_path_factory.mktemp("shipped")
    write_double(folder)
    write_negate(folder)
    write_sum(folder)
    steps = "double X=IN > DOUBLED=middle", "negate INPUT__0=middle > OUTPUT__0=OUT"
    vectors = "IN FP32 [2] > OUT FP32 [2]"
    write_ensemble(folder, "both", *steps, tensors=vectors, config="max_batch_size: 4")
    write_model(folder, "twice", TWICE, config="max_batch_size: 4", tensors="IN FP32 [2]")
    with running_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(shipped):
    with triton.InferenceServerClient(shipped.http_url) as client:
        yield client


def test_ensembles_find_their_onnx_and_pytorch_stages(shipped, client):
    for i in range(3):
        x = np.full((i + 1, 2), i, np.float32)
        tensor = triton.InferInput("IN", x.shape, "FP32").set_data_from_numpy(x)
        np.testing.assert_array_equal(client.infer("both", [tensor]).as_numpy("OUT"), -2 * x)
    assert client.get_model_metadata("double")["platform"] == "onnxruntime_onnx"
    assert client.get_model_metadata("negate")["platform"] == "pytorch_libtorch"


def test_bls_finds_an_onnx_stage(shipped):
    assert ask(shipped, "twice", "IN", [[1.0, 2.0]]) == (200, [20.0, 40.0])
    # What the graph does not take is refused by the second stage, and told by the first.
    assert ask(shipped, "double", "X", [[1.0, 2.0, 3.0]])[0] == 400
    assert ask(shipped, "double", "X", [[1.0, 2.0]]) == (200, [2.0, 4.0])


def test_a_graph_keeps_the_state_of_a_sequence(client):
    tensor = triton.InferInput("X", [1, 2], "FP32")
    for i in range(3):
        tensor.set_data_from_numpy(np.array([[1, 10]], np.float32))
        answer = client.infer("sum", [tensor], sequence_id=5, sequence_start=i == 0)
        assert answer.as_numpy("SUM").tolist() == [[i + 1, 10 * (i + 1)]]
        assert answer.as_numpy("STATE_OUT") is None
