"""Where the system has no thread left, who asked for one is told or goes on without, and it is tried again."""

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


@pytest.fixture
def exhausted(monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    return monkeypatch


async def test_work_without_a_thread_fails_and_later_work_does_not(exhausted):
    workers = Workers()
    ran = []
    told = await workers.outcome(lambda: ran.append(1))
    assert isinstance(told, BridgeError)
    assert (told.code, ran) == (ErrorCode.UNAVAILABLE, [])
    assert "no thread for this request: can't start new thread" in told.message
    exhausted.undo()
    assert await workers.outcome(lambda: "done") == "done"
    with exhausted.context() as again:
        # With one thread, work waits for it.
        again.setattr(threading.Thread, "start", lambda _: pytest.fail("asked for more"))
        assert await workers.outcome(lambda: "done") == "done"
    workers.close()
    assert ran == []
    with pytest.raises(RuntimeError, match="shutdown"):
        workers.run(int, print)


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
