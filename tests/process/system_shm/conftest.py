"""A server with models that use clients' shared memory, and its clients."""

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.process.client_memory import memory_server


@pytest.fixture(scope="package")
def parent(tmp_path_factory):
    return tmp_path_factory.mktemp("parent")


@pytest.fixture(scope="package")
def server(parent):
    with memory_server(parent / "models") as server:
        yield server


@pytest.fixture
def http(server):
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture(params=["http", "grpc"])
def api(request, server):
    """The client library for a protocol, and a client of it."""
    library = getattr(tritonclient, request.param)
    url = server.http_url if request.param == "http" else server.grpc_url
    with library.InferenceServerClient(url) as client:
        yield library, client
        client.unregister_system_shared_memory()
