"""Calls of a model's forked children, which their parent makes."""

import threading

import pytest

from gpubridge.stub import forked
from gpubridge.transport.channel import Channel
from tests.unit.call_server import SECONDS, CallServer, query, value


@pytest.fixture
def server():
    server = CallServer()
    yield server
    server.close()


def test_the_channel_of_a_call_is_open_as_long_as_a_thread_reads_it(server, monkeypatch):
    """That thread would read messages of the next call, which gets the number of a closed descriptor."""
    went_on, steps = threading.Event(), []

    class Noting(threading.Thread):
        def join(self, timeout=None):
            went_on.set()
            super().join(timeout)

    def read(*_):
        assert went_on.wait(SECONDS)
        steps.append("read")

    def close(channel, close=Channel.close):
        close(channel)
        if threading.current_thread() is not threading.main_thread():
            steps.append("closed")
            went_on.set()

    monkeypatch.setattr(forked, "_cancel_on_request", read)
    monkeypatch.setattr(forked.threading, "Thread", Noting)
    monkeypatch.setattr(Channel, "close", close)
    child = forked.ForkedCalls()
    child.before_fork()
    child.after_in_parent()
    call = child.call(query(), False)
    server.answer((server.next_call(), "a", False))
    assert value(call.next()) == "a"
    assert call.next() is None
    serving = [each for each in threading.enumerate() if each.name.endswith("(_serve_call)")]
    for thread in serving:
        threading.Thread.join(thread, SECONDS)
    assert steps == ["read", "closed"]
