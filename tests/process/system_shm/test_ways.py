"""Tensors in clients' own shared memory: the ways of the data, with real clients."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import serialize_byte_tensor, shared_memory as shm

from tests.process.client_memory import (
    infer,
    memory,
    regions,
    shared_input,
    shared_output,
)

COUNT = 300_000


class Copies:
    """Bytes that the bridge copied for a model since this object was made."""

    def __init__(self, server, name):
        self._copied = partial(server.copied, name)
        self._before = self._copied()

    @property
    def nbytes(self):
        return self._copied() - self._before


@pytest.mark.parametrize("count", [1, 1000, COUNT])
def test_the_only_copy_is_the_output_into_the_clients_memory(server, api, count):
    library, client = api
    values = np.arange(count, dtype=np.float32)
    with regions(client, 4 * count, 4 * count) as (source, target):
        shm.set_shared_memory_region(source, [values])
        copies = Copies(server, "echo")
        infer(library, client, "echo", count)
        assert (shm.get_contents_as_numpy(target, np.float32, [count]) == values).all()
        assert copies.nbytes == 4 * count


def test_with_request_output_nothing_is_copied(server, api):
    library, client = api
    values = np.arange(COUNT, dtype=np.float32)
    with regions(client, 4 * COUNT, 4 * COUNT) as (source, target):
        shm.set_shared_memory_region(source, [values])
        copies = Copies(server, "final")
        infer(library, client, "final", COUNT)
        assert (shm.get_contents_as_numpy(target, np.float32, [COUNT]) == values + 1).all()
        assert copies.nbytes == 0
        # Nor where the answer goes over the network.
        result = infer(library, client, "final", COUNT, region_out=None)
        assert (result.as_numpy("OUT") == values + 1).all()
        assert copies.nbytes == 0


def test_a_response_has_nothing_of_an_output_that_is_elsewhere(server, http):
    with regions(http, 64, 64):
        region = {"shared_memory_region": "1", "shared_memory_byte_size": 16}
        given = {"name": "IN", "datatype": "FP32", "shape": [4], "parameters": region}
        wanted = {"name": "OUT", "parameters": {**region, "shared_memory_region": "0"}}
        for _ in range(2):
            status, fields, body = server.request(
                "POST",
                "/v2/models/echo/infer",
                json.dumps({"inputs": [given], "outputs": [wanted]}),
            )
            assert status == 200
            assert fields["Content-Type"] == "application/json"
            assert json.loads(body)["outputs"] == [
                {"name": "OUT", "datatype": "FP32", "shape": [4]}
            ]


def test_inputs_here_and_there_and_places_inside_regions(api):
    library, client = api
    values = np.arange(100, dtype=np.float32)
    with regions(client, 400, 400) as (source, target):
        shm.set_shared_memory_region(source, [values])
        sent = library.InferInput("B", [8], "FP32")
        sent.set_data_from_numpy(np.full(8, 1000, np.float32))
        given = shared_input(library, "1", [8], offset=40)
        for inputs in ([given, sent], [sent, given]):
            client.infer("add", inputs, outputs=[shared_output(library, "0", 64, 320)])
            answer = shm.get_contents_as_numpy(target, np.float32, [100])
            expected = np.zeros(100, np.float32)
            expected[80:88] = values[10:18] + 1000
            assert (answer == expected).all()
            shm.set_shared_memory_region(target, [np.zeros(100, np.float32)])


def test_json_values_beside_a_region(server, http):
    with regions(http, 64) as (source,):
        shm.set_shared_memory_region(source, [np.arange(4, dtype=np.float32)])
        region = {"shared_memory_region": "0", "shared_memory_byte_size": 16}
        document = {
            "inputs": [
                {"name": "B", "datatype": "FP32", "shape": [4], "data": [1, 1, 1, 1]},
                {"name": "IN", "datatype": "FP32", "shape": [4], "parameters": region},
            ]
        }
        _, _, body = server.request("POST", "/v2/models/add/infer", json.dumps(document))
        assert json.loads(body)["outputs"][0]["data"] == [1, 2, 3, 4]


def test_strings_both_ways(api):
    library, client = api
    words = np.array([b"a", b"", "käse".encode(), b"x" * 5000], np.object_)
    packed = serialize_byte_tensor(words)
    nbytes = len(packed.item())
    with regions(client, nbytes, 8192) as (target, source):
        shm.set_shared_memory_region(source, [packed])
        given = shared_input(library, "0", [4], "BYTES", nbytes)
        client.infer("strings", [given], outputs=[shared_output(library, "1", nbytes)])
        assert shm.get_contents_as_numpy(target, np.object_, [4]).tolist() == words.tolist()
        result = client.infer("strings", [given])
        assert result.as_numpy("OUT").tolist() == words.tolist()


@pytest.mark.parametrize("library", [tritonclient.http.aio, tritonclient.grpc.aio])
def test_the_asyncio_clients(server, library):
    url = server.http_url if library is tritonclient.http.aio else server.grpc_url

    async def run(source_key, target_key):
        async with library.InferenceServerClient(url) as client:
            await client.register_system_shared_memory("s", source_key, 400)
            await client.register_system_shared_memory("t", target_key, 400)
            await client.get_system_shared_memory_status()
            base = tritonclient.http if library is tritonclient.http.aio else tritonclient.grpc
            await client.infer(
                "echo",
                [shared_input(base, "s", [100])],
                outputs=[shared_output(base, "t", 400)],
            )
            await client.unregister_system_shared_memory()

    with memory(400) as (source_key, source), memory(400) as (target_key, target):
        values = np.arange(100, dtype=np.float32)
        shm.set_shared_memory_region(source, [values])
        asyncio.run(run(source_key, target_key))
        assert (shm.get_contents_as_numpy(target, np.float32, [100]) == values).all()


def fallbacks(server, model, reason):
    labels = f'{{model="{model}",reason="{reason}",version="1"}}'
    return server.metrics()["gpubridge_fallbacks_total" + labels]


def test_a_model_that_writes_into_inputs_gets_copies_and_the_client_keeps_its_bytes(server, http):
    values = np.arange(10, dtype=np.float32)
    with regions(http, 40, 40) as (source, target):
        shm.set_shared_memory_region(source, [values])
        # The first batch is executed again with copies.
        for _ in range(2):
            shm.set_shared_memory_region(target, [values])
            infer(tritonclient.http, http, "edit", 10)
            assert (shm.get_contents_as_numpy(source, np.float32, [10]) == values).all()
            assert (shm.get_contents_as_numpy(target, np.float32, [10]) == values + 1).all()
        assert "model 'edit_0' writes into its inputs" in server.log()
        assert fallbacks(server, "edit", "client_inputs_written") == 1
        infer(tritonclient.http, http, "copying", 10)
        assert (shm.get_contents_as_numpy(target, np.float32, [10]) == values + 1).all()
        assert (shm.get_contents_as_numpy(source, np.float32, [10]) == values).all()


def test_a_model_that_keeps_inputs_gets_copies(server, http):
    with regions(http, 4) as (source,):
        for number in range(4):
            shm.set_shared_memory_region(source, [np.array([number], np.float32)])
            result = infer(tritonclient.http, http, "keep", 1, "0", None)
        # The first view is of the client's memory, which has changed since; the others are copies.
        assert result.as_numpy("OUT").tolist() == [3, 1, 2, 3]
        assert "model 'keep_0' keeps inputs beyond their request" in server.log()
        assert fallbacks(server, "keep", "client_inputs_kept") == 1


def test_output_tensors_can_be_dropped_kept_and_sent_again(server, http):
    count = COUNT
    first = np.arange(count, dtype=np.float32)
    with regions(http, 4 * count) as (source,):
        shm.set_shared_memory_region(source, [first])
        for _ in range(60):
            result = infer(tritonclient.http, http, "reuse", count, "0", None)
            assert (result.as_numpy("OUT") == first).all()
            # Later requests write to output tensors of their own, all of which are given back.
            shm.set_shared_memory_region(source, [np.full(count, -2, np.float32)])
