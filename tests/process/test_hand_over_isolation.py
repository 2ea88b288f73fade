"""Models that search all that they have mapped: along calls and edges they find what was meant for them."""

import numpy as np
import pytest

from tests.process.ensembles import write_ensemble
from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import LITTLE_MEMORY, PURE, running_server, write_model

SIZES = (8, 700, 3000, 40_000, 300_000)
ALPHA, BETA, CALL, ANSWER = 7301.25, 8302.25, 9303.25, 6304.25
"""Each stands beside its negative: of clients of alpha, of beta, in a call, in the answer to it."""
ECHO, SEARCH, EDGE = range(3)

MODEL = f"""
import ctypes
import numpy as np
import triton_python_backend_utils as pb_utils

ALPHA, BETA, CALL, ANSWER = {ALPHA}, {BETA}, {CALL}, {ANSWER}
PIECE = 1 << 16
ZEROS = bytes(PIECE + 7)

def found(mark):
    pattern = np.array([mark, -mark], np.float32).tobytes()
    count = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:gpubridge" in line:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                for at in range(begin, end, PIECE):
                    # With the end of a pattern that begins in it. Most are empty, which is seen sooner.
                    piece = ctypes.string_at(at, min(len(ZEROS), end - at))
                    if not ZEROS.startswith(piece):
                        count += piece.count(pattern)
    return count

def filled(size, *first):
    values = np.zeros(size, np.float32)
    values[:len(first)] = first
    return pb_utils.Tensor("OUT", values)

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]
"""
CALLER = (
    MODEL
    + """
    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        size = len(given)
        if given[0] == 0:
            return pb_utils.Tensor("OUT", given.copy())
        if given[0] == 2:
            return filled(size, 1)
        tensor = pb_utils.Tensor("IN", filled(size, 1, CALL, -CALL).as_numpy())
        call = pb_utils.InferenceRequest(
            model_name="beta", requested_output_names=["OUT"], inputs=[tensor]
        )
        response = call.exec()
        answer = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
        return filled(size, *answer[:2], found(BETA), found(ANSWER))
"""
)
CALLED = (
    MODEL
    + """
    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if given[0] == 0:
            return pb_utils.Tensor("OUT", given.copy())
        return filled(len(given), found(ALPHA), found(CALL), ANSWER, -ANSWER)
"""
)


@pytest.fixture(scope="module", params=[{}, PURE], ids=["compiled", "python"])
def server(request, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "alpha", CALLER)
    write_model(repository, "beta", CALLED)
    write_ensemble(repository, "both", "alpha IN=A > OUT=t", "beta IN=t > OUT=B")
    # What a model's memory has addresses for is read to its end.
    with running_server(repository, *LITTLE_MEMORY, environment=request.param) as server:
        yield server


def ask(sock, model, size, what, mark=0.0, name="IN"):
    values = np.zeros(size, np.float32)
    values[:3] = what, mark, -mark
    fields, body = binary_request([(name, "FP32", [size], values.tobytes())])
    sock.sendall(inference(model, body, fields))
    status, fields, body = read_answer(sock)
    assert status == 200, body
    return np.frombuffer(body[int(fields["Inference-Header-Content-Length"]) :], np.float32)


def serve_clients(sock):
    """Leave requests and answers of clients in both models' memory."""
    for _ in range(3):
        for size in SIZES:
            for model, mark in (("alpha", ALPHA), ("beta", BETA)):
                assert ask(sock, model, size, ECHO, mark)[1] == mark


def test_neither_side_of_a_call_finds_what_others_sent_or_got(server):
    with connected(server.http_url) as sock:
        for size in SIZES:
            serve_clients(sock)
            in_called, calls, in_caller, answers = ask(sock, "alpha", size, SEARCH)[:4]
            assert (in_called, in_caller) == (0, 0)
            # They do look where memory is handed over.
            assert calls > 0
            assert answers > 0


def test_a_member_finds_nothing_that_others_got_of_the_one_before_it(server):
    with connected(server.http_url) as sock:
        for size in SIZES:
            serve_clients(sock)
            answer = ask(sock, "both", size, EDGE, name="A")
            assert answer[0] == 0
