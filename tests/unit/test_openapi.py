"""The OpenAPI document: valid, its examples are requests, bounded, and not built for each request."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest

from gpubridge.frontend.api.document import OpenApiDocument
from gpubridge.protocol.generate import parse_generate
from gpubridge.protocol.infer_request import parse_request
from gpubridge.tensor.datatypes import DATATYPES
from tests.unit.model_configs import model_config

DECOUPLED = "model_transaction_policy { decoupled: true }"
NAMES = [name.replace("BYTES", "STRING") for name in DATATYPES]
CONFIGS = {
    "every": model_config(*(";".join(f"{name} {name} [2]" for name in NAMES),) * 2),
    "a {ü}/b": model_config("A FP32 [-1, 3]; B BOOL [1] optional: true", "", "max_batch_size: 8"),
    "stream": model_config("A STRING [1]", "", DECOUPLED),
    "large": model_config("A FP32 [3, 224, 224]"),
    "none": model_config(""),
    "writer": model_config("text_input STRING [1]", "text_output STRING [1]"),
}
CONFIGS = {name: replace(config, name=name) for name, config in CONFIGS.items()}


class Repository:
    """Ready models of these configurations; counts how often they are asked for."""

    server_id = "triton"

    def __init__(self, configs):
        self.asked = 0
        self._configs = configs

    def loaded(self):
        self.asked += 1
        for name, config in self._configs.items():
            for version in (1, 2):
                yield SimpleNamespace(name=name, version=version, config=config, ready=True)
        yield SimpleNamespace(name="not_ready", version=1, config=None, ready=False)


def read(document):
    return json.loads(asyncio.run(document.answer()).body)


@pytest.fixture(scope="module")
def api():
    return read(OpenApiDocument(Repository(CONFIGS)))


def validator(api, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator({"components": api["components"], **schema})


def test_it_has_openais_api_where_models_serve_it(api):
    asked = api["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert asked["example"] == {"model": "writer", "prompt": "hello"}
    assert validator(api, asked["schema"]).is_valid(asked["example"])
    assert not validator(api, asked["schema"]).is_valid({"model": "every", "prompt": "hello"})
    assert [path for path in api["paths"] if path.startswith("/v1/")] == [
        "/v1/completions",
        "/v1/models",
    ]
    others = {name: config for name, config in CONFIGS.items() if name != "writer"}
    paths = read(OpenApiDocument(Repository(others)))["paths"]
    assert not [path for path in paths if path.startswith("/v1/")]


@pytest.mark.extra
def test_the_document_is_valid(api):
    pytest.importorskip("openapi_spec_validator").validate(api)


def test_it_has_the_paths_of_ready_models(api):
    every = ("infer", "generate", "generate_stream")
    for name in CONFIGS:
        paths = [path for path in api["paths"] if quoted(name) in path]
        actions = every[2:] if name == "stream" else every
        assert [path.rpartition("/")[2] for path in paths] == list(actions)
    assert "not_ready" not in str(api["paths"])


def quoted(name):
    return "a%20%7B" if name.startswith("a ") else f"/{name}/"


def test_examples_fit_their_schemas_and_are_requests(api):
    seen = 0
    models = [each for each in api["paths"].items() if each[0].startswith("/v2/")]
    for path, item in models:
        content = item["post"]["requestBody"]["content"]["application/json"]
        check = validator(api, content["schema"])
        if "example" not in content:
            assert "large" in path or "every/infer" in path
            continue
        check.validate(content["example"])
        config = next(CONFIGS[name] for name in CONFIGS if quoted(name) in path)
        body = json.dumps(content["example"]).encode()
        if path.endswith("/infer"):
            parse_request(body, config, 0)
        elif "every" not in path:
            parse_generate(body, config)
        seen += 1
    assert seen >= 7


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "every/generate",
            {**dict.fromkeys(DATATYPES, 1), "BYTES": ["a", "b"], "BOOL": True, "INT8": 128},
        ),
        ("stream/generate_stream", {"A": 1}),
        ("stream/generate_stream", {}),
        (
            "large/infer",
            {"inputs": [{"name": "A", "datatype": "FP32", "shape": [3, 224, 225], "data": []}]},
        ),
        (
            "large/infer",
            {"inputs": [{"name": "B", "datatype": "FP32", "shape": [3, 224, 224], "data": []}]},
        ),
        ("large/infer", {"inputs": []}),
        ("none/infer", {"inputs": [{}]}),
    ],
)
def test_wrong_requests_do_not_fit(api, path, body):
    schema = api["paths"][f"/v2/models/{path}"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert not validator(api, schema).is_valid(body)


def test_it_is_built_once_for_all_who_ask_at_a_time_and_bounded():
    many = model_config(";".join(f"I{at} FP32 [1]" for at in range(300)))
    repository = Repository({**CONFIGS, "many": many})
    document = OpenApiDocument(repository, most=1)

    async def ask():
        return [each.body for each in await asyncio.gather(*(document.answer() for _ in range(9)))]

    bodies = asyncio.run(ask())
    assert repository.asked == 1
    assert len(set(bodies)) == 1
    api = json.loads(bodies[0])
    assert api["paths"] == {}
    assert f" {len(CONFIGS) + 1} models with many tensors" in api["info"]["description"]
    assert "many" not in str(read(OpenApiDocument(repository))["paths"])


def test_a_model_of_long_names_hides_no_other():
    repository = Repository({"a": model_config(f"{'I' * 4096} FP32 [1]"), **CONFIGS})
    document = OpenApiDocument(repository, most=35_000)
    assert read(document)["paths"] == read(OpenApiDocument(Repository(CONFIGS)))["paths"]
    # Its text is not kept, either.
    assert max(map(len, document._texts.values())) < 35_000
