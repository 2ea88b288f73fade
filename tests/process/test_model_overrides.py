"""Models that clients send: configurations and files instead of the repository's."""

import json
import shutil
import signal

import grpc
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.process.controlled import CONFIG, EXPLICIT, ask, control, source, write
from tests.process.server import running_server, wait_until


def test_clients_load_models_of_their_own(model, explicit_server):
    server, repository, name = model
    write(repository, name)
    files = {"file:/3/model.py": source("sent").encode()}
    for client in (
        tritonclient.http.InferenceServerClient(server.http_url, network_timeout=150),
        tritonclient.grpc.InferenceServerClient(server.grpc_url),
    ):
        client.load_model(name, config=CONFIG, files=files)
        assert ask(server, name) == "sent/3"
        (folder,) = explicit_server[1].iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert ask(server, name, version="1")[0] in (404, 503)
        client.load_model(name)
        assert ask(server, name) == "a/1"
        client.load_model("new", config=CONFIG, files=files)
        assert {row["name"] for row in _rows(client)} == {"m", name, "new"}
        client.unload_model("new")
        client.unload_model(name, unload_dependents=True)
        wait_until(lambda: files_in(explicit_server[1]) == ["lock"], "no files", server)
        with pytest.raises(InferenceServerException, match="'config' must be specified"):
            client.load_model(name, files=files)
        client.close()


def _rows(client):
    index = client.get_model_repository_index()
    return index if isinstance(index, list) else [{"name": row.name} for row in index.models]


def test_a_config_override_lasts_until_the_files_change_or_an_unload(model):
    server, repository, name = model
    for version in (1, 2):
        write(repository, name, version=version)
    grpc_client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    assert control(server, "load", name, config=CONFIG) == (200, "")
    assert ask(server, name, version="1") == "a/1"
    told = json.loads(server.request("GET", f"/v2/models/{name}/config")[2])
    assert told["version_policy"] == {"all": {}}
    # A load that is repeated changes nothing.
    assert control(server, "load", name) == (200, "")
    grpc_client.load_model(name)
    assert ask(server, name, version="1") == "a/1"
    write(repository, name, "b", version=2)
    assert control(server, "load", name) == (200, "")
    assert ask(server, name, version="1")[0] == 503
    assert ask(server, name) == "b/2"
    assert not grpc_client.is_model_ready(name, "1")
    grpc_client.close()
    # What GET says can be sent back.
    assert control(server, "load", name, config=json.dumps(told)) == (200, "")
    assert ask(server, name, version="1") == "a/1"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": "junk"}, "Invalid config override: "),
        ({"config": ""}, "Invalid config override: "),
        (
            {"config": json.dumps({"backend": "y" * (4 << 20)})},
            "Invalid config override: expected at most 4194304 characters, got 4194319",
        ),
        ({"config": '{"nonsense": 1}'}, "Invalid config override: "),
        ({"config": CONFIG[:-1] + ', "name": "other"}'}, "unexpected directory name 'm' for"),
        ({"config": 3}, "attempt to access JSON non-string as string"),
        ({"config": CONFIG, "file:1/model.py": "!!"}, "in base64"),
        ({"config": CONFIG, "file:../1/model.py": ""}, "must stay within model directory"),
        ({"config": CONFIG, "file:/": ""}, "must stay within model directory"),
        ({"config": CONFIG, "file:/../x": ""}, "must stay within model directory"),
        ({"config": CONFIG, "file:/1/a": "", "file:1/a": ""}, "it cannot be written"),
        ({"config": CONFIG, "file:1/../../x": ""}, "must stay within model directory"),
        ({"config": CONFIG, "file:": ""}, "must stay within model directory"),
        ({"config": CONFIG, "file:model.py": ""}, "into a directory such as file:1 "),
        ({"config": CONFIG, "file:1/a": "", "file:1//a": ""}, "it cannot be written"),
        ({"config": CONFIG, "file:1": "", "file:1/a": ""}, "it cannot be written"),
        ({"config": CONFIG, "file:1/" + "x" * 300: ""}, "it cannot be written"),
        ({"config": CONFIG, "file:model.py": ""}, "at least one version must be available"),
        ({"other": "x"}, "unrecognized load parameter 'other'"),
    ],
)
def test_bad_overrides_are_refused(explicit_server, parameters, text):
    server, temporary = explicit_server
    told = control(server, "load", **parameters)
    assert told[0] == 400
    assert text in told[1]
    assert ask(server) == "a/1"
    assert files_in(temporary) in ([], ["lock"])


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return tmp_path_factory.mktemp("r")


@pytest.fixture(scope="module")
def explicit_server(repository, tmp_path_factory):
    temporary = tmp_path_factory.mktemp("t")
    write(repository)
    limits = (f"--request-arena-limit={8 << 20}", f"--grpc-max-message-size={12 << 20}")
    flags = (*EXPLICIT, "--load-model", "m", *limits)
    with running_server(repository, *flags, environment={"TMPDIR": str(temporary)}) as server:
        yield server, temporary


@pytest.fixture
def model(explicit_server, repository):
    """That server, its repository, and the name of a model of the test's own."""
    server, temporary = explicit_server
    yield server, repository, "own"
    control(server, "unload", "own")
    shutil.rmtree(repository / "own")
    wait_until(lambda: files_in(temporary) in ([], ["lock"]), "no files", server)
    wait_until(lambda: len(server.stubs()) == 1, "m to be alone", server)


def files_in(temporary):
    return [path.name for folder in temporary.iterdir() for path in folder.iterdir()]


def test_a_server_removes_the_files_of_a_killed_one(explicit_server, repository):
    other, temporary = explicit_server
    files = {"file:1/model.py": source("sent").encode()}
    options = {"environment": {"TMPDIR": str(temporary)}, "own": True}

    def load(server):
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        client.load_model("own", config=CONFIG, files=files)

    load(other)
    (mine,) = temporary.iterdir()
    with running_server(repository, *EXPLICIT, **options) as server:
        load(server)
        (left,) = set(temporary.iterdir()) - {mine}
        server.stop(signal.SIGKILL)
    with running_server(repository, *EXPLICIT, **options) as server:
        load(server)
        assert left not in temporary.iterdir()
    assert list(temporary.iterdir()) == [mine]
    assert ask(other, "own") == "sent/1"
    control(other, "unload", "own")


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_large_files_over_grpc(explicit_server, compression):
    server, _ = explicit_server
    content = bytes(range(256)) * 20_000
    looks = "\nimport pathlib\nassert pathlib.Path(__file__).with_name('data').read_bytes() == "
    request = service_pb2.RepositoryModelLoadRequest(model_name="sent")
    request.parameters["config"].string_param = CONFIG
    request.parameters["file:1/model.py"].bytes_param = (
        source("sent") + f"{looks}bytes(range(256)) * 20_000\n"
    ).encode()
    request.parameters["file:1/data"].bytes_param = content
    with grpc.insecure_channel(server.grpc_url, compression=compression) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # What a message takes is given back: two do not fit at a time.
        for _ in range(2):
            stub.RepositoryModelLoad(request, timeout=150)
            assert ask(server, "sent") == "sent/1"
            stub.RepositoryModelUnload(
                service_pb2.RepositoryModelUnloadRequest(model_name="sent"), timeout=150
            )
        request.parameters["file:1/data"].bytes_param = content * 2
        with pytest.raises(grpc.RpcError) as refused:
            stub.RepositoryModelLoad(request, timeout=150)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        del request.parameters["file:1/data"]
        request.parameters["wrong"].bytes_param = content
        with pytest.raises(grpc.RpcError, match="unrecognized load parameter 'wrong'"):
            stub.RepositoryModelLoad(request, timeout=150)


def test_a_configuration_that_cannot_be_served_fails_each_version(model):
    server, repository, name = model
    write(repository, name)
    group = {"instance_group": {"kind": "KIND_CPU", "gpus": 0}}
    told = control(server, "load", name, config=json.dumps({**json.loads(CONFIG), **group}))
    reason = f"instance group {name}_0 of model {name} has kind KIND_CPU but specifies"
    assert told[0] == 400
    assert f"version 1 is at UNAVAILABLE state: Invalid argument: {reason}" in told[1]
    row = server.index()[name, 1]
    assert (row["state"], row["reason"][: len(reason)]) == ("UNAVAILABLE", reason)
