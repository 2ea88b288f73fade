"""The client of a model's calls (BLS): which thread reads its channel, and when."""

import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import Channel
from gpubridge.transport.messages import control_message, decode_control
from gpubridge.transport.wait_predictor import wait_predictor
from tests.unit.call_server import call_client

pytestmark = pytest.mark.both_runtimes


@pytest.fixture
def client_and_server():
    """A client, and the server's end of its channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    server, model = Channel(theirs), Channel(ours)
    yield call_client(model, wait_predictor(0)), server
    server.close()
    model.close()


def test_memory_is_looked_after_while_another_thread_waits_for_an_answer(client_and_server):
    calls, server = client_and_server
    answers = []
    asker = threading.Thread(target=lambda: answers.append(calls.ask("ready", model="m").answer))
    asker.start()
    question = decode_control(server.receive()[0])["question"]
    # The asker may not read yet: some of these are before that, most of them while it does.
    for _ in range(10_000):
        calls.catch_up()
    server.send(control_message(CallKind.ANSWER, question=question, ready=True))
    asker.join(30)
    assert not asker.is_alive()
    assert [answer["ready"] for answer in answers] == [True]


def test_descriptors_that_are_lost_are_missed_by_those_alone_whose_they_are(client_and_server):
    calls, server = client_and_server

    def answer(*fds):
        question = decode_control(server.receive()[0])["question"]
        server.send(control_message(CallKind.ANSWER, question=question), fds)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as threads, Path(os.devnull).open() as file:
        for fds in ((), (file.fileno(),), ()):
            asking = threads.submit(calls.ask, "board")
            resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
            try:
                server.send(control_message(CallKind.REGION, region=9, size=1), (file.fileno(),))
                answer(*fds)
                error = asking.exception(30)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert "ulimit -n" in str(error) if fds else error is None


@pytest.mark.parametrize("alone", [True, False])
def test_a_thread_with_one_request_at_a_time_polls_for_answers_that_come_soon(alone, monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, model = Channel(theirs), Channel(ours)
    answers = type(wait_predictor(0))(10**12, contended_ns=-1)
    monkeypatch.setattr("gpubridge.stub.bls.reader.wait_predictor", lambda awake_ns: answers)
    requests = wait_predictor(0)
    requests.alone = alone
    calls = call_client(model, requests, 10**12)

    def answer():
        for _ in range(12):
            question = decode_control(server.receive()[0])["question"]
            server.send(control_message(CallKind.ANSWER, question=question, ready=True))

    answering = threading.Thread(target=answer)
    answering.start()
    for _ in range(12):
        calls.ask("ready", model="m")
    answering.join()
    # It ends with the first poll: whatever time that takes, others had the processor.
    assert answers.likely != alone
    server.close()
    model.close()
