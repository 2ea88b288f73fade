"""The access log: its lines, what clients cannot do to them, and what happens where they are not taken."""

import fcntl
import json
import os
import re
from types import SimpleNamespace

import pytest

from gpubridge.dataplane import AccessLog, RequestCounts
from gpubridge.errors import BridgeError, ErrorCode, StubDied
from gpubridge.frontend.answered import HTTP_ENDPOINTS, AnsweredRequests
from gpubridge.telemetry.failed_requests import FailedRequests
from gpubridge.telemetry.statistics import ModelStatistics
from tests.unit.http_endpoint import GET, Endpoint, post
from tests.unit.test_http_inference import Server, infer_json

FORGED = 'a"\n\r\x1b[31m\u2028I1129 11:16:26.768540 1 x] forged\\é😀\x7f' + "x" * 500
LINE = re.compile(
    r'I\d{4} [\d:.]+ \d+ access\] request id="(?P<id>[ -~]*)" model="(?P<model>.*)" version="(.*)" '
    r'client="(.*)" protocol="http" endpoint="(.*)" status=(?P<status>\d+) bytes_in=\d+ bytes_out=\d+ '
    r"ms=\d+\.\d{3}"
)


class Pipe:
    """An access log that writes into a pipe."""

    def __init__(self, form="json"):
        self.read_end, write_end = os.pipe()
        self.log = AccessLog(write_end, form, HTTP_ENDPOINTS, ["other", "ModelInfer"])

    def text(self):
        self.log.close()
        with os.fdopen(self.read_end, "rb") as file:
            return file.read().decode()

    def lines(self):
        return [json.loads(line) for line in self.text().splitlines()]


def logged(form="json"):
    """Return a connection whose requests are logged."""
    pipe, endpoint = Pipe(form), Endpoint()
    endpoint.listener.counts.access_log = pipe.log
    endpoint.connection._state.set_client("1.2.3.4:5")
    return pipe, endpoint


def test_each_request_has_a_line():
    pipe, endpoint = logged()
    endpoint.receive(post(b"12345"), b"GET /missing HTTP/1.1\r\n\r\n")
    found = pipe.lines()
    assert [(line["status"], line["bytes_in"]) for line in found] == [(200, 5), (404, 0)]
    assert found[0] | {"time": "", "process": 0, "ms": 0} == {
        "time": "",
        "level": "info",
        "message": "request",
        "file": "access",
        "process": 0,
        "id": "#1",
        "model": "",
        "version": "",
        "client": "1.2.3.4:5",
        "protocol": "http",
        "endpoint": "other",
        "status": 200,
        "bytes_in": 5,
        "bytes_out": 5,
        "ms": 0,
    }
    assert found[1]["bytes_out"] == len(endpoint.answers()[1][1])


def test_a_client_that_leaves_has_a_line():
    pipe, endpoint = Pipe(), Endpoint(deferred=True)
    endpoint.listener.counts.access_log = pipe.log
    endpoint.receive(GET)
    endpoint.lose()
    assert [line["status"] for line in pipe.lines()] == [499]
    assert endpoint.listener.counts.rows() == [(0, 499, 1)]


@pytest.mark.parametrize("form", ["default", "json"])
def test_no_client_forges_a_line(form):
    pipe, server = Pipe(form), Server()
    server.connection._listener.counts.access_log = pipe.log
    for _ in range(3):
        server.receive(infer_json([0.25], FORGED))
        server.model.answer()
    server.receive(post(b"{", b"/infer"))
    server.connection.connection_lost(None)
    text = pipe.text()
    assert text.isascii(), text
    *lines, refused = text.splitlines()
    assert len(lines) == 3
    for line in lines:
        found = json.loads(line) if form == "json" else LINE.fullmatch(line)
        assert (found["model"], int(found["status"])) == ("m", 200)
        if form == "json":
            assert found["id"].encode() == FORGED.encode()[:128]
        else:
            assert len(found["id"]) < 6 * 128
    assert '"m"' in refused
    server.regions.close()


def test_lines_that_are_not_taken_are_dropped_counted_and_told():
    pipe = Pipe()
    fcntl.fcntl(pipe.read_end, fcntl.F_SETPIPE_SZ, 4096)
    endpoint = Endpoint()
    endpoint.listener.counts.access_log = pipe.log
    sent = 0
    while not pipe.log.dropped:
        endpoint.receive(GET)
        endpoint.transport.sent.clear()
        sent += 1
        assert sent < 100_000
    answered = AnsweredRequests(RequestCounts(1), [])
    answered._log = pipe.log
    (family,) = (f for f in answered.families() if f.name == "gpubridge_access_log_dropped_total")
    assert family.samples[0][2] == 1
    text = b""
    while b"missing in the access log" not in text:
        text += os.read(pipe.read_end, 1 << 20)
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["level"] == "warning"
    assert lines[-1]["message"].startswith("1 requests are missing")
    assert len(lines) == sent - 1 + 1
    pipe.log.close()
    os.close(pipe.read_end)


def test_a_log_that_takes_nothing_loses_its_lines():
    log = AccessLog(os.open("/dev/full", os.O_WRONLY), "json", HTTP_ENDPOINTS, [])
    endpoint = Endpoint()
    endpoint.listener.counts.access_log = log
    endpoint.receive(GET)
    log.close()
    assert log.dropped == 1


@pytest.mark.parametrize("number", [0, 2])
def test_a_line_names_the_client_of_a_bug(caplog, number):
    endpoint = logged()[1] if number else Endpoint()
    if number:
        endpoint.receive(GET)
    endpoint.listener.router = SimpleNamespace(failure=endpoint.failure)
    endpoint.connection._route = lambda head: 1 / 0
    endpoint.receive(GET)
    status, body = endpoint.answers()[-1]
    assert status == 500
    line = f'request failed: id="#{number or 1}" client="1.2.3.4:5" protocol="http": internal error: Zero'
    assert line in caplog.text
    assert b"1.2.3.4" not in body


def test_a_flood_of_failures_has_few_lines_and_their_number(caplog, monkeypatch):
    now = 5.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    failed, error = FailedRequests(), BridgeError("x" * 1000 + "\nmore")
    ModelStatistics("m", 1).note_error(error, 'a"\n' + "y" * 500)
    for _ in range(100):
        failed.log(error.copy(), "grpc", "1.2.3.4:5", 7)
    failed.log(BridgeError("busy", ErrorCode.UNAVAILABLE), "grpc", "1.2.3.4:5", 7)
    now = 6.0
    failed.log(StubDied("it died").prefixed("in ensemble 'e', "), "grpc", "1.2.3.4:5", 7)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 21
    assert lines[0].startswith(
        r'request failed: id="a\"\n' + "y" * 125 + '" model="m" version="1" '
    )
    assert lines[0].endswith("x" * 300 + "...")
    whose = 'id="#7" client="1.2.3.4:5" protocol="grpc"'
    text = "in ensemble 'e', it died (80 others failed before it)"
    assert lines[-1] == f"request failed: {whose}: {text}"
