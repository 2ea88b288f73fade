"""Latency at given rates: when requests come, from when latency counts, and what a late client is told."""

import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from benchmarks.client import Client
from benchmarks.open_loop import main
from benchmarks.open_loop_table import OpenResult, document, page
from benchmarks.traffic import TURN, Traffic, json_request
from gpubridge.bench.arrivals import Followed, arrivals, check_client, latencies, lateness
from gpubridge.errors import BridgeError
from tests.unit.test_benchmarks_varied import ABOUT

SECOND = 1_000_000_000


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = arrivals(20_000, 10, 1)
    assert len(times) == 200_000
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] < times[-1] < 10 * SECOND
    gaps = np.diff(times) / 1e9
    # Gaps are exponential: the deviation is the mean, one in e is longer than it, no gap tells the next.
    assert gaps.std() * 20_000 == pytest.approx(1, rel=0.02)
    assert (gaps > 1 / 20_000).mean() == pytest.approx(np.exp(-1), rel=0.02)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.01
    counts = np.bincount(times // (SECOND // 100), minlength=1000)
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.15)
    assert (arrivals(20_000, 10, 1) == times).all()
    assert (arrivals(20_000, 10, 2) != times).any()


def served_in_virtual_time(meant, service, stall):
    """One connection, whose server takes ``service`` for a request and does nothing in the ``stall``."""
    sendable, answered, free = [], [], 0
    for each in meant:
        sendable.append(max(each, free))
        free = sendable[-1] + service
        if sendable[-1] < stall[1] and free > stall[0]:
            free = stall[1] + service
        answered.append(free)
    times = np.array([meant, sendable, sendable, answered])
    return Followed(*times, failed=0, first=True)


def test_requests_that_were_meant_while_a_server_stalled_show_the_wait():
    meant = np.arange(0, 10 * SECOND, SECOND // 100)
    stall = (3 * SECOND, 4 * SECOND)
    followed = served_in_virtual_time(meant, SECOND // 1000, stall)
    held = (meant >= stall[0]) & (meant < stall[1])
    assert held.sum() == 100
    assert ((followed.answered - meant)[held] > (stall[1] - meant)[held]).all()
    seen = latencies(followed)
    assert seen["p50"] == 1000
    assert seen["p99"] > 900_000
    # A client that waits for each answer before it sends again would have seen one slow request.
    assert np.quantile(followed.answered - followed.sent, 0.99) == SECOND // 1000
    # The wait is the server's: the client was never late.
    assert set(lateness(followed).values()) == {0}


@pytest.mark.parametrize(
    ("late", "seen", "refused"), [(49, 60, False), (90, 1000, False), (101, 1000, True)]
)
def test_a_late_client_is_refused(late, seen, refused):
    sample = {f"{kind}p{each}_us": 0 for kind in ("", "late_") for each in (50, 90, 99, 999)}
    sample |= {"p99_us": seen, "late_p99_us": late}
    if not refused:
        check_client(sample)
        return
    with pytest.raises(BridgeError, match="the client was late: p99 of 101 µs"):
        check_client(sample)


class Holding(BaseHTTPRequestHandler):
    """Answers nothing until as many connections as there are have sent a request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.together.wait()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\n0\r\n\r\n\r\n0\r\n\r\n")

    def log_message(self, *_args):
        pass


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the load client is C++"
)
def test_the_client_counts_from_the_time_that_was_meant(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Holding)
    released = []

    def release():
        released.append(time.monotonic_ns())

    server.together = threading.Barrier(2, action=release)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        traffic = Traffic([json_request("/x", f'{{"id": {TURN}}}')], ())
        schedule = np.zeros(20, np.int64)
        followed = Client(tmp_path).follow(traffic, server.server_port, 2, schedule)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (followed.meant == followed.meant[0]).all()
    assert not followed.failed
    assert followed.answered.min() >= released[0] >= followed.meant[0]
    # The first two go at once, the others when a connection is free; none before it is meant.
    assert (followed.sendable[:2] == followed.meant[:2]).all()
    assert (followed.sendable[2:] >= released[0]).all()
    assert (followed.sent >= followed.sendable).all()
    assert (followed.answered >= followed.sent).all()


def sample(p99, rate=100.0):
    quantiles = {"p50_us": 1.0, "p99_us": p99, "p999_us": 9.0, "late_p999_us": 4.0}
    return {"offered": 100.0, "rate": rate, "cpu_us": 7.0, "client_first": 1.0, **quantiles}


def test_the_page_has_the_verdict_and_says_who_did_not_keep_up():
    seen = OpenResult("add_sub_ids", "work", 0.7, [sample(10)], [sample(30, rate=90)])
    assert seen.verdict == "minimum met; Triton did not keep up"
    assert OpenResult("add_sub_ids", "work", 0.5, [sample(10)], [sample(30)]).verdict == (
        "no minimum set"
    )
    broken = OpenResult("add_sub_ids", "work", 0.9, [], [], "the client was late")
    text = page(ABOUT, [seen, broken])
    assert "| work, 70% | 100 | 100 | 1 | 1 | 10.0 | 30.0 | 9 | 9 | 3 | 2 | 5 | minimum met" in text
    assert "on the same machine, before all other processes" in text
    assert "`add_sub_ids` at 90% failed: the client was late" in text
    assert document(ABOUT, [broken])["rows"][0]["failure"] == "the client was late"
    with pytest.raises(SystemExit, match="no such work: add"):
        main(["--works", "add"])
