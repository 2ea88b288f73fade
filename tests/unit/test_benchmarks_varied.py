"""Varied traffic: requests that never repeat, the client that sends them, the ratios of the page."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.client import Client
from benchmarks.shared_regions import check_output, clear_outputs, shared_regions
from benchmarks.traffic import TURN, Traffic, json_request
from benchmarks.varied import main
from benchmarks.varied_models import MODELS, copies, write_repository
from benchmarks.varied_rows import NAMES, OWN_ROWS, ROWS
from benchmarks.varied_table import OwnResult, Result, failures, page
from gpubridge.errors import BridgeError
from gpubridge.schema import message_class

ABOUT = {
    "started": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "machine": {"cpu": "A CPU", "cores": 2, "kernel": "6.1", "load_average": 0.1},
    "client": "a client",
    "python": {"gpubridge": "3.11"},
    "rounds": 3,
    "seconds": 5,
}
BY_NAME = {row.name: row for row in ROWS}


def sample(cpu, rate):
    return {"cpu_us": cpu, "rate": rate, "p50_us": 1.0, "p99_us": 2.0, "mean_us": 1.0}


WORKS = [
    *(pytest.param(row, id=row.name) for row in ROWS),
    *(
        pytest.param(work, id=f"{row.name}-{which}")
        for row in OWN_ROWS
        for which, work in (("one", row.one), ("other", row.other))
    ),
]


@pytest.mark.parametrize("row", WORKS)
def test_requests_are_whole_and_none_is_sent_twice(row):
    traffic = row.traffic()
    assert set(traffic.models) | set(row.models) <= set(MODELS)
    sent = set()
    for turn, request in enumerate(traffic.requests[:50], 1):
        for filled in (request.filled(turn), request.filled(turn + 1000)):
            sent.add(filled)
            assert not re.search(rb"@{4,}|#{4,}|~{4}", filled)
            if traffic.path:
                assert message_class("ModelInferRequest").FromString(filled).model_name
                continue
            head, _, body = filled.partition(b"\r\n\r\n")
            assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body)
            length = re.search(rb"Inference-Header-Content-Length: (\d+)", head)
            json.loads(body[: int(length[1])] if length else body)
    assert len(sent) == (1 if "equal bytes" in row.title else 2 * len(traffic.requests[:50]))


def test_rows_with_tls_are_of_grpc_where_both_servers_have_it():
    assert [row.traffic().protocol for row in ROWS if row.tls] == ["grpc", "grpc"]


def test_names_are_unique_and_unknown_ones_are_refused():
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(SystemExit, match="no such row: add"):
        main(["--rows", "add"])


def test_models_are_written_whole(tmp_path):
    models = [make() for make in MODELS.values()] + copies(2)
    write_repository(models, tmp_path)
    for model in models:
        assert f'name: "{model.name}"' in (tmp_path / model.name / "config.pbtxt").read_text()
        code = tmp_path / model.name / "1" / "model.py"
        assert code.exists() is bool(model.code)
        if model.code:
            compile(code.read_text(), str(code), "exec")


def test_regions_are_checked_and_removed():
    with shared_regions(2, 64) as names:
        assert [Path("/dev/shm", name).stat().st_size for name in names] == [64] * 4
        check_output(names, "a server")
        clear_outputs(names)
        with pytest.raises(
            BridgeError, match=f"a server: the output in {names[2]} is not the input"
        ):
            check_output(names, "a server")
    assert not any(Path("/dev/shm", name).exists() for name in names)


def test_a_model_with_an_environment_of_its_own_finds_it(tmp_path):
    write_repository([MODELS["add_sub_environment"]()], tmp_path, tmp_path)
    folder = tmp_path / "add_sub_environment"
    path = re.search(r'string_value: "([^"]+)"', (folder / "config.pbtxt").read_text())[1]
    assert Path(path.replace("$$TRITON_MODEL_DIRECTORY", str(folder))).samefile(tmp_path)


def test_ratios_are_medians_of_the_rounds():
    row = BY_NAME["add_sub_ids"]
    ours, theirs = [sample(10, 90), sample(20, 30)], [sample(60, 30), sample(80, 30)]
    result = Result(row, ours, theirs)
    assert result.cpu_ratio == 5.0
    assert result.rate_ratio == 2.0
    assert result.verdict == "minimum met"
    assert Result(row, [sample(10, 1)], [sample(90, 1)]).verdict == "aim met"
    assert Result(row, [sample(10, 1)], [sample(49, 1)]).verdict == "below minimum"
    assert Result(row, [sample(10, 1)], []).verdict == "not compared"
    by_rate = Result(BY_NAME["shm_16m_1"], [sample(10, 45)], [sample(10, 10)])
    assert (by_rate.ratio, by_rate.verdict) == (4.5, "minimum met")
    own = OWN_ROWS[0]
    assert OwnResult(own, [sample(11.4, 1)], [sample(10, 1)]).verdict == "minimum met"
    assert OwnResult(own, [sample(11.6, 1)], [sample(10, 1)]).verdict == "above bar"


def test_the_page_has_both_ratios_the_client_and_failures():
    seen = Result(BY_NAME["add_sub_ids"], [sample(10, 90)], [sample(60, 30)])
    broken = Result(BY_NAME["generate"], [], [], "Triton: ended")
    text = page(ABOUT, [seen, broken], [], [])
    assert "| 10.0 | 60.0 | 6 | 5 | 9 | minimum met | 90.0 | 30.0 | 3 |" in text
    assert "client: a client" in text
    assert "`generate` failed: Triton: ended" in text
    assert failures([seen, broken], [], []) == [("generate", "Triton: ended")]


class Collecting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        answer = b"{}"
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collecting)
    server.bodies, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the load client is C++"
)
def test_the_client_sends_no_request_twice_and_counts_failures(server, tmp_path):
    client = Client(tmp_path)
    traffic = Traffic([json_request("/x", f'{{"id": {TURN}}}')], ())
    figures = client.run(traffic, server.server_port, connections=3, seconds=1)
    assert figures.requests == len(server.bodies) > 3
    assert figures.failed == 0
    assert len(set(server.bodies)) == len(server.bodies)
    assert all(json.loads(body)["id"] for body in server.bodies)
    server.status = 400
    assert client.run(traffic, server.server_port, connections=1, seconds=0).failed == 1
    with pytest.raises(BridgeError, match="cannot connect"):
        client.run(traffic, 1, connections=1, seconds=0)
