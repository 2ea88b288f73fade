"""The desk of a model's calls and questions: who reads its channel, and when."""

from __future__ import annotations

import socket
import threading

import pytest

from gpubridge.stub.bls_client import BlsClient
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import Channel
from gpubridge.transport.messages import control_message, decode_control


@pytest.fixture
def desk():
    """A desk, and the server's end of its channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    server, model = Channel(theirs), Channel(ours)
    yield BlsClient(model, memoryview(bytearray(16)), None), server
    server.close()
    model.close()


def test_memory_is_looked_after_while_another_thread_waits_for_an_answer(desk):
    calls, server = desk
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
