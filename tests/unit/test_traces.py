"""Choice of traced requests by settings, and the files of traces."""

import asyncio
import json
import os
import threading

import numpy as np
import pytest

from gpubridge.engine.models.tracing import Received, RequestTracing
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import CompletedBatch, InferRequest
from gpubridge.telemetry.settings import (
    OpenTelemetrySettings,
    TraceSettings,
    trace_settings_from_flags,
)
from gpubridge.telemetry.traces import TensorRecord, Trace, Traces, TraceWriter
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.bytes_codec import spell_values


@pytest.fixture
def traces(tmp_path):
    made = Traces(TraceSettings(("TIMESTAMPS",), rate=1, file=str(tmp_path / "t")))
    yield made
    made.close()


def chosen(traces, model, count):
    """Return for each of so many requests of a model whether it is traced."""
    return [bool(traces.sample(model, 1, "")) for _ in range(count)]


def test_a_server_starts_without_a_file_and_traces_nothing(caplog):
    traces = Traces(trace_settings_from_flags(["rate=1", "level=TIMESTAMPS"]))
    assert caplog.messages == [
        "no traces are written: --trace-config=triton,file=PATH is not given"
    ]
    assert traces.settings().level == ("TIMESTAMPS",)
    assert not traces.active
    assert chosen(traces, "m", 2) == [False, False]
    with pytest.raises(BridgeError, match="trace file name is not given"):
        traces.update({"rate": 2})


def test_nothing_is_traced_unless_asked_for():
    traces = Traces(TraceSettings())
    assert not traces.active
    assert not traces.used
    assert traces.sample("m", 1, "") is None
    traces.close()


def test_models_without_settings_share_the_servers_count_and_rate(traces):
    traces.update({"rate": 2, "count": 2})
    assert chosen(traces, "a", 2) + chosen(traces, "b", 4) == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert traces.settings("a").count == 0
    assert not traces.active
    assert traces.used


def test_a_models_settings_go_before_the_servers(traces):
    traces.update({"rate": 3}, "a")
    assert chosen(traces, "a", 3) == [False, False, True]
    assert chosen(traces, "b", 1) == [True]
    traces.update({"level": ()})
    assert traces.settings("a") == TraceSettings((), 3, file=traces.settings().file)
    traces.update({"level": ("TENSORS",)}, "a")
    assert traces.settings().level == ()
    assert traces.active
    traces.update({"level": None, "rate": None}, "a")
    assert not traces.active
    assert traces.settings("a") == traces.settings()


def test_a_change_of_something_else_does_not_refill_the_count(traces):
    traces.update({"count": 3})
    chosen(traces, "a", 2)
    traces.update({"rate": 2})
    assert traces.settings().count == 1
    traces.update({"count": 3}, "a")
    chosen(traces, "a", 2)
    traces.update({"count": 8})
    assert traces.settings("a").count == 2


def test_a_trace_that_ends_after_its_settings_were_replaced_is_written(traces, tmp_path):
    traces.update({"log_frequency": 10})
    late = traces.sample("m", 1, "late")
    traces.update({"log_frequency": 0})
    late.end()
    late.end()
    traces.close()
    (record,) = json.loads((tmp_path / "t.0").read_text())
    assert record == {"id": 1, "model_name": "m", "model_version": 1, "request_id": "late"}


def test_a_file_is_an_array_from_the_first_record_on(tmp_path):
    file = tmp_path / "t"
    file.write_text("what an earlier server left")
    writer = TraceWriter()
    for number in range(50):
        writer.put(str(file), [{"n": number}, {"m": number}])
    writer.close()
    assert [next(iter(r.values())) for r in json.loads(file.read_text())] == [
        n for n in range(50) for _ in "nm"
    ]


def test_tensors_that_come_too_fast_are_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gpubridge.telemetry.traces._MOST_BYTES", 100)
    writer = TraceWriter()
    gate = threading.Event()
    record = TensorRecord(1, "A", "x", "FP32", (1,), lambda: gate.wait(10) and "1", 80)
    writer.put(str(tmp_path / "t"), [record])
    writer.put(str(tmp_path / "t"), [record])
    assert "traces are dropped" in caplog.text
    gate.set()
    # Written tensors free the space of others.
    written = threading.Event()
    later = TensorRecord(1, "A", "x", "FP32", (1,), lambda: written.set() or "2", 80)
    while not written.wait(0.01):
        writer.put(str(tmp_path / "u"), [later])
    writer.close()
    assert len(json.loads((tmp_path / "t").read_text())) == 1


def test_files_that_cannot_be_written_are_told_once_and_hold_up_no_other(tmp_path, caplog):
    os.mkfifo(tmp_path / "fifo")
    writer = TraceWriter()
    for name in ("fifo", "absent/t", "fifo", "t", "absent/t"):
        writer.put(str(tmp_path / name), [{"n": 2}])
    writer.close()
    assert json.loads((tmp_path / "t").read_text()) == [{"n": 2}]
    for name in ("fifo", "absent/t"):
        assert caplog.text.count(f"traces are lost: cannot write {tmp_path / name}: ") == 1


def test_a_writer_that_hangs_holds_up_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr("gpubridge.telemetry.traces._MOST_JOBS", 1)
    monkeypatch.setattr("gpubridge.telemetry.traces._CLOSE_SECONDS", 0.1)
    entered, gate = threading.Event(), threading.Event()

    def hang():
        entered.set()
        gate.wait()
        return "1"

    writer = TraceWriter()
    writer.put(str(tmp_path / "t"), [TensorRecord(1, "A", "x", "FP32", (1,), hang, 80)])
    entered.wait()
    writer.put(str(tmp_path / "t"), [{"n": 1}])
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(60)
    ended = not closing.is_alive()
    gate.set()
    closing.join()
    assert ended


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], TraceSettings()),
        (["triton,file=f", "level=TENSORS"], TraceSettings(("TENSORS",), file="f")),
        (
            ["triton,file=f", "level=TENSORS", "level=TIMESTAMPS", "rate=2", "count=-1"],
            TraceSettings(("TIMESTAMPS", "TENSORS"), 2, -1, 0, "f"),
        ),
        (["mode=triton", "triton,log-frequency=3", "count=4"], TraceSettings((), 1000, 4, 3)),
    ],
)
def test_flags(entries, expected):
    assert trace_settings_from_flags(entries) == expected


REFUSED = """
file
jaeger,url=x
level=LOUD
level=OFF level=TENSORS
count=0
mode=jaeger
mode=opentelemetry level=TENSORS
opentelemetry,rate=1
opentelemetry,colour=red
opentelemetry,url=ftp://x
opentelemetry,url=http://:1
opentelemetry,url=x:99999
opentelemetry,resource=x
opentelemetry,bsp_max_queue_size=0
opentelemetry,bsp_schedule_delay=x
mode=opentelemetry opentelemetry,bsp_max_queue_size=5 opentelemetry,bsp_max_export_batch_size=6
"""


@pytest.mark.parametrize("entries", REFUSED.strip().splitlines())
def test_flags_that_are_refused(entries):
    with pytest.raises(BridgeError) as caught:
        trace_settings_from_flags(entries.split())
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_settings_of_opentelemetry(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "70")
    entries = (
        "mode=OpenTelemetry",
        "rate=0",
        "opentelemetry,url=x:1",
        "opentelemetry,resource=a=b=c",
    )
    settings = trace_settings_from_flags([*entries, "opentelemetry,bsp_max_queue_size=5"])
    assert (settings.mode, settings.rate) == ("opentelemetry", 0)
    expected = OpenTelemetrySettings("http://x:1/v1/traces", (("a", "b=c"),), 5, 70, 5)
    assert settings.opentelemetry == expected
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "soon")
    with pytest.raises(BridgeError, match="bsp_schedule_delay"):
        trace_settings_from_flags(entries)


def test_requests_that_python_does_not_see_are_counted(traces):
    traces.update({"rate": 10})
    sampling = traces.sampling
    for _ in range(25):
        sampling.count()
    assert chosen(traces, "a", 5) == [True, True, False, False, True]
    # Requests that never arrive do not have all that follow traced.
    for _ in range(1000):
        sampling.count()
    assert sum(chosen(traces, "a", 100)) == (10 + 64 + 100) // 10


@pytest.mark.parametrize(
    ("datatype", "data", "count", "text"),
    [
        ("BOOL", b"\1\0", 2, "1,0"),
        ("INT8", b"\xffA", 2, "-1,65"),
        ("UINT64", b"\xff" * 8, 1, str((1 << 64) - 1)),
        ("FP16", np.array([1.5], np.float16).tobytes(), 1, "1.5"),
        ("BF16", b"\xc0\x3f", 1, "1.5"),
        ("FP64", np.array([1 / 3, 1e30, np.nan]).tobytes(), 3, "0.333333,1e+30,nan"),
        ("BYTES", bytes_codec.encode(np.array([b"ab", b"\xff"], object)), 2, '"ab","\ufffd"'),
        ("BYTES", b"junk", 1, None),
        ("FP32", b"", 0, ""),
    ],
)
def test_values_as_text(datatype, data, count, text):
    found = ",".join(spell_values(datatype, (count,), data))
    assert found == text if text is not None else found.startswith("cannot be read")


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
def test_many_values_are_spelt_in_pieces(tmp_path, datatype):
    if datatype == "BYTES":
        values = [f'{number}"\\' for number in range(10_001)]
        data = bytes_codec.encode(np.array([value.encode() for value in values], object))
        wanted = [f'"{value}"' for value in values]
    else:
        dtype = {"FP32": np.float32, "INT64": np.int64, "BOOL": bool}[datatype]
        array = np.arange(10_001).astype(dtype)
        data, wanted = array.tobytes(), [f"{value:g}" for value in array.astype(float)]
    pieces = list(spell_values(datatype, (10_001,), data))
    assert len(pieces) == 3
    assert ",".join(pieces) == ",".join(wanted)
    record = TensorRecord(7, "OUT", 'a"b', datatype, (10_001,), lambda: pieces, len(data))
    assert json.loads(b"".join(record.to_json())) == {
        "id": 7,
        "activity": "OUT",
        "tensor": {"name": 'a"b', "data": ",".join(wanted), "shape": "10001", "dtype": datatype},
    }


async def test_a_request_that_fails_in_its_batch_ends_once(traces, monkeypatch):
    stamps = []
    monkeypatch.setattr(Trace, "stamp", lambda trace, name, *_, **about: stamps.append(name))
    tracing = RequestTracing(traces, "m", 1)
    request = InferRequest(b"", None, 0, [], lambda _: None)
    tracing.begin(request, Received("HTTP", 1, 2))
    request.on_done(BridgeError("refused"))
    tracing.completed([CompletedBatch(1, 3, 4, 5, [request])])
    await asyncio.sleep(0)
    assert stamps.count("REQUEST_END") == 1
