"""Memory of a model that overruns its own: others' answers stay right, and their requests unseen."""

from __future__ import annotations

import abc
import os
import random
import threading

import numpy as np

from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import running_server, write_model

ANSWERS = int(os.environ.get("GPUBRIDGE_ISOLATION_ANSWERS", "1200"))
"""Answers of the busy models in all; 10,000 once before a release."""

BUSY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            out = pb_utils.Tensor("OUT", given + 1)
            responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""

CARELESS = """
import ctypes
import numpy as np
import triton_python_backend_utils as pb_utils

FAR = 32768
SECRET = np.array([7301.25, -7301.25], np.float32).tobytes()

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            begin = given.__array_interface__["data"][0]
            answer = given + 1
            found = 0
            for at in (begin - FAR, begin + given.nbytes):
                found += ctypes.string_at(at, FAR).count(SECRET)
                ctypes.memset(at, 0xAB, FAR)
            out = pb_utils.Tensor("OUT", np.concatenate([answer, [np.float32(found)]]))
            responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""
SECRET = (7301.25, -7301.25)


def ask(sock, model, values):
    """Send one request and return what it is answered."""
    fields, body = binary_request([("IN", "FP32", [len(values)], values.tobytes())])
    sock.sendall(inference(model, body, fields))
    status, fields, body = read_answer(sock)
    assert status == 200, body
    header = int(fields["Inference-Header-Content-Length"])
    return np.frombuffer(body[header:], np.float32)


class Client(threading.Thread, abc.ABC):
    """Asks one model again and again, each time with a request of another size."""

    def __init__(self, url, model, seed):
        super().__init__()
        self.url = url
        self.model = model
        self.random = random.Random(seed)
        self.answers = self.wrong = 0
        self.found = 0.0
        self.error = None

    def run(self):
        try:
            with connected(self.url) as self.sock:
                self.converse()
        except Exception as error:
            self.error = error

    @abc.abstractmethod
    def converse(self):
        """Send requests and count the answers, until done."""

    def values(self):
        count = self.random.choice([8, 700, 3000, 9000, 40_000])
        return np.full(count, self.random.randrange(1000), np.float32)


class Busy(Client):
    def __init__(self, url, model, seed, answers):
        super().__init__(url, model, seed)
        self.wanted = answers

    def converse(self):
        while self.answers < self.wanted:
            values = self.values()
            values[2:4] = SECRET
            answer = ask(self.sock, self.model, values)
            self.answers += 1
            self.wrong += not np.array_equal(answer, values + 1)


class Overrunning(Client):
    def __init__(self, url, model, seed):
        super().__init__(url, model, seed)
        self.enough = threading.Event()

    def converse(self):
        while not self.enough.is_set():
            values = self.values()
            answer = ask(self.sock, self.model, values)
            self.answers += 1
            self.wrong += not np.array_equal(answer[:-1], values + 1)
            self.found += answer[-1]


def test_a_model_that_overruns_its_input_reaches_no_other_model(tmp_path):
    models = ("alpha", "beta", "gamma")
    for model in models:
        write_model(tmp_path, model, BUSY)
    write_model(tmp_path, "careless", CARELESS)
    with running_server(tmp_path) as server:
        each = -(-ANSWERS // 6)
        busy = [Busy(server.http_url, models[i % 3], i, each) for i in range(6)]
        careless = Overrunning(server.http_url, "careless", 9)
        for client in (careless, *busy):
            client.start()
        for client in busy:
            client.join()
        careless.enough.set()
        careless.join()
        assert [client.error for client in (careless, *busy)] == [None] * 7
        assert sum(client.answers for client in busy) >= ANSWERS
        assert careless.answers > ANSWERS / 100
        assert [client.wrong for client in (careless, *busy)] == [0] * 7
        assert careless.found == 0
        assert "unhealthy" not in server.log()
