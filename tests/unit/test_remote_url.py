"""URLs of remote repositories, and credentials as Triton's variables name them."""

import json

import pytest

from gpubridge.config.remote_url import read_remote_url, storage_options
from gpubridge.errors import BridgeError

KEYS = {
    "s3": {
        "": {"key_id": "K", "secret_key": "S", "region": "R", "session_token": "", "profile": ""},
        "s3://b": {"key_id": "K2", "secret_key": "S2", "session_token": "T2"},
        "s3://b/deep": {"profile": "P"},
    },
    "gs": {"": "/keys/all.json", "gs://b": "/keys/b.json"},
    "as": {
        "": {"account_str": "A", "account_key": "AK"},
        "as://other/c": {"account_str": "other", "account_key": "OK"},
        "as://own/c": {"account_str": "own", "auth_type": "managed_identity"},
    },
}


@pytest.mark.parametrize(
    ("text", "protocol", "path", "server", "account"),
    [
        ("s3://b/some/path/", "s3", "b/some/path", "", ""),
        ("s3://b", "s3", "b", "", ""),
        ("s3://minio.local:9000/b/p", "s3", "b/p", "http://minio.local:9000", ""),
        ("s3://http://minio:9000/b/p", "s3", "b/p", "http://minio:9000", ""),
        ("s3://https://minio.local:443/b/p", "s3", "b/p", "https://minio.local:443", ""),
        ("s3://https://s3.example.com/b/p", "s3", "b/p", "https://s3.example.com", ""),
        ("s3://[::1]:9000/b", "s3", "b", "http://[::1]:9000", ""),
        ("gs://b/p", "gs", "b/p", "", ""),
        ("az://container/p", "az", "container/p", "", ""),
        ("as://acc/container/p", "az", "container/p", "", "acc"),
        ("as://acc.blob.core.windows.net/container", "az", "container", "", "acc"),
    ],
)
def test_the_forms_of_triton_are_read(text, protocol, path, server, account):
    url = read_remote_url(text)
    assert (url.protocol, url.path, url.server, url.account) == (protocol, path, server, account)
    assert str(url) == text.rstrip("/")


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///x", "ftp://b/p", "as://acc", "gs://b//p", "gs://b/../c", "s3://h:9/"]
)
def test_other_urls_are_refused_with_the_forms(text):
    with pytest.raises(BridgeError, match=r"expected a directory, s3://BUCKET/PATH, .*, got '"):
        read_remote_url(text)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)}


def options(text, environ):
    found = storage_options(read_remote_url(text), environ)
    found.pop("config_kwargs", None)
    return found


def test_the_entry_of_tritons_file_with_the_longest_name_is_used(keys):
    region = {"client_kwargs": {"region_name": "R"}}
    assert options("s3://a/p", keys) == {"key": "K", "secret": "S", **region}
    found = {"key": "K2", "secret": "S2", "token": "T2", "client_kwargs": {}}
    assert options("s3://b/p", keys) == found
    assert options("s3://b/deep/p", keys) == {"profile": "P", "client_kwargs": {}}
    server = {"endpoint_url": "http://h:1"}
    assert options("s3://h:1/p", keys) == {"key": "K", "secret": "S", **region, **server}
    assert options("gs://b/p", keys) == {"token": "/keys/b.json"}
    assert options("gs://c/p", keys) == {"token": "/keys/all.json"}
    assert options("az://c/p", keys) == {"account_name": "A", "account_key": "AK"}
    assert options("as://other/c/p", keys) == {"account_name": "other", "account_key": "OK"}


def test_azure_is_asked_with_the_environment_or_an_identity(keys):
    shared = {"AZURE_STORAGE_ACCOUNT": "E", "AZURE_STORAGE_KEY": "EK"}
    assert options("az://c/p", shared) == {"account_name": "E", "account_key": "EK"}
    assert options("as://acc/c/p", shared) == {"account_name": "acc", "account_key": "EK"}
    assert options("as://own/c/p", {**shared, **keys}) == {"account_name": "own"}
    identity = {**shared, "AZURE_STORAGE_AUTH_TYPE": "default"}
    assert options("as://acc/c/p", identity) == {"account_name": "acc"}


def test_without_credentials_the_library_of_the_cloud_looks_for_them():
    assert options("s3://b/p", {}) == {"client_kwargs": {}}
    assert options("gs://b/p", {}) == options("az://c/p", {}) == {}


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '{"s3": "secret"}', '{"s3": {"": ["secret"]}}', '{"s3": ["s3://"]}'],
)
def test_a_file_of_credentials_that_is_wrong_is_named_and_not_quoted(tmp_path, content):
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BridgeError) as caught:
        options("s3://b/p", {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)})
    assert str(path) in caught.value.message
    assert "secret" not in caught.value.message
