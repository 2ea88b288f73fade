"""The server's side of a model's ``is_ready``, with a stub that says anything."""

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from gpubridge.engine.supervisor import ready_check
from gpubridge.engine.supervisor.ready_check import ReadyCheck
from gpubridge.errors import BridgeError
from gpubridge.frontend.control import is_ready
from gpubridge.transport.channel import MalformedMessage


@pytest.fixture
@asynccontextmanager
async def asked():
    """A check and the stub's end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    check = ReadyCheck("m_0")
    check.connect(ours.detach())
    theirs.setblocking(False)
    try:
        with theirs:
            yield check, theirs
    finally:
        check.close()


async def answer(theirs, said):
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(theirs, 16) == b"?"
    await loop.sock_sendall(theirs, said)


async def refusal(check):
    with pytest.raises(BridgeError) as caught:
        await check.ask()
    return caught.value.message


async def test_one_question_for_all_who_ask(asked):
    check, theirs = asked
    asking = [asyncio.ensure_future(check.ask()) for _ in range(10)]
    await answer(theirs, b'{"ready": true}')
    assert await asyncio.gather(*asking) == [None] * 10
    with pytest.raises(BlockingIOError):
        theirs.recv(16)
    # And another one for who asks later.
    later = asyncio.ensure_future(refusal(check))
    await answer(theirs, b'{"ready": false}')
    assert await later == "Model 'm_0' is not ready (user-defined check failed)."


async def test_a_run_that_was_too_slow_answers_who_asks_while_it_goes_on(asked, monkeypatch):
    check, theirs = asked
    with monkeypatch.context() as hurried:
        hurried.setattr(ready_check, "_LIMIT_SECONDS", 0.01)
        assert await refusal(check) == "Timed out waiting for user-defined is_ready() response"
        assert await refusal(check) == "Timed out waiting for in-flight is_ready() response"
    asking = asyncio.ensure_future(check.ask())
    await asyncio.sleep(0)
    await answer(theirs, b'{"ready": true}')
    assert await asking is None


@pytest.mark.parametrize(
    "said",
    [b"x", b"[]", b"{}", b"1", b'{"ready": 1}', b'{"ready": "yes"}', b"[" * 5000, b"\xff\xfe"],
)
async def test_an_answer_that_is_none_is_no(asked, said):
    check, theirs = asked
    asking = asyncio.ensure_future(refusal(check))
    await answer(theirs, said)
    assert await asking
    # An answer without a question changes nothing.
    theirs.send(b'{"ready": true}')
    await asyncio.sleep(0)
    asking = asyncio.ensure_future(refusal(check))
    assert await asyncio.get_running_loop().sock_recv(theirs, 16) == b"?"
    theirs.send(b'{"ready": false}')
    assert await asking


async def test_a_stub_that_is_gone(asked):
    check, theirs = asked
    asking = asyncio.ensure_future(refusal(check))
    await asyncio.sleep(0)
    theirs.close()
    assert await asking == "Stub process 'm_0' is not healthy."
    assert not check.connected
    assert await refusal(check) == "Stub process 'm_0' is not healthy."


async def test_a_descriptor_of_no_socket_is_refused_and_closed(asked):
    check, _ = asked
    reading, writing = os.pipe()
    with pytest.raises(MalformedMessage, match="no socket"):
        check.connect(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)
    assert not check.connected


def test_the_reason_of_an_ensemble_is_that_of_a_member(caplog):
    failing = SimpleNamespace(instances=[SimpleNamespace(last_error="it died")], members=())
    inner = SimpleNamespace(instances=[], members=(failing,))
    outer = SimpleNamespace(name="e", version=1, ready=False, instances=[], members=(inner,))
    assert asyncio.run(is_ready(outer)) is False
    assert "Model 'e' version 1 is not ready: it died" in caplog.text
