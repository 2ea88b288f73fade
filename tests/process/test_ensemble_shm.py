"""Ensembles whose inputs lie in clients' own shared memory."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory as shm

from tests.process.ensembles import copied, write_models
from tests.process.server import running_server

COUNT = 100_000


@pytest.fixture
def server(tmp_path):
    write_models(tmp_path)
    with running_server(tmp_path, "--allow-client-shm=true") as running:
        yield running


@pytest.fixture
def region():
    """A region of the client's; its values are all 1."""
    key = f"/{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("region", key, 4 * COUNT)
    shm.set_shared_memory_region(handle, [np.ones(COUNT, np.float32)])
    yield key, handle
    shm.destroy_shared_memory_region(handle)


def test_inputs_are_read_where_they_are(server, region):
    key, handle = region
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        client.register_system_shared_memory("region", key, 4 * COUNT)
        tensor = tritonclient.http.InferInput("A", [COUNT], "FP32")
        tensor.set_shared_memory("region", 4 * COUNT)
        # Two members read it, and one that may not write to it.
        before = copied(server, "diamond"), copied(server, "add"), copied(server, "sum")
        answer = client.infer("diamond", [tensor]).as_numpy("B")
        assert np.all(answer == 6)
        after = copied(server, "diamond"), copied(server, "add"), copied(server, "sum")
        # Each member places its outputs; nothing else is copied.
        assert [(b - a) // 4 for a, b in zip(before, after, strict=True)] == [
            0,
            4 * COUNT,
            COUNT,
        ]
        assert client.infer("edits", [tensor]).as_numpy("M").tolist() == [1]
        assert np.all(shm.get_contents_as_numpy(handle, np.float32, [COUNT]) == 1)
        output = tritonclient.http.InferRequestedOutput("B")
        output.set_shared_memory("region", 4 * COUNT)
        with pytest.raises(InferenceServerException, match="cannot go to shared memory yet"):
            client.infer("diamond", [tensor], outputs=[output])
        with pytest.raises(InferenceServerException, match="is an input in shared memory"):
            client.infer("fan", [tensor])
        # No use of it is left behind.
        client.unregister_system_shared_memory("region")
        assert client.get_system_shared_memory_status() == []
