"""The probe itself: its table is sound, its records are whole, and its comparison sees a planted fault."""

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.deliberate import Difference
from tests.conformance.http_case import Case
from tests.conformance.http_cases import CASES
from tests.conformance.http_exchange import exchange
from tests.conformance.http_record import Record, ask, differences, steady
from tests.conformance.load_cases import BROKEN
from tests.conformance.run import report, write_answers

HERE = Path(__file__).parent
PEER = json.loads((HERE / "peer_http.json").read_text(encoding="utf-8"))
LOAD = json.loads((HERE / "peer_load.json").read_text(encoding="utf-8"))


@contextmanager
def answering(reply: bytes, *, close: bool) -> Iterator[tuple[str, int]]:
    """A server that reads once, sends ``reply`` and then closes, or waits for the client to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)
                while not close and connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            thread.join()


def test_case_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []


def test_every_case_has_a_recorded_answer_of_the_peer() -> None:
    assert [case.name for case in CASES] == list(PEER)
    assert [model.name for model in BROKEN] == list(LOAD["models"])


@pytest.mark.parametrize("name", ["peer_http.json", "peer_load.json", "http_texts.md"])
def test_records_name_no_path_of_a_machine(name: str) -> None:
    text = (HERE / name).read_text(encoding="utf-8")
    assert re.findall(r"/(?:tmp|home|root|work|usr|opt)/\S*", text) == []


def test_a_record_equals_itself() -> None:
    assert all(not differences(case, PEER[case.name], PEER[case.name]) for case in CASES)


@pytest.mark.parametrize(
    ("aspect", "fault"),
    [
        ("status", lambda answer: answer.update(status=418)),
        ("body", lambda answer: answer.update(text="{}")),
        ("body", lambda answer: answer.update(binary="00")),
        ("headers", lambda answer: answer["headers"].append(["Content-Encoding", "br"])),
    ],
)
def test_a_planted_fault_is_seen(aspect: str, fault: object) -> None:
    case = next(case for case in CASES if case.name == "binary output: one of two")
    planted = json.loads(json.dumps(PEER[case.name]))
    assert callable(fault)
    fault(planted["responses"][0])
    assert list(differences(case, planted, PEER[case.name])) == [aspect]


def test_a_missing_response_and_a_closed_connection_are_seen() -> None:
    case = next(case for case in CASES if case.name == "framing: keep-alive is the default")
    silent = {"responses": [], "connection": "silent"}
    assert set(differences(case, silent, PEER[case.name])) == {
        "status",
        "headers",
        "body",
        "connection",
    }


def test_only_unexplained_differences_count(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("firm"), Case("free", differs=Difference("what", "theirs", "ours", "why"))]
    ours: dict[str, Record] = {case.name: {"responses": []} for case in cases}
    theirs = {
        case.name: {"responses": [{"status": 200, "headers": [], "text": "x"}]} for case in cases
    }
    assert report(cases, ours, theirs) == 1
    assert "DIFFERS: firm" in capsys.readouterr().out


def test_answers_survive_the_file(tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.json", PEER)
    assert json.loads((tmp_path / "answers.json").read_text(encoding="utf-8")) == PEER


def test_steady_text_hides_where_the_repository_lies_and_nothing_else() -> None:
    text = "At:\n  /srv/some where/models/m/1/model.py(3): execute, object at 0x7f12"
    assert steady(text).endswith("<repository>/m/1/model.py(3): execute, object at 0x*")
    assert steady("/v2/models/m/versions/1 is not found") == "/v2/models/m/versions/1 is not found"


def test_a_body_is_read_by_its_framing() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    with answering(chunked, close=False) as address:
        result = exchange(address, [b"x"], watch_end=True)
    assert (result.responses[0].body, result.connection) == (b"abcde", "open")
    until_close = b"HTTP/1.0 200 OK\r\n\r\nabc"
    with answering(until_close, close=True) as address:
        result = exchange(address, [b"x"], watch_end=True)
    assert (result.responses[0].body, result.connection) == (b"abc", "closed")


def test_silence_and_closing_are_told_apart() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", close=False) as address:
        assert exchange(address, [b"x"], read_timeout=0.2).connection == "silent"
    with answering(b"", close=True) as address:
        assert exchange(address, [b"x"]).connection == "closed"


def test_a_server_that_is_not_there_is_a_record() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    assert ask(Case("nobody"), address)["connection"].startswith("failed: ConnectionRefusedError")


def test_two_kinds_of_no_answer_differ() -> None:
    case = next(case for case in CASES if case.name == "model: return_none")
    gone = {"responses": [], "connection": "failed: ConnectionRefusedError"}
    assert list(differences(case, gone, PEER[case.name])) == ["connection"]


def test_the_words_of_a_json_parser_are_not_compared_but_its_refusal_is() -> None:
    case = next(case for case in CASES if case.name == "document: not JSON")
    planted = json.loads(json.dumps(PEER[case.name]))
    planted["responses"][0]["text"] = (
        '{"error":"failed to parse the request JSON buffer: something else at 3"}'
    )
    assert differences(case, planted, PEER[case.name]) == {}
    planted["responses"][0]["text"] = '{"error":"something else"}'
    assert list(differences(case, planted, PEER[case.name])) == ["body"]
