"""Ensembles whose inputs and outputs lie in clients' own shared memory."""

import importlib
import queue
import uuid

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory as shm

from tests.process.controlled import only
from tests.process.ensembles import write_ensemble, write_models
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, write_model

COUNT = 100_000
FINAL = answering(
    """
out = request.output("OUT", value.shape, value.dtype)
np.add(value, 1, out=out.as_numpy())
return pb_utils.InferenceResponse([out])
"""
)
COUNTS = sending("for number in range(3): send(OUT=value * number)")


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    # B is needed by a member, too, and made by an ensemble.
    write_ensemble(repository, "both", "chain A=A > B=B", "add IN=B > OUT=C", outputs="B C")
    write_model(repository, "final", FINAL)
    write_ensemble(repository, "finals", "final IN=A > OUT=t", "final IN=t > OUT=B")
    write_model(repository, "counts", COUNTS, config="model_transaction_policy { decoupled: true }")
    write_ensemble(repository, "counted", "counts IN=A > OUT=t", "add IN=t > OUT=B")
    asked = only("diamond", "edits", "fan", "finals", "both", "counted")
    with running_server(repository, "--allow-client-shm=true", *asked) as running:
        yield running


@pytest.fixture
def region(server):
    """A region of the client's; its values are all 1. No test leaves it registered."""
    key = f"/{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("region", key, 4 * COUNT)
    shm.set_shared_memory_region(handle, [np.ones(COUNT, np.float32)])
    yield key, handle
    server.request("POST", "/v2/systemsharedmemory/unregister")
    shm.destroy_shared_memory_region(handle)


def test_inputs_are_read_where_they_are(server, region):
    key, handle = region
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        client.register_system_shared_memory("region", key, 4 * COUNT)
        tensor = tritonclient.http.InferInput("A", [COUNT], "FP32")
        tensor.set_shared_memory("region", 4 * COUNT)
        # Two members read it: it is clear by now that they only do that.
        for _ in range(16):
            client.infer("diamond", [tensor])
        before = server.copied("diamond"), server.copied("add"), server.copied("sum")
        answer = client.infer("diamond", [tensor]).as_numpy("B")
        assert np.all(answer == 6)
        after = server.copied("diamond"), server.copied("add"), server.copied("sum")
        # Each member places its outputs; nothing else is copied.
        assert [(b - a) // 4 for a, b in zip(before, after, strict=True)] == [
            0,
            4 * COUNT,
            COUNT,
        ]
        assert client.infer("edits", [tensor]).as_numpy("M").tolist() == [1]
        assert np.all(shm.get_contents_as_numpy(handle, np.float32, [COUNT]) == 1)
        with pytest.raises(InferenceServerException, match="is an input in shared memory"):
            client.infer("fan", [tensor])
        # No use of it is left behind.
        client.unregister_system_shared_memory("region")
        assert client.get_system_shared_memory_status() == []


@pytest.fixture(params=["http", "grpc"])
def api(request, server):
    """The client library for a protocol, and a client of it."""
    library = importlib.import_module(f"tritonclient.{request.param}")
    url = server.http_url if request.param == "http" else server.grpc_url
    with library.InferenceServerClient(url) as client:
        yield library, client


def ask(api, model, outputs, count=COUNT):
    """Infer with ones; ``outputs`` go to regions, by name. Returns the result."""
    library, client = api
    tensor = library.InferInput("A", [count], "FP32")
    tensor.set_data_from_numpy(np.ones(count, np.float32))
    wanted = []
    for name, region in outputs.items():
        wanted.append(library.InferRequestedOutput(name))
        if region:
            wanted[-1].set_shared_memory(region, 4 * COUNT)
    return client.infer(model, [tensor], outputs=wanted)


def test_outputs_are_written_where_the_client_wants_them(server, api, region):
    key, handle = region
    _, client = api
    values = shm.get_contents_as_numpy(handle, np.float32, [COUNT])
    client.register_system_shared_memory("region", key, 4 * COUNT)
    before = server.copied("sum")
    result = ask(api, "diamond", {"B": "region"})
    assert result.get_output("B") is not None
    assert np.all(values == 6)
    # The last member alone writes it, once.
    assert server.copied("sum") - before == 4 * COUNT
    # Where the model writes to the place itself, nothing is copied.
    before = server.copied("final")
    ask(api, "finals", {"B": "region"})
    assert server.copied("final") == before
    assert np.all(values == 3)
    with pytest.raises(
        InferenceServerException, match=r"in ensemble 'diamond', .* should be at least"
    ):
        ask(api, "diamond", {"B": "region"}, COUNT + 1)
    with pytest.raises(InferenceServerException, match="an input that no model could write"):
        ask(api, "fan", {"A": "region"})
    # No use of it is left behind.
    client.unregister_system_shared_memory("region")
    assert server.request("GET", "/v2/systemsharedmemory/status")[2] == b"[]"


def test_an_output_that_a_member_needs_too_is_copied(server, api, region):
    key, handle = region
    _, client = api
    values = shm.get_contents_as_numpy(handle, np.float32, [COUNT])
    client.register_system_shared_memory("region", key, 4 * COUNT)
    for _ in range(16):
        # Until it is clear that the member only reads.
        ask(api, "both", {"B": "region", "C": ""})
    before = server.copied("chain"), server.copied("add")
    result = ask(api, "both", {"B": "region", "C": ""})
    assert np.all(values == 4)
    assert np.all(result.as_numpy("C") == 5)
    after = server.copied("chain"), server.copied("add")
    # Four outputs of "add", one of them twice.
    assert [(b - a) // 4 for a, b in zip(before, after, strict=True)] == [0, 5 * COUNT]
    client.unregister_system_shared_memory("region")


def test_each_response_of_a_decoupled_ensemble_is_written_there(server, region):
    key, handle = region
    values = shm.get_contents_as_numpy(handle, np.float32, [COUNT])
    seen = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.register_system_shared_memory("region", key, 4 * COUNT)
        client.start_stream(lambda result, error: seen.put((result, error)))
        tensor = tritonclient.grpc.InferInput("A", [COUNT], "FP32")
        tensor.set_data_from_numpy(np.ones(COUNT, np.float32))
        output = tritonclient.grpc.InferRequestedOutput("B")
        output.set_shared_memory("region", 4 * COUNT)
        client.async_stream_infer("counted", [tensor], outputs=[output])
        assert [seen.get(timeout=150)[1] for _ in range(3)] == [None] * 3
        client.stop_stream()
        assert np.all(values == 3)
        client.unregister_system_shared_memory("region")
