"""Tensors in clients' own shared memory: what is refused, and what outlives whom."""

import base64
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory as shm

from tests.process.client_memory import (
    infer,
    memory,
    regions,
    shared_input,
    shared_output,
)
from tests.process.gates import Gate
from tests.process.server import open_files, wait_until


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


def test_a_region_in_use_stays(server, http, parent):
    with regions(http, 64) as (source,):
        shm.set_shared_memory_region(source, [np.ones(4, np.float32)])
        results, gate = [], Gate(parent / "gate")

        def ask():
            with tritonclient.http.InferenceServerClient(server.http_url) as client:
                results.append(infer(tritonclient.http, client, "wait", 4, "0", None))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            wait_until(lambda: server.open_requests("wait"), "the request to be at its model")
            for name in ("0", ""):
                with pytest.raises(InferenceServerException, match="0"):
                    http.unregister_system_shared_memory(name)
            assert len(http.get_system_shared_memory_status()) == 1
        finally:
            gate.open()
            thread.join()
        assert results[0].as_numpy("OUT").tolist() == [1, 1, 1, 1]
        http.unregister_system_shared_memory("0")


def test_cuda_memory_is_refused_where_there_is_no_gpu(server, api):
    _, client = api
    with pytest.raises(InferenceServerException, match=r"a GPU of this machine .*, got 77"):
        client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 77, 64)
    client.unregister_cuda_shared_memory()
    client.get_cuda_shared_memory_status()
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region"):
        client.get_cuda_shared_memory_status("c")


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
        assert not [fd for fd in open_files(server.pid) if key in fd]
