"""Servers whose models are in object storage: an S3 server and a GCS emulator on loopback."""

import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpubridge.config.remote_url import read_remote_url
from gpubridge.config.settings import RepositorySettings
from gpubridge.engine.repository.remote import open_repositories
from gpubridge.errors import BridgeError
from tests.process.controlled import EXPLICIT, ask, control, states, write
from tests.process.object_storage import ENVIRONMENT, s3_storage
from tests.process.server import running_server, wait_until

pytestmark = [
    pytest.mark.extra,
    # Of the emulators, and of sessions that are open at the end of this process.
    pytest.mark.filterwarnings("ignore"),
]

POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1")
LARGE = os.urandom(1 << 20)


@pytest.fixture
def storage():
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    with s3_storage(boto3, pytest.importorskip("moto.server")) as made:
        yield made


@pytest.fixture
def flags(tmp_path):
    return ("--model-cache-dir", str(tmp_path / "cache"))


def test_models_in_s3_are_served_and_followed(storage, tmp_path, flags):
    """Local and remote repositories side by side; a changed version alone is downloaded and started."""
    files, local = tmp_path / "files", tmp_path / "local"
    write(local, "here", "local")
    config = "version_policy { all {} }"
    write(files, config=config)
    storage.upload(files)
    both = (storage.url, local)
    with running_server(both, *POLL, *flags, environment=ENVIRONMENT) as server:
        assert (ask(server), ask(server, "here")) == ("a/1", "local/1")
        assert storage.downloads() == ["m/1/model.py", "m/config.pbtxt"]
        kept = set(server.stubs())
        write(files, tag="b", config=config, version=2)
        storage.upload(files)
        wait_until(lambda: states(server) == {1: "READY", 2: "READY"}, "the new version", server)
        assert (ask(server), ask(server, version="1")) == ("b/2", "a/1")
        assert storage.downloads() == ["m/2/model.py"]
        assert kept <= set(server.stubs()), "a version that has not changed goes on"
        # Keys that no directory can have concern one model.
        storage.put("bad/1", b"")
        storage.put("bad/1/model.py", b"")
        wait_until(lambda: "the key '1' is a file, and the folder" in server.log(), "it", server)
        assert (ask(server), ask(server, "here")) == ("b/2", "local/1")
        storage.delete("bad/")
        storage.delete("m/1/")
        wait_until(lambda: 1 not in _ready(server), "the version to go", server)
        assert ask(server) == "b/2"
    storage.downloads()
    with running_server(both, *flags, environment=ENVIRONMENT) as server:
        assert (ask(server), ask(server, "here")) == ("b/2", "local/1")
        assert storage.downloads() == []


def _ready(server):
    return {version for version, state in states(server).items() if state == "READY"}


def test_a_network_that_is_lost_costs_one_load(storage, tmp_path, flags):
    write(tmp_path / "files")
    write(tmp_path / "local", "here", "local")
    storage.upload(tmp_path / "files")
    storage.put("m/1/weights", LARGE)
    both = (storage.url, tmp_path / "local")
    with running_server(
        both, *EXPLICIT, *flags, "--load-model", "here", environment=ENVIRONMENT
    ) as server:
        storage.cut_after = 1 << 16
        status, told = control(server, "load")
        assert status == 500
        assert f"{storage.url}/m cannot be read: " in told
        assert ask(server, "here") == "local/1"
        storage.cut_after = None
        assert control(server, "load") == (200, "")
        assert ask(server) == "a/1"
        assert control(server, "unload") == (200, "")
        storage.downloads()
        assert control(server, "load") == (200, "")
        assert storage.downloads() == []
        # Without a network, what is served stays, and the index still answers.
        storage.cut_after = 0
        assert control(server, "load", "other")[0] == 500
        assert (ask(server), ask(server, "here")) == ("a/1", "local/1")
        assert ("m", 1) in server.index()


def test_polling_tries_a_download_again(storage, tmp_path, flags):
    write(tmp_path / "files")
    write(tmp_path / "local", "here", "local")
    storage.cut_after = 1 << 16
    both = (storage.url, tmp_path / "local")
    empty = "--allow-empty-repository=true"
    with running_server(both, *POLL, *flags, empty, environment=ENVIRONMENT) as server:
        storage.put("m/1/weights", LARGE)
        storage.upload(tmp_path / "files")
        told = f"{storage.url}/m cannot be read: "
        wait_until(lambda: told in server.log(), "the download to fail", server)
        assert ask(server, "here") == "local/1"
        storage.cut_after = None
        wait_until(lambda: server.is_ready("m"), "the model", server)
        assert ask(server) == "a/1"


@pytest.mark.parametrize("when", ["at the start", "by a client"])
def test_a_server_stops_in_the_middle_of_a_download(storage, tmp_path, flags, when):
    write(tmp_path / "files")
    storage.upload(tmp_path / "files")
    storage.put("m/1/weights", LARGE)
    storage.stall_after = 1 << 18
    mode = EXPLICIT if when == "by a client" else ()
    with running_server(
        [storage.url], *mode, *flags, ready=False, environment=ENVIRONMENT
    ) as server:
        if mode:
            wait_until(server.is_ready, "the server", server)
            load = threading.Thread(target=control, args=(server, "load"))
            load.start()
        wait_until(storage.stalled.is_set, "the download", server)
        wait_until(lambda: _is_downloading(server, storage), "its progress", server)
        assert f"downloading {storage.url}/m: 3 files, 1 MiB" in server.log()
        assert server.stop() == 0
        assert "Traceback" not in server.log()
        if mode:
            load.join()


def _is_downloading(server, storage):
    """Return whether the status has the bytes of a download."""
    loads = json.loads(server.request("GET", "/v2/gpubridge/status")[2])["loads"]
    return [
        load
        for load in loads
        if load["step"].startswith(f"downloading {storage.url}/m: ")
        and load["step"].endswith(" of 1 MiB")
        and 0 < load["fraction"] < 1
    ]


def test_a_repository_that_cannot_be_read_is_an_error_of_its_own(storage, tmp_path, flags):
    write(tmp_path, "here", "local")
    missing = f"s3://{storage.server}/no-such-bucket"
    both = (missing, tmp_path)
    told = f"{missing} cannot be read: there is no such bucket or key"
    with running_server(both, *flags, ready=False, environment=ENVIRONMENT) as server:
        assert server.process.wait(120) == 1
        assert told in server.log()
    with running_server(both, *flags, "--exit-on-error=false", environment=ENVIRONMENT) as server:
        assert ask(server, "here") == "local/1"
        assert told in server.log()
    unreadable = f"{storage.url} cannot be read: access is denied"
    with (
        storage.checked_keys(),
        running_server([storage.url], *flags, ready=False, environment=ENVIRONMENT) as server,
    ):
        assert server.process.wait(120) == 1
        assert f"{unreadable} (PermissionError: " in server.log()
    nobody = {**dict.fromkeys(ENVIRONMENT, ""), "HOME": str(tmp_path)}
    nobody["AWS_EC2_METADATA_DISABLED"] = "true"
    with running_server([storage.url], *flags, ready=False, environment=nobody) as server:
        assert server.process.wait(120) == 1
        assert unreadable in server.log()


def test_models_are_served_from_google_cloud_storage(tmp_path, flags):
    gcsfs = pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    write(tmp_path / "files")
    gcs = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="models")
    gcs.start()
    try:
        port = gcs._api._httpd.server_port
        # Its newest parts ask the real service over gRPC for the kind of the bucket.
        environment = {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        system = gcsfs.core.GCSFileSystem(
            token="anon", endpoint_url=environment["STORAGE_EMULATOR_HOST"]
        )
        system.put(str(tmp_path / "files") + "/", "models/repository/", recursive=True)
        with running_server(["gs://models/repository"], *flags, environment=environment) as server:
            assert ask(server) == "a/1"
    finally:
        gcs.stop()


@contextmanager
def storage_at(location=None):
    """A server that has nothing, or redirects there; yields its address and the headers that it got."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            got.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(307 if location else 404)
            self.send_header("Location", f"http://{location}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    got = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("module", "url"),
    [("s3fs", "s3://{}/b/models"), ("gcsfs", "gs://b/models"), ("adlfs", "az://c/models")],
)
def test_no_other_host_gets_credentials(module, url, monkeypatch):
    """Storage that redirects: S3's session token went with the request."""
    monkeypatch.setattr(pytest.importorskip("s3fs").S3FileSystem, "retries", 1)
    pytest.importorskip(module)
    credentials = pytest.importorskip("google.oauth2.credentials").Credentials("SECRET")
    with storage_at() as (other, stolen), storage_at(other) as (server, asked):
        azure = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey=Zm9v;BlobEndpoint=http://{server}/a;"
        given = {"AWS_SESSION_TOKEN": "SECRET", "AZURE_STORAGE_CONNECTION_STRING": azure}
        given |= {"STORAGE_EMULATOR_HOST": f"http://{server}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # fmt: skip
        for name, value in (ENVIRONMENT | given).items():
            monkeypatch.setenv(name, value)
        remote = read_remote_url(url.format(server))
        (opened,) = open_repositories(RepositorySettings(model_repositories=(remote,)))
        if module == "gcsfs":
            opened._system.credentials.credentials = credentials
        try:
            told = str(opened.models(required=True))
        except BridgeError as error:
            told = str(error)
        assert ["authorization" in each for each in asked] == [True] * (len(asked) or 1)
        assert [each for each in stolen if "authorization" in each or "SECRET" in str(each)] == []
        if module == "s3fs":
            assert f"expected an answer of {server}, got a redirect to '{other}'" in told
            assert stolen == []
