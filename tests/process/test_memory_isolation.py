"""Memory of a model that overruns its own: others' answers stay right, and their requests unseen."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import running_server, write_model

ANSWERS = int(os.environ.get("GPUBRIDGE_ISOLATION_ANSWERS", "1200"))
"""Answers of the busy models in all; 10,000 once before a release."""

BUSY = answering("return respond(OUT=value + 1)")
CARELESS = answering("""
import ctypes
far, secret = 32768, np.array([7301.25, -7301.25], np.float32).tobytes()
begin = value.__array_interface__["data"][0]
answer = value + 1
found = 0
for at in (begin - far, begin + value.nbytes):
    found += ctypes.string_at(at, far).count(secret)
    ctypes.memset(at, 0xAB, far)
return respond(OUT=np.concatenate([answer, [np.float32(found)]]))
""")
SECRET = (7301.25, -7301.25)
MODELS = ("alpha", "beta", "gamma")


def ask(sock, model, values):
    """Send one request and return what it is answered."""
    fields, body = binary_request([("IN", "FP32", [len(values)], values.tobytes())])
    sock.sendall(inference(model, body, fields))
    status, fields, body = read_answer(sock)
    assert status == 200, body
    header = int(fields["Inference-Header-Content-Length"])
    return np.frombuffer(body[header:], np.float32)


def values_of(chance):
    return np.full(chance.choice([8, 700, 3000, 9000, 40_000]), chance.randrange(1000), np.float32)


def ask_busily(url, seed, count):
    """Ask a busy model so often, each time with a request of another size; return the wrong answers."""
    chance, wrong = random.Random(seed), 0
    with connected(url) as sock:
        for _ in range(count):
            values = values_of(chance)
            values[2:4] = SECRET
            wrong += not np.array_equal(ask(sock, MODELS[seed % 3], values), values + 1)
    return wrong


def overrun(url, enough):
    """Ask the careless model until it is enough; return the answers, the wrong ones, and what it saw."""
    chance, answers, wrong, found = random.Random(9), 0, 0, 0.0
    with connected(url) as sock:
        while not enough.is_set() or answers < ANSWERS / 100:
            values = values_of(chance)
            *answer, seen = ask(sock, "careless", values)
            answers += 1
            wrong += not np.array_equal(answer, values + 1)
            found += seen
    return answers, wrong, found


def test_a_model_that_overruns_its_input_reaches_no_other_model(tmp_path):
    for model in MODELS:
        write_model(tmp_path, model, BUSY)
    write_model(tmp_path, "careless", CARELESS)
    enough = threading.Event()
    with running_server(tmp_path) as server, ThreadPoolExecutor(7) as pool:
        careless = pool.submit(overrun, server.http_url, enough)
        busy = [pool.submit(ask_busily, server.http_url, i, -(-ANSWERS // 6)) for i in range(6)]
        wait(busy)
        enough.set()
        assert [each.result() for each in busy] == [0] * 6
        assert careless.result()[1:] == (0, 0)
        assert "unhealthy" not in server.log()
