"""``gpubridge top`` at servers: ours, one without a status, one like Triton, and none."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpubridge.cli import main
from gpubridge.cli.top_tables import tables
from tests.process import controlled
from tests.process.controlled import control, only
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_model

CODE = answering("""
if value.min() < 0:
    raise ValueError("\\x1b[31mred [bold]")
return respond(OUT=value)
""")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = tmp_path_factory.mktemp("top") / "models"
    write_model(models, "m", CODE)
    write_model(models, "broken", "import nothing_of_that_name")
    write_model(models, "other", CODE)
    with running_server(models, *only("m"), own=True) as running:
        # Only what a flag names is loaded at the start, ...
        assert running.index() == {
            ("broken", 0): {"name": "broken"},
            ("m", 1): {"name": "m", "version": "1", "state": "READY"},
            ("other", 0): {"name": "other"},
        }
        unknown = (404, "Request for unknown model: 'other' is not found")
        assert controlled.ask(running, "other") == unknown
        # ... and others when a client asks for them.
        assert control(running, "load", "other") == (200, "")
        assert running.is_ready("other")
        assert control(running, "unload", "other") == (200, "")
        assert control(running, "load", "broken")[0] == 400
        yield running


def ask(server, value=1.0):
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}
    server.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))


@contextmanager
def load(server):
    """Requests, until the block ends; not as many as there can be."""
    ended = threading.Event()

    def run():
        while not ended.wait(0.01):
            ask(server)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def top(url, *flags):
    return main(["top", "--url", f"http://{url}" if "://" not in url else url, *flags])


def rows_of(text):
    """The tables of a plain text: rows by their header's names, by the first header."""
    found = {}
    for block in text.strip().split("\n\n"):
        header, *rows = (re.split(r"  +", line) for line in block.splitlines())
        found[header[0]] = [dict(zip(header, row, strict=True)) for row in rows]
    return found


def test_once_prints_figures_of_the_interval(server, capsys):
    ask(server, -1)
    with load(server):
        assert top(server.http_url, "--once", "--interval", "0.5") == 0
    text, note = capsys.readouterr()
    assert note == ""
    made = rows_of(text)
    models = {row["MODEL"]: row for row in made["MODEL"]}
    broken, model = models["broken"], models["m"]
    assert (broken["STATE"], broken["REQ/S"]) == ("failed", "-")
    assert (model["VERSION"], model["STATE"]) == ("1", "ready")
    assert (model["READY"], model["BATCH"], model["RESTARTS"], model["SLOWER"]) == (
        "1/1", "1.0", "0", "0",
    )  # fmt: skip
    assert float(model["REQ/S"]) > 0
    assert 0 < float(model["P50_MS"]) <= float(model["P99_MS"])
    parts = [float(model[f"{name}%"]) for name in ("QUEUE", "INPUT", "EXECUTE", "OUTPUT", "ANSWER")]
    assert sum(parts) == pytest.approx(100, abs=3)
    (instance,) = made["INSTANCE"]
    assert instance["INSTANCE"] == "m_0"
    assert int(instance["PID"]) in server.stubs()
    assert int(instance["RSS_MB"]) > 0
    assert "\x1b" not in text
    assert "ValueError: \\x1b[31mred [bold]" in text
    assert "nothing_of_that_name" in text


def test_a_model_without_requests_has_no_quantiles(server, capsys):
    def idle():
        assert top(server.metrics_url, "--once", "--interval", "0.1") == 0
        rows = rows_of(capsys.readouterr().out)["MODEL"]
        (model,) = [row for row in rows if row["MODEL"] == "m"]
        return (model["REQ/S"], model["P50_MS"], model["EXECUTE%"]) == ("0.0", "-", "-")

    # Documents from before the last requests of other tests are kept for a second.
    wait_until(idle, "an interval without requests")


ROW = {"name": "m", "version": 1, "condition": "ready", "reason": ""}
BOUNDS = [1000, 2000, 5000]
BEFORE = {
    "since": 1, "success": 10, "failures": {"BACKEND": 5}, "request_us": 500, "queue_us": 500,
    "durations": [(0, 10)], "batch_sizes": [(1, 10)],
}  # fmt: skip
AFTER = {
    "since": 1, "success": 110, "failures": {"BACKEND": 6, "OTHER": 3}, "request_us": 10500,
    "queue_us": 1500, "input_us": 500, "execute_us": 5000, "output_us": 1500, "cache_us": 800,
    "answer_us": 1200, "durations": [(0, 60), (1, 49), (3, 1)], "batch_sizes": [(1, 40), (4, 20)],
}  # fmt: skip
CELLS = {
    "MODEL": "m", "VERSION": "1", "STATE": "ready", "READY": "1/2", "REQ/S": "50.0", "FAIL/S": "2.0",
    # Of 100 requests, 50 took at most 1 ms, and 99 at most 2 ms.
    "P50_MS": "1.00", "P99_MS": "2.00", "QUEUED": "7", "BATCH": "2.2", "QUEUE%": "10", "INPUT%": "5",
    "EXECUTE%": "50", "OUTPUT%": "15", "CACHE%": "8", "ANSWER%": "12", "RESTARTS": "3", "SLOWER": "4",
}  # fmt: skip
NOTHING = dict.fromkeys(
    ("P50_MS", "P99_MS", "BATCH", *(each for each in CELLS if "%" in each)), "-"
)
WORKING = {
    "name": "m_0", "state": "ready", "python": "3.11.1", "pid": 5, "device": 1, "in_flight": 2, "restarts": 3,
    "memory": {"rss_bytes": 9_000_000, "pss_bytes": 1}, "device_memory_bytes": 8_000_000,
}  # fmt: skip
STARTING = {"name": "m_1", "state": "starting", "device": None, "in_flight": 0, "restarts": 0}


def shown_of(before, after, **fields):
    """Return the tables of two seconds between the statistics of a model."""
    documents = [
        {
            "time": at,
            "models": [{**ROW, "statistics": made, **fields}],
            "duration_bounds_us": BOUNDS,
        }
        for at, made in ((1, before), (3, after))
    ]
    return [
        [dict(zip(table.header, row, strict=True)) for row in table.rows]
        for table in tables(*documents)
    ]


def test_every_column_is_what_the_documents_say():
    error = {"text": "no\nsuch", "requests": 4, "last": 0, "identifier": "x"}
    (model,), instances, (latest,) = shown_of(
        BEFORE, AFTER, queued=7, instances=[WORKING, STARTING], fallbacks={"a": 1, "b": 3},
        errors=[error],
    )  # fmt: skip
    assert model == CELLS
    assert [tuple(row.values()) for row in instances] == [
        ("m_0", "ready", "3.11.1", "5", "1", "2", "9", "8", "3"),
        ("m_1", "starting", "-", "-", "-", "0", "-", "-", "0"),
    ]
    assert [latest[name] for name in ("MODEL", "ERROR", "REQUESTS")] == ["m", "no", "4"]


@pytest.mark.parametrize(
    ("after", "cells"),
    [
        # Nothing, only failures, and a model that was loaded anew, of which Triton does not tell.
        (BEFORE, {"REQ/S": "0.0", "FAIL/S": "0.0", **NOTHING}),
        (BEFORE | {"failures": {"OTHER": 9}}, {"REQ/S": "0.0", "FAIL/S": "2.0", **NOTHING}),
        (AFTER | {"since": 2}, {"REQ/S": "55.0", "FAIL/S": "4.5", "BATCH": "2.0"}),
        ({"since": 1, "success": 0, "failures": {"": 1}}, {"REQ/S": "0.0", "FAIL/S": "0.5"}),
        # Batches whose requests all failed.
        (BEFORE | {"batch_sizes": [(1, 10), (8, 2)]}, {"BATCH": "8.0"}),
        # A duration beyond the last bound.
        (BEFORE | {"durations": [(0, 11), (3, 1)]}, {"P50_MS": "1.00", "P99_MS": ">5"}),
        # Members of an ensemble that run side by side.
        (
            BEFORE | {"request_us": 1500, "queue_us": 500, "execute_us": 1500, "answer_us": 500},
            {"EXECUTE%": "75", "ANSWER%": "25"},
        ),
    ],
)
def test_columns_of_intervals_of_each_kind(after, cells):
    (model,), _, _ = shown_of(BEFORE, after)
    assert {name: model[name] for name in cells} == cells


@contextmanager
def server_of(answers):
    """A server with one answer for each path; returns its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(b"" if body is None else json.dumps(body).encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("extension", "said"),
    [("statistics", "it is Triton"), ("gpubridge(1)", "switched off (--allow-status-page=false)")],
)
def test_a_server_without_a_status_shows_its_statistics(extension, said, capsys):
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    statistics = {
        "name": "a\x1bb",
        "version": "2",
        "batch_stats": [{"batch_size": 2, "compute_infer": {"count": 4, "ns": 9}}],
        "inference_stats": {name: {"count": 4, "ns": 1000} for name in durations},
    }
    answers = {
        "/v2": {"name": "triton", "version": "2.51.0", "extensions": [extension]},
        "/v2/repository/index": [{"name": "a\x1bb", "version": "2", "state": "READY"}],
        "/v2/models/stats": {"model_stats": [statistics]},
    }
    with server_of(answers) as url:
        assert top(url, "--once", "--interval", "0.1") == 0
    text, note = capsys.readouterr()
    assert said in note
    model = rows_of(text)["MODEL"][0]
    assert (model["MODEL"], model["STATE"], model["REQ/S"]) == ("a\\x1bb", "ready", "0.0")
    assert (model["P50_MS"], model["READY"], model["RESTARTS"]) == ("-", "-", "-")


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({}, "is no model server: /v2 has status 404"),
        ({"/v2/gpubridge/status": {"schema": 2}}, "whose status has another form"),
        ({"/v2/gpubridge/status": {"schema": 1, "models": [1]}}, "status cannot be read"),
        ({"/v2": [], "/v2/repository/index": [], "/v2/models/stats": 1}, "as Triton does"),
    ],
)
def test_servers_of_another_kind(answers, text, capsys):
    with server_of(answers) as url:
        assert top(url, "--once", "--interval", "0.1") == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "localhost", "http://x:99999", "http://x/y"])
def test_urls_of_another_form(url, capsys):
    for words in (["--url", url], [url]):
        assert main(["top", "--once", *words]) == 1
        assert "expects http://HOST:PORT" in capsys.readouterr().err


def test_a_closed_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert top(f"127.0.0.1:{port}", "--once") == 1
    assert "does not answer: Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--header", "nothing"], ["--header", "a:b\r\nc:d"]])
def test_headers_of_another_form(flags, capsys):
    assert top("127.0.0.1:1", "--once", *flags) == 1
    assert "--header expects NAME:VALUE" in capsys.readouterr().err


def test_without_rich_the_live_view_says_what_to_install(server, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert top(server.http_url) == 1
    assert "pip install 'gpubridge[top]'" in capsys.readouterr().err


def test_the_live_view_in_a_terminal(server):
    ask(server, -1)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpubridge", "top", "--url", f"http://{server.http_url}"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "180", "LINES": "40"}
    process = subprocess.Popen(
        [*command, "--interval", "0.2"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def look():
        nonlocal seen
        if select.select([ours], [], [], 0.1)[0]:
            # At the end of the process, reading fails.
            with suppress(OSError):
                seen += os.read(ours, 1 << 16)
        return _plain(seen)

    def has(*words):
        text = look()
        return all(word in text for word in words)

    try:
        with load(server):
            wait_until(lambda: has(b"MODEL", b"m_0", b"\\x1b[31mred [bold]"), "the first view")
            seen = b""
            rate = re.compile(rb"ready +1/1 +[1-9]\d*\.\d")
            wait_until(lambda: rate.search(look()), "the rate of requests")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: look() and process.poll() is not None, "the end")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0
    assert b"Traceback" not in seen


def _plain(text):
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", text)
