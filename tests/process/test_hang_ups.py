"""HTTP clients that close their connection while a model works for them: the model can see it."""

import json
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.ensembles import TEXT, write_ensemble
from tests.process.raw_http import CONTINUE, connected, inference, read_answer
from tests.process.server import running_server, wait_until, write_model
from tests.waits import polling

# Each works until it is cancelled, or has been told to end; IN is where it says so.
WORK = """
import threading
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def work(place, request):
    Path(place, "began").touch()
    UNTIL_TOLD
    Path(place, "seen").write_text(str(request.is_cancelled()))
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([b"done"], np.object_))])
""".replace("UNTIL_TOLD", polling("request.is_cancelled() or Path(place, 'end').exists()"))
PLAIN = (
    WORK
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [work(r.inputs()[0].as_numpy()[0].decode(), r) for r in requests]
"""
)
# Its requests run beside each other.
STREAM = (
    WORK
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            place = request.inputs()[0].as_numpy()[0].decode()
            threading.Thread(target=self.answer, args=(place, request.get_response_sender())).start()

    def answer(self, place, sender):
        if Path(place).name == "one_before":
            sender.send(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([b"first"], np.object_))]))
        sender.send(work(place, sender))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
CALL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(pb_utils.InferenceRequest(
            model_name="plain", requested_output_names=["OUT"], inputs=request.inputs(),
        ).exec().output_tensors()) for request in requests]
"""
# One call for all that came together, after a first one that no client asks for.
CALL_TOGETHER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.own = None

    def execute(self, requests):
        place = pb_utils.Tensor("IN", requests[0].inputs()[0].as_numpy()[0])
        responses = pb_utils.InferenceRequest(
            model_name="stream", requested_output_names=["OUT"], inputs=[place],
        ).exec(decoupled=True)
        if self.own is None:
            self.own = responses
        else:
            list(responses)
        out = pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


class Work(NamedTuple):
    """The files of one request's work."""

    place: Path

    @property
    def began(self):
        return (self.place / "began").exists()

    def end(self):
        (self.place / "end").touch()

    def seen(self, server):
        """Wait for its end; returns whether it was cancelled."""
        path = self.place / "seen"
        wait_until(lambda: path.exists() and path.read_text(), "the model to end", server)
        return path.read_text() == "True"


@pytest.fixture(scope="module")
def server(repository):
    strings = "IN STRING [1] > OUT STRING [1]"
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "plain", PLAIN, tensors=strings)
    write_model(repository, "stream", STREAM, config=decoupled, tensors=strings)
    write_model(repository, "caller", CALL, tensors=strings)
    together = (
        "max_batch_size: 2\ninstance_group [{ count: 1 kind: KIND_CPU }]\n"
        "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 60000000 }"
    )
    write_model(repository, "caller_of_two", CALL_TOGETHER, config=together, tensors=strings)
    step = "plain IN=IN > OUT=OUT"
    write_ensemble(repository, "ensemble", step, inputs="IN", outputs="OUT", kind=TEXT)
    # A short time-out has it look at its connections often.
    with running_server(repository, "--http-header-timeout=0.4") as running:
        yield running


def ask(kind, place):
    """Make a request that works at a place, of one of the kinds."""
    if kind in ("plain", "caller", "ensemble"):
        tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [str(place)]}
        return inference(kind, json.dumps({"inputs": [tensor]}).encode())
    body = json.dumps({"IN": str(place)}).encode()
    head = f"POST /v2/models/stream/{kind} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


KINDS = ["plain", "caller", "ensemble", "generate", "generate_stream"]


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_sees_that_its_client_has_gone(server, work, kind):
    with connected(server.http_url) as sock:
        sock.sendall(ask(kind, work.place))
        wait_until(lambda: work.began, "the model to begin", server)
    assert work.seen(server)


@pytest.mark.parametrize("behind", [1, 200], ids=["one behind", "more than is read"])
@pytest.mark.parametrize("kind", ["plain", "caller", "ensemble", "generate_stream"])
def test_also_when_the_client_had_asked_for_more(server, work, kind, behind):
    with connected(server.http_url) as sock:
        sock.sendall(ask(kind, work.place) + b"GET /v2/models/plain HTTP/1.1\r\n\r\n" * behind)
        wait_until(lambda: work.began, "the model to begin", server)
    assert work.seen(server)


def test_a_stream_that_has_begun_is_cancelled_before_it_sends_more(server, tmp_path):
    work = Work(tmp_path / "one_before")
    work.place.mkdir()
    with connected(server.http_url) as sock:
        sock.sendall(ask("generate_stream", work.place))
        received = b""
        while b"first" not in received:
            received += sock.recv(1000)
        wait_until(lambda: work.began, "the model to begin", server)
    assert work.seen(server)


def test_requests_that_wait_behind_it_are_not_executed(server, tmp_path):
    works = [Work(tmp_path / str(number)) for number in range(3)]
    for work in works:
        work.place.mkdir()
    with connected(server.http_url) as sock:
        sock.sendall(b"".join(ask("plain", work.place) for work in works))
        wait_until(lambda: works[0].began, "the model to begin", server)
    assert works[0].seen(server)
    last = Work(tmp_path / "last")
    last.place.mkdir()
    last.end()
    with connected(server.http_url) as sock:
        sock.sendall(ask("plain", last.place))
        assert read_answer(sock)[0] == 200
    assert not works[1].began
    assert not works[2].began


def test_a_call_goes_on_for_those_who_are_still_there(server, tmp_path):
    own, shared, other = (Work(tmp_path / name) for name in ("own", "shared", "other"))
    for work in (own, shared, other):
        work.place.mkdir()

    def ask_both(place, one, two):
        tensor = {"name": "IN", "datatype": "BYTES", "shape": [1, 1], "data": [str(place)]}
        for sock in (one, two):
            sock.sendall(inference("caller_of_two", json.dumps({"inputs": [tensor]}).encode()))

    with connected(server.http_url) as two:
        with connected(server.http_url) as one:
            ask_both(own.place, one, two)
            assert [read_answer(sock)[0] for sock in (one, two)] == [200, 200]
            ask_both(shared.place, one, two)
            wait_until(lambda: shared.began, "the called model to begin", server)
        # By the time that this one's end is seen, that one's was.
        with connected(server.http_url) as sock:
            sock.sendall(ask("plain", other.place))
            wait_until(lambda: other.began, "the model to begin", server)
        assert other.seen(server)
        assert not (shared.place / "seen").exists()
    assert shared.seen(server)
    assert not (own.place / "seen").exists()
    own.end()
    assert not own.seen(server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_only_sends_no_more_gets_its_answer(server, work, kind):
    with connected(server.http_url) as sock:
        sock.sendall(ask(kind, work.place))
        wait_until(lambda: work.began, "the model to begin", server)
        sock.shutdown(socket.SHUT_WR)
        # An interim answer, by which the server learns that the client waits.
        interim = sock.recv(len(CONTINUE), socket.MSG_WAITALL)
        assert interim == CONTINUE
        assert not (work.place / "seen").exists()
        work.end()
        whole = b""
        while piece := sock.recv(65_536):
            whole += piece
    assert work.seen(server) is False
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert whole.count(b"HTTP/1.1") == 1
    assert b"done" in whole
