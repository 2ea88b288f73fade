"""Where the system has no thread left, who asked for one is told or goes on without, and it is tried again."""

import asyncio
import json
import threading

import numpy as np
import pytest

from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.traces import TraceWriter
from tests.unit.looped_stub import started_stubs


@pytest.fixture(params=["native", "python"])
def start(request, tmp_path):
    yield from started_stubs(request.param, tmp_path)


def no_thread(_):
    raise RuntimeError("can't start new thread")


@pytest.fixture
def exhausted(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    return monkeypatch


async def test_work_without_a_thread_fails_and_later_work_does_not(exhausted):
    workers = Workers()
    ran = []
    told = await workers.outcome(lambda: ran.append(1))
    assert isinstance(told, BridgeError)
    assert (told.code, ran) == (ErrorCode.UNAVAILABLE, [])
    assert "no thread for this: can't start new thread" in told.message
    with pytest.raises(BridgeError, match="no thread for this"):
        workers.begin()
    exhausted.undo()
    assert await workers.outcome(lambda: "done") == "done"
    workers.close()
    assert ran == []
    with pytest.raises(RuntimeError, match="shutdown"):
        workers.run(int, print)


async def test_work_has_a_thread_once_there_was_one(monkeypatch):
    workers = Workers()
    workers.begin()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    held = threading.Event()
    first, second = (asyncio.ensure_future(workers.outcome(each)) for each in (held.wait, dict))
    # The second asks for another thread, and waits for the first instead.
    await asyncio.sleep(0)
    held.set()
    assert (await first, await second) == (True, {})
    workers.close()


def test_traces_wait_for_a_thread(exhausted, tmp_path, caplog):
    writer = TraceWriter()
    writer.put(str(tmp_path / "t"), [{"id": 1}])
    assert caplog.messages == ["traces wait to be written: can't start new thread"]
    exhausted.undo()
    writer.put(str(tmp_path / "t"), [{"id": 2}])
    writer.close()
    assert json.loads((tmp_path / "t").read_bytes()) == [{"id": 1}, {"id": 2}]


def test_results_do_not_wait_for_a_slow_batch_without_a_thread_that_sends_them(start, tmp_path):
    stub = start(
        "import time",
        "if data[0, 0] == 1:",
        "    def fail(_): raise RuntimeError('no threads')",
        "    threading.Thread.start = fail",
        "    time.sleep(0.05)",
        f"while data[0, 0] == 3 and not os.path.exists({str(tmp_path / 'go')!r}): pass",
    )
    rows = [np.array([[value]], np.float32) for value in (1, 2, 3)]
    stub.send(*([stub.record(ticket, row)] for ticket, row in enumerate(rows)))
    assert [result.sequence for result in stub.results(2)] == [1, 2]
    (tmp_path / "go").touch()
    (last,) = stub.results(1)
    assert stub.array(last.records[0]).tolist() == [[3]]
