"""Tensors in clients' own shared memory, with real clients against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory as shm

from tests.process.server import running_server, wait_until, write_model

COUNT = 300_000
SHM = Path("/dev/shm")

_MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(r, r.inputs()[0].as_numpy())])
                for r in requests]

    def answer(self, request, x):
{answer}
"""
ECHO = "return pb_utils.Tensor('OUT', x)"
# Whether NumPy may write to the input, and 1 where it was copied here.
EDIT = """
x += 1
return pb_utils.Tensor("OUT", x)
"""
KEEP = """
self.kept.append(x)
return pb_utils.Tensor("OUT", np.array([k[0] for k in self.kept]))
"""
FINAL = """
out = request.output("OUT", x.shape, x.dtype)
np.add(x, 1, out=out.as_numpy())
return out
"""
# Output tensors that go nowhere, twice, or into the response of a later request.
REUSE = """
request.output("OUT", x.shape, x.dtype).as_numpy()[:] = -1
if not self.kept:
    out = request.output("OUT", x.shape, x.dtype)
    out.as_numpy()[:] = x
    self.kept.append(out)
return self.kept[0]
"""
WAIT = """
while not os.path.exists({gate!r}):
    time.sleep(0.01)
return pb_utils.Tensor("OUT", x)
"""


def model(answer):
    return _MODEL.format(answer="\n".join(" " * 8 + line for line in answer.strip().splitlines()))


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def server(tmp_path_factory, gate):
    repository = tmp_path_factory.mktemp("models")
    for name, answer in {"echo": ECHO, "edit": EDIT, "keep": KEEP, "final": FINAL}.items():
        write_model(repository, name, model(answer))
    write_model(repository, "reuse", model(REUSE))
    write_model(repository, "wait", model(WAIT.format(gate=str(gate))))
    write_model(repository, "spare", model(ECHO))
    copying = 'parameters { key: "INPUT_SHARING" value { string_value: "copy" } }'
    write_model(repository, "copying", model(EDIT), config=copying)
    strings = {
        "inputs": 'name: "IN" data_type: TYPE_STRING dims: [-1]',
        "outputs": 'name: "OUT" data_type: TYPE_STRING dims: [-1]',
    }
    write_model(repository, "strings", model(ECHO), **strings)
    batching = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 200000 }"
    write_model(repository, "batched_strings", model(ECHO), config=batching, **strings)
    write_model(
        repository,
        "add",
        model("return pb_utils.Tensor('OUT', x + request.inputs()[1].as_numpy())"),
        inputs='name: "IN" data_type: TYPE_FP32 dims: [-1] }, { '
        'name: "B" data_type: TYPE_FP32 dims: [-1]',
    )
    with running_server(repository, "--allow-client-shm=true") as server:
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


@contextmanager
def memory(nbytes):
    """Give a region's key and handle."""
    key = f"/gpubridge-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(key, key, nbytes)
    try:
        yield key, handle
    finally:
        shm.destroy_shared_memory_region(handle)


@contextmanager
def regions(client, *sizes):
    """Register regions "0", "1" ...; gives their handles."""
    with memory(sizes[0]) as (key, handle):
        name = str(len(sizes) - 1)
        client.register_system_shared_memory(name, key, sizes[0])
        if len(sizes) == 1:
            yield [handle]
            return
        with regions(client, *sizes[1:]) as others:
            yield [handle, *others]


def shared_input(library, region, shape, datatype="FP32", nbytes=None, offset=0, name="IN"):
    tensor = library.InferInput(name, shape, datatype)
    tensor.set_shared_memory(region, 4 * shape[-1] if nbytes is None else nbytes, offset)
    return tensor


def shared_output(library, region, nbytes, offset=0, name="OUT"):
    output = library.InferRequestedOutput(name)
    output.set_shared_memory(region, nbytes, offset)
    return output


def infer(library, client, name, count, region_in="1", region_out="0", shape=None):
    outputs = None if region_out is None else [shared_output(library, region_out, 4 * count)]
    return client.infer(name, [shared_input(library, region_in, [count])], outputs=outputs)


class Copies:
    """What the bridge copied for a model since this object was made."""

    def __init__(self, server, name):
        self._server = server
        self._label = f'gpubridge_copied_bytes_total{{kind="host",model="{name}",version="1"}}'
        self._before = server.metrics()[self._label]

    @property
    def nbytes(self):
        return self._server.metrics()[self._label] - self._before


# -- the way of the data ---------------------------------------------------------------------------


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


# -- models ----------------------------------------------------------------------------------------


def test_a_model_that_writes_into_inputs_gets_copies_and_the_client_keeps_its_bytes(server, http):
    values = np.arange(10, dtype=np.float32)
    with regions(http, 40, 40) as (source, target):
        shm.set_shared_memory_region(source, [values])
        with pytest.raises(InferenceServerException, match="read-only"):
            infer(tritonclient.http, http, "edit", 10)
        infer(tritonclient.http, http, "edit", 10)
        assert (shm.get_contents_as_numpy(source, np.float32, [10]) == values).all()
        assert (shm.get_contents_as_numpy(target, np.float32, [10]) == values + 1).all()
        assert "model 'edit_0' writes into its inputs" in server.log()
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


# -- what is refused -------------------------------------------------------------------------------


def test_an_output_that_does_not_fit(api):
    library, client = api
    with regions(client, 400, 400) as (_, target):
        for name in ("echo", "final"):
            with pytest.raises(InferenceServerException) as caught:
                client.infer(
                    name,
                    [shared_input(library, "1", [10])],
                    outputs=[shared_output(library, "0", 39)],
                )
            assert (
                "shared memory size specified with the request for output 'OUT' (39 bytes) should be "
                "at least 40 bytes to hold the results"
            ) in str(caught.value)
        assert not shm.get_contents_as_numpy(target, np.uint8, [400]).any()


def test_places_outside_a_region_and_unknown_regions(api):
    library, client = api
    with regions(client, 400):
        for given, text in (
            (shared_input(library, "0", [10], offset=364), "Invalid offset + byte size for"),
            (shared_input(library, "0", [10], offset=400), "Invalid offset for"),
            (shared_input(library, "0", [101]), "Invalid offset + byte size for"),
            (shared_input(library, "9", [10]), "Unable to find shared memory region: '9'"),
            (
                shared_input(library, "0", [10], nbytes=36),
                "input byte size mismatch for input 'IN'",
            ),
        ):
            with pytest.raises(InferenceServerException, match=text.replace("+", "[+]")):
                client.infer("echo", [given])
        # The form of this request is known when its region goes.
        infer(library, client, "echo", 10, "0", None)
        client.unregister_system_shared_memory("0")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
            infer(library, client, "echo", 10, "0", None)


def test_wrong_strings_fail_alone(server, http):
    good, bad = b"\2\0\0\0ab", b"\3\0\0\0ab"
    with regions(http, 64) as (source,):
        shm.set_shared_memory_region(source, [np.frombuffer(good + bad, np.uint8)])
        answers = {}

        def ask(number):
            given = shared_input(tritonclient.http, "0", [1, 1], "BYTES", 6, 6 * (number % 2))
            with tritonclient.http.InferenceServerClient(server.http_url) as client:
                try:
                    result = client.infer("batched_strings", [given])
                    answers[number] = result.as_numpy("OUT").tolist()
                except InferenceServerException as error:
                    answers[number] = str(error)

        threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers[0] == answers[2] == [[b"ab"]]
    assert answers[1] == answers[3]
    assert "incomplete string data for inference input 'IN'" in answers[1]


def test_a_region_in_use_stays(server, http, gate):
    with regions(http, 64) as (source,):
        shm.set_shared_memory_region(source, [np.ones(4, np.float32)])
        results = []

        def ask():
            with tritonclient.http.InferenceServerClient(server.http_url) as client:
                results.append(infer(tritonclient.http, client, "wait", 4, "0", None))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            label = 'nv_inference_pending_request_count{model="wait",version="1"}'
            wait_until(lambda: server.metrics().get(label), "the request to be at its model")
            for name in ("0", ""):
                with pytest.raises(InferenceServerException, match="0"):
                    http.unregister_system_shared_memory(name)
            assert len(http.get_system_shared_memory_status()) == 1
        finally:
            gate.touch()
            thread.join()
        assert results[0].as_numpy("OUT").tolist() == [1, 1, 1, 1]
        http.unregister_system_shared_memory("0")


def test_it_is_off_by_default(tmp_path):
    write_model(tmp_path, "echo", model(ECHO))
    with running_server(tmp_path) as server, memory(64) as (key, _):
        for library, url in (
            (tritonclient.http, server.http_url),
            (tritonclient.grpc, server.grpc_url),
        ):
            with library.InferenceServerClient(url) as client:
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.register_system_shared_memory("0", key, 64)
                client.unregister_system_shared_memory()
                with pytest.raises(InferenceServerException, match="Unable to find shared memory"):
                    infer(library, client, "echo", 4, "0", None)


def test_cuda_memory_is_refused_in_so_many_words(server, api):
    _, client = api
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not served yet"):
        client.register_cuda_shared_memory("c", b"A" * 64, 0, 64)
    client.unregister_cuda_shared_memory()
    client.get_cuda_shared_memory_status()
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region"):
        client.get_cuda_shared_memory_status("c")


# -- lives and deaths ------------------------------------------------------------------------------


def mapped(pid, key):
    return Path(f"/proc/{pid}/maps").read_text().count(key)


def test_one_mapping_in_the_stub_none_in_the_server_and_none_is_left(server, http):
    with memory(400) as (key, _):
        http.register_system_shared_memory("0", key, 400)
        before = set(server.stubs())
        for _ in range(20):
            infer(tritonclient.http, http, "spare", 100, "0", "0")
        assert mapped(server.pid, key) == 0
        assert sorted(mapped(pid, key) for pid in before) == [0] * (len(before) - 1) + [1]
        http.unregister_system_shared_memory("0")
        infer_plain = tritonclient.http.InferInput("IN", [1], "FP32")
        infer_plain.set_data_from_numpy(np.ones(1, np.float32))
        http.infer("spare", [infer_plain])
        assert not any(mapped(pid, key) for pid in before)
        assert not [fd for fd in descriptors(server.pid) if key in fd]


def descriptors(pid):
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(fd.readlink()))
        except OSError:
            continue
    return found


def test_a_client_that_shrinks_its_memory_is_refused_or_kills_one_stub_that_comes_back(tmp_path):
    write_model(
        tmp_path,
        "touch",
        model("""
if x[0]:
    os.truncate("/dev/shm" + bytes(int(c) for c in x[1:1 + int(x[0])]).decode(), 0)
return pb_utils.Tensor("OUT", x[:4].copy() if not x[0] else np.sort(x))
"""),
    )
    with (
        running_server(tmp_path, "--allow-client-shm=true") as server,
        tritonclient.http.InferenceServerClient(server.http_url) as client,
        memory(1 << 20) as (key, _),
    ):
        library = tritonclient.http
        client.register_system_shared_memory("r", key, 1 << 20)
        count = 1 << 18
        os.truncate(SHM / key[1:], 1 << 10)
        with pytest.raises(InferenceServerException, match="was shrunk"):
            infer(library, client, "touch", count, "r", None)
        os.truncate(SHM / key[1:], 1 << 20)
        infer(library, client, "touch", count, "r", None)
        (stub,) = server.stubs()
        # Now while the model looks at it.
        values = np.zeros(count, np.float32)
        values[0] = len(key)
        values[1 : 1 + len(key)] = list(key.encode())
        with (SHM / key[1:]).open("r+b") as file:
            file.write(values.tobytes())
        with pytest.raises(InferenceServerException) as caught:
            infer(library, client, "touch", count, "r", None)
        assert "SIGBUS): a client shrank its shared memory region" in str(caught.value)
        os.truncate(SHM / key[1:], 1 << 20)
        wait_until(lambda: server.is_ready("touch"), "the stub to be back", server)
        assert server.stubs() != [stub]
        # The new one is told of the region again.
        infer(library, client, "touch", count, "r", None)
        client.unregister_system_shared_memory("r")
