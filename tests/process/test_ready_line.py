"""Log lines of a ready server: its addresses, their reach, and a request for each model."""

import base64
import json
import re
from types import SimpleNamespace
from urllib.parse import quote

import jsonschema
import pytest
from PIL import Image
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException

from devtools import demo
from gpubridge import server as server_module
from gpubridge.cli import main
from tests.commands import run_command
from tests.process.client_memory import memory, shared_input
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_model

SOURCE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = {spec["name"]: spec for spec in config["input"]}
        (output,) = config["output"]
        self.output = output["name"], pb_utils.triton_string_to_numpy(output["data_type"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    def answer(self, request):
        sizes = [tensor.as_numpy().size for tensor in request.inputs()]
        print("got", sizes, flush=True)
        name, dtype = self.output
        value = np.array([[b"seen"]], np.object_) if dtype == np.object_ else np.ones((1, 1), dtype)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value)])

    def execute(self, requests):
        if not self.decoupled:
            return [self.answer(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BATCHED = "max_batch_size: 4"
STREAM = f"{BATCHED} model_transaction_policy {{ decoupled: true }}"
SEQUENCE = f"{BATCHED} sequence_batching {{ }}"
LARGE = "A 'photo' {} [3, 224, 224] > OUT {} [1]"
MODELS = {
    "numbers": ("IN INT8 [-1, 2] > OUT FP32 [1]", BATCHED),
    "a ü, 100%": ("IN INT8 [-1] > OUT FP32 [1]", BATCHED),
    "text": ("IN STRING [-1] > OUT STRING [1]", BATCHED),
    "optional": ("IN BOOL [1]; B FP32 [1] optional: true > OUT BOOL [1]", BATCHED),
    "all_optional": ("IN FP32 [1] optional: true > OUT FP32 [1]", BATCHED),
    "large": (LARGE.format("FP32", "FP32"), BATCHED),
    "large_text": (LARGE.format("STRING", "STRING"), BATCHED),
    "half": (LARGE.format("FP16", "FP16"), BATCHED),
    "sequence": ("IN FP32 [1] > OUT FP32 [1]", SEQUENCE),
    "stream": ("IN FP32 [2] > OUT STRING [1]", STREAM),
    "large_stream": (LARGE.format("STRING", "STRING"), STREAM),
}
SIZES = {"numbers": 2, "large": 150528, "large_text": 150528, "half": 150528, "stream": 2,
         "large_stream": 150528}  # fmt: skip


IMAGES = """
backend: "image_preproc"
max_batch_size: 4
input [{ name: "FILE" data_type: TYPE_STRING dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [3, 32, 32] }]
parameters { key: "SIZE" value: { string_value: "32" } }
"""
FORMATS = 'parameters {{ key: "FORMATS" value: {{ string_value: "{}" }} }}'
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "A" data_type: TYPE_STRING dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [3, 32, 32] }]
ensemble_scheduling { step [{
  model_name: "MEMBER" model_version: -1
  input_map { key: "INPUT" value: "A" } output_map { key: "OUT" value: "OUT" }
}] }
"""
IMAGE_MODELS = {
    "pixels": IMAGES,
    "pixels_of_jpeg": IMAGES + FORMATS.format("jpeg"),
    "pixels_of_others": IMAGES + FORMATS.format("TIFF, WebP"),
    "pixels_of_tiff": IMAGES + FORMATS.format("tiff"),
    "flow": ENSEMBLE.replace("MEMBER", "pixels_of_jpeg").replace("INPUT", "FILE"),
    "flow_of_flow": ENSEMBLE.replace("MEMBER", "flow").replace("INPUT", "A"),
}
PHOTOS = answering("""
import io
from PIL import Image
size = np.array([Image.open(io.BytesIO(row[0])).size for row in value], np.float32)
return respond(OUT=size[:, :1])
""")
HUGE = "IN FP32 [1000000, 1000000] > OUT FP32 [1]"


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "huge", SOURCE, tensors=HUGE)
    half_stream = LARGE.partition(" >")[0].format("FP16")
    write_model(repository, "half_stream", SOURCE, tensors=half_stream, config=STREAM)
    photos = "the_Photo STRING [1] > OUT FP32 [1]"
    write_model(repository, "photos", PHOTOS, config=BATCHED, tensors=photos)
    for name, config in IMAGE_MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    for name, (tensors, config) in MODELS.items():
        write_model(repository, name, SOURCE, config=config, tensors=tensors)
    with running_server(repository, own=True) as running:
        wait_until(lambda: "each model once:" in running.log(), "the last lines", running)
        yield running


def test_it_names_its_urls_and_who_can_connect(server):
    (line,) = [line for line in server.log().splitlines() if "] ready" in line]
    assert f"http://{server.http_url}, " in line
    assert f"gRPC {server.grpc_url}" in line
    assert f"http://{server.metrics_url}/metrics" in line
    assert f"open http://{server.http_url}/ in a browser" in line
    assert "only this machine can connect: --http-address=0.0.0.0" in line
    names = [line.split()[1] for line in server.log().splitlines() if line.startswith("| ")]
    assert names[:4] == ["Backend", "image_preproc", "python", "Model"]


def test_clients_memory_is_off_by_default(server):
    with memory(64) as (key, _):
        for library, url in ((http, server.http_url), (grpc, server.grpc_url)):
            with library.InferenceServerClient(url) as client:
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.register_system_shared_memory("0", key, 64)
                client.unregister_system_shared_memory()
                with pytest.raises(
                    InferenceServerException, match="--allow-client-shm=true"
                ) as refused:
                    client.register_cuda_shared_memory("0", base64.b64encode(bytes(64)), 0, 64)
                assert refused.value.status() in ("501", "StatusCode.UNIMPLEMENTED")
                with pytest.raises(InferenceServerException, match="Unable to find shared memory"):
                    client.infer("all_optional", [shared_input(library, "0", [1, 1])])


def test_the_demo_finds_it(server):
    assert len(demo.READY.findall(server.log())) == 1
    assert demo.service_address(server.log(), "HTTPService") == server.http_url


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_a_line_that_works(server, tmp_path, name):
    said = asked(server, tmp_path, name)
    assert b"OUT" in said
    assert f"[{name}_0] got [{SIZES.get(name, 1)}]" in server.log()


@pytest.mark.parametrize("name", [*IMAGE_MODELS, "photos"])
def test_image_models_get_images(server, tmp_path, name):
    said = asked(server, tmp_path, name)
    assert b"OUT" in said
    # A terminal shows no pixels.
    assert (tmp_path / "answer.bin").exists() == (name != "photos")


@pytest.mark.parametrize("name", ["numbers", "text", "half", "a ü, 100%"])
def test_a_load_of_a_model_is_answered(server, capsys, name):
    words = ["bench", "load", f"http://{server.http_url}", name, "--requests=9", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answered"], found["failed"], found["load"]) == (9, 0, "closed")


@pytest.mark.parametrize("padding", [0, 1 << 20])
def test_files_are_uploaded_as_a_form(server, tmp_path, padding):
    # Bytes behind an image are no part of it; a long form is read by a worker.
    for width in (1, 2):
        with (tmp_path / f"{width}.png").open("wb") as file:
            Image.new("L", (width, 1)).save(file, "png")
            file.write(bytes(padding))
    files = [f"the_Photo=@{tmp_path / name}" for name in ("1.png", "2.png")]
    url = f"http://{server.http_url}/v2/models/photos/infer"
    done = run_command(["curl", "-sS", *(word for file in files for word in ("-F", file)), url])
    (output,) = json.loads(done.stdout)["outputs"]
    assert (output["shape"], output["data"]) == ([2, 1], [1, 2]), done.stdout
    generated = run_command(["curl", "-sS", "-F", files[0], url.replace("infer", "generate")])
    assert 1 in json.loads(generated.stdout).values(), generated.stdout
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for way in ("infer", "generate", "generate_stream"):
        status, _, answer = server.request("POST", f"/v2/models/photos/{way}", b"", form)
        assert (status, b"it does not begin with its boundary" in answer) == (400, True)
    told = run_command(["curl", "-sS", "-F", files[0].replace("the_", ""), url]).stdout
    assert (
        "unexpected inference input 'Photo' for model 'photos': its inputs are 'the_Photo'" in told
    )


def asked(server, tmp_path, name):
    """Paste the line of a model into a shell; returns the answer."""
    lines = re.findall(rf"^.*curl .*/v2/models/{quote(name)}/.*$", server.log(), re.MULTILINE)
    assert len(lines) == 1
    done = run_command(
        ["bash", "-o", "pipefail", "-c", lines[0].replace("curl ", "curl -sS --fail-with-body ")],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = tmp_path / "answer.bin"
    said = answer.read_bytes() if answer.exists() else done.stdout.encode()
    assert b"error" not in said
    return said


def test_examples_of_the_openapi_document_are_answered_as_it_says(server):
    api = json.loads(server.request("GET", "/v2/openapi.json")[2])
    # A sequence has to be begun, and a text is no image.
    others = {"sequence", "photos", *IMAGE_MODELS}
    answered = set()
    posts = [(path, item) for path, item in api["paths"].items() if "post" in item]
    for path, item in posts:
        request = item["post"]["requestBody"]["content"]["application/json"]
        if "example" in request and item["post"]["tags"][0] not in others:
            status, fields, answer = server.request("POST", path, json.dumps(request["example"]))
            assert status == 200, (path, answer)
            content = item["post"]["responses"]["200"]["content"]
            (kind, told), *_ = content.items()
            assert fields["Content-Type"].startswith(kind)
            if kind == "application/json":
                schema = {"components": api["components"], **told["schema"]}
                jsonschema.validate(json.loads(answer), schema)
            answered.add(path.split("/")[-1])
    assert answered == {"infer", "generate", "generate_stream"}


@pytest.mark.nightly
def test_a_start_of_200_models_has_few_lines(tmp_path):
    for number in range(200):
        write_model(tmp_path / "models", f"m{number}", answering("return respond(OUT=value)"))
    with running_server(tmp_path / "models", own=True) as started:
        lines = started.log().splitlines()
    assert len(lines) < 250
    assert sum("READY" in line for line in lines) == 200


def test_models_that_curl_cannot_ask_have_no_line(server):
    lines = [line for line in server.log().splitlines() if "curl " in line]
    assert len(lines) == len({*MODELS, *IMAGE_MODELS, "photos"})
    assert not [line for line in lines if "huge" in line or "half_stream" in line]


def test_addresses_that_others_reach_are_a_warning(monkeypatch):
    endpoints = [
        server_module.Endpoint("HTTPService", host, 8000, None, set())
        for host in ("127.0.0.1", "0.0.0.0")
    ]
    said = []
    monkeypatch.setattr(
        server_module, "_logger", SimpleNamespace(warning=lambda text, *of: said.append(text % of))
    )
    settings = SimpleNamespace(repository=SimpleNamespace(model_control_mode="explicit"))
    server_module.warn_if_public(endpoints[:1], settings)
    assert said == []
    server_module.warn_if_public(endpoints, settings)
    (line,) = said
    assert line.startswith("0.0.0.0:8000: every client that reaches this machine")
    assert "load models, whose code runs here" in line


@pytest.mark.parametrize(
    ("host", "local", "place"),
    [
        ("127.0.0.1", True, "127.0.0.1:80"),
        ("127.0.0.2", True, "127.0.0.2:80"),
        ("::1", True, "[::1]:80"),
        ("0.0.0.0", False, "localhost:80"),
        ("::", False, "localhost:80"),
        ("192.0.2.7", False, "192.0.2.7:80"),
    ],
)
def test_a_listening_address_is_told_as_one_to_connect_to(host, local, place):
    endpoint = server_module.Endpoint("HTTPService", host, 80, None, set())
    assert (endpoint.is_loopback, endpoint.url_host) == (local, place)
