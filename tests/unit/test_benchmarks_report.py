"""The benchmark's arithmetic: ratios, verdicts, what a page says, what an answer must be."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks.payloads import add_sub, check_answer, strings
from benchmarks.peer import find_peer
from benchmarks.plain_load import send_requests
from benchmarks.report import Report, RowResult, Verdict, advantage
from benchmarks.rows import ROWS, select
from benchmarks.tables import console_table, markdown_page
from gpubridge.errors import BridgeError

_README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
_BY_NAME = {row.name: row for row in ROWS}
_FASTER = _BY_NAME["add_sub_http_16"]  # requests/s: minimum 3, aim 4
_SHORTER = _BY_NAME["start_to_ready"]  # seconds: minimum 0.5, aim 0.25


def _result(row, ours, theirs):
    other = dict.fromkeys(("requests_per_second", "p50_us", "p99_us", "server_cpu_us"), 1.0)
    return RowResult(
        row,
        ours=[{**other, row.metric: value} for value in ours],
        theirs=[{**other, row.metric: value} for value in theirs],
    )


def _report(*results, compared=True):
    machine = {"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "load_average": 0.1}
    settings = {"rounds": 3, "seconds": 5, "load_generator": "wrk", "compared": compared}
    versions = {"gpubridge": "1.0", "Triton": "2.51.0"}
    return Report("2026-01-01T00:00:00+00:00", "abc", machine, versions, settings, results)


def test_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians():
    # The middle pair met a busy machine: both sides slowed down together.
    result = _result(_FASTER, ours=[400.0, 90.0, 700.0], theirs=[100.0, 30.0, 200.0])
    assert result.ratios == [4.0, 3.0, 3.5]
    assert result.ratio == 3.5
    assert (result.our_median, result.their_median) == (400.0, 100.0)


@pytest.mark.parametrize(
    ("row", "ratio", "verdict"),
    [
        (_FASTER, 4.0, Verdict.AIM),
        (_FASTER, 3.99, Verdict.MINIMUM),
        (_FASTER, 3.0, Verdict.MINIMUM),
        (_FASTER, 2.99, Verdict.BELOW),
        (_SHORTER, 0.25, Verdict.AIM),
        (_SHORTER, 0.26, Verdict.MINIMUM),
        (_SHORTER, 0.5, Verdict.MINIMUM),
        (_SHORTER, 0.51, Verdict.BELOW),
        (_BY_NAME["memory_idle"], 0.1, Verdict.NO_MINIMUM),
    ],
)
def test_verdict_follows_the_direction_of_the_metric(row, ratio, verdict):
    assert _result(row, ours=[ratio], theirs=[1.0]).verdict is verdict


def test_without_a_peer_nothing_is_compared():
    result = _result(_FASTER, ours=[400.0], theirs=[])
    assert result.verdict is Verdict.NOT_COMPARED
    assert result.ratio is None


def test_failure_wins_over_figures():
    assert RowResult(_FASTER, failure="no answer").verdict is Verdict.FAILED


def test_rounds_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="zip"):
        _ = _result(_FASTER, ours=[1.0, 2.0], theirs=[1.0]).ratios


def test_advantage_is_above_one_for_the_better_side_either_way():
    assert advantage(0.25, _SHORTER) == 4.0
    assert advantage(4.0, _FASTER) == 4.0


def test_document_survives_json_with_figures_bars_and_ratios():
    result = _result(_FASTER, ours=[400.0], theirs=[100.0])
    document = json.loads(json.dumps(_report(result).as_document()))
    (row,) = document["rows"]
    assert (row["name"], row["minimum"], row["aim"]) == ("add_sub_http_16", 3.0, 4.0)
    assert row["gpubridge"]["rounds"][0]["requests_per_second"] == 400.0
    assert (row["ratios"], row["verdict"]) == ([4.0], "aim met")


def test_page_shows_figures_machine_and_failures():
    page = markdown_page(
        _report(
            _result(_FASTER, ours=[30_000.0], theirs=[10_000.0]),
            RowResult(_SHORTER, failure="Triton: ended with exit code 1\nlong output"),
        ),
        picture="side.png",
    )
    assert (
        "| add_sub FP32[16], HTTP, 16 connections | req/s | 30,000 | 10,000 | 3.00 | 3.00–3.00 "
        "| ≥ 3 | ≥ 4 | minimum met |"
    ) in page
    assert "A CPU, 2 cores" in page
    assert "`start_to_ready` failed: Triton: ended with exit code 1\n" in page
    assert "long output" not in page
    assert "(side.png)" in page


def test_page_gives_every_load_figure_of_both_sides():
    ours = {"requests_per_second": 30.0, "p50_us": 140.0, "p99_us": 250.0, "server_cpu_us": 60.0}
    theirs = {name: value * 2 for name, value in ours.items()}
    page = markdown_page(_report(RowResult(_FASTER, [ours], [theirs])), picture=None)
    assert "| gpubridge | 30.0 | 140 | 250 | 60.0 |" in page
    assert "| Triton | 60.0 | 280 | 500 | 120 |" in page


def test_page_without_a_peer_says_so():
    report = _report(_result(_FASTER, ours=[30_000.0], theirs=[]), compared=False)
    page = markdown_page(report, picture=None)
    assert "No Triton was given" in page
    assert "30,000" in page
    assert "not compared" in page


def test_console_table_names_a_failure_in_full():
    failed = RowResult(_SHORTER, failure="ended with exit code 1\nlast words")
    assert "last words" in console_table(_report(failed))


@pytest.mark.parametrize(
    ("work", "names"),
    [
        ("add_sub, HTTP, 16 connections, requests/s", ["add_sub_http_16"]),
        ("add_sub, HTTP, 1 connection, p50", ["add_sub_http_1"]),
        ("600 KB fp32 in and out, HTTP, 4 connections", ["fp32_600k_http_4"]),
        ("BYTES tensor of 10,000 strings in and out", ["bytes_10k_http_1", "bytes_10k_http_4"]),
        ("BLS call of add_sub", ["bls_add_sub_http_1"]),
        ("64 concurrent BLS calls of add_sub in one request", ["bls_64_add_sub_http_1"]),
        (
            "decoupled stream of small responses, gRPC, 1 and 50 clients, responses/s",
            ["stream_100_h2load_1", "stream_100_h2load_50"],
        ),
        ("start to ready, one model with auto-complete", ["start_to_ready"]),
        ("start to ready, ten models with an import of 1 s each", ["start_ten_slow_imports"]),
    ],
)
def test_minimums_and_aims_are_those_of_the_design(work, names):
    line = next(s for s in _README.read_text().splitlines() if s.startswith(f"| {work} |"))
    minimum, aim = (_bar(cell) if cell.strip() else None for cell in line.split("|")[2:4])
    for name in names:
        row = _BY_NAME[name]
        # The design counts strings in times faster; their latency row holds the inverse.
        inverse = work.startswith("BYTES") and row.less_is_better
        expected = (1 / minimum, 1 / aim) if inverse else (minimum, aim)
        assert row.minimum == pytest.approx(expected[0])
        assert row.aim == (None if aim is None else pytest.approx(expected[1]))


def _bar(cell):
    if "≤ Triton's" in cell:
        return 1.0
    found = re.search(r"([\d.]+)×", cell)
    assert found, f"no bar in the design's cell {cell!r}"
    return float(found[1])


def test_rows_are_selected_by_name_in_table_order():
    assert select(None) == ROWS
    assert [row.name for row in select("soak, add_sub_http_1")] == ["add_sub_http_1", "soak"]
    with pytest.raises(ValueError, match=r"no such row: add_sub; expected some of add_sub_http_16"):
        select("add_sub")


def test_peer_directory_laid_out_wrongly_is_explained(tmp_path):
    with pytest.raises(BridgeError, match=r"expected venv/bin/python"):
        find_peer(str(tmp_path))


def test_no_peer_given_is_no_error(monkeypatch):
    monkeypatch.delenv("GPUBRIDGE_PEER", raising=False)
    assert find_peer(None) is None


@contextmanager
def _answering(payload, *, spoil):
    """Serve the expected answer to ``payload`` (its last byte flipped, if spoilt); give the port."""
    outputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in payload.outputs
    ]
    header = json.dumps({"outputs": outputs}).encode()
    body = bytearray(header + b"".join(tensor.data for tensor in payload.outputs))
    if spoil:
        body[-1] ^= 1

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            got = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if got == payload.body() else 400)
            self.send_header("Inference-Header-Content-Length", str(len(header)))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("payload", [add_sub(), strings(20)], ids=["add_sub", "strings"])
def test_right_answer_passes_the_check(payload):
    with _answering(payload, spoil=False) as port:
        check_answer(payload, port, "a server")


def test_one_wrong_byte_fails_the_check():
    payload = add_sub()
    with (
        _answering(payload, spoil=True) as port,
        pytest.raises(BridgeError, match=r"a server: model add_sub: output OUTPUT1"),
    ):
        check_answer(payload, port, "a server")


def test_plain_generator_counts_answers_and_latencies():
    payload = add_sub()
    with _answering(payload, spoil=False) as port:
        latencies, failed, elapsed = send_requests(payload, port, connections=1, seconds=0.05)
    assert failed == 0
    assert len(latencies) >= 1
    assert sum(latencies) <= elapsed
