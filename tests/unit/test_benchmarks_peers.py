"""Other servers: what is sent to them, which answers are right, what the page and the README's table say."""

import base64
import http.client
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import environments, readme
from benchmarks.environments import make_environment
from benchmarks.peers.__main__ import main
from benchmarks.peers.servers import PEERS, Place, contender
from benchmarks.peers.table import PeerResult, document, page
from benchmarks.peers.works import TOKENS, WORKS, Answer, photograph
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Ports
from gpubridge.errors import BridgeError
from tests.unit.test_benchmarks_varied import ABOUT

DIALECTS = ("v2", "mlserver", "base64", "form", "body")
BY_NAME = {work.name: work for work in WORKS}


def sent(work, dialect, turn=1):
    return BY_NAME[work].request(dialect).filled(turn)


def answer(document, tensors=b"", status=200):
    head = json.dumps(document).encode()
    return Answer(status, len(head) if tensors else None, head + tensors)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("work", BY_NAME)
def test_requests_are_whole_and_vary(work, dialect):
    if work == "means":
        pytest.importorskip("PIL")
    first, second = sent(work, dialect, 1), sent(work, dialect, 2)
    assert first != second
    assert len(first) == len(second)
    head, _, body = first.partition(b"\r\n\r\n")
    assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body)
    assert b"@@@@" not in first


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_photograph_is_one_in_every_dialect(dialect):
    image = pytest.importorskip("PIL.Image")
    body = sent("means", dialect).partition(b"\r\n\r\n")[2]
    if dialect in ("mlserver", "base64"):
        found = json.loads(body)
        body = base64.b64decode(
            found["inputs"][0]["data"][0] if "inputs" in found else found["IMAGE"]
        )
    jpeg = body[body.index(b"\xff\xd8") :]
    assert 90_000 < len(photograph()) < 110_000
    pixels, expected = (image.open(io.BytesIO(each)).tobytes() for each in (jpeg, photograph()))
    assert pixels == expected


@pytest.mark.parametrize("dialect", ["v2", "body"])
def test_a_right_sum_and_wrong_ones(dialect):
    body = sent("add_sub", dialect).partition(b"\r\n\r\n")[2]
    given = json.loads(body)
    if dialect == "v2":
        given = {each["name"]: each["data"] for each in given["inputs"]}
    left, right = (np.array(given[name], np.float32) for name in ("INPUT0", "INPUT1"))
    outputs = {"OUTPUT0": (left + right).tolist(), "OUTPUT1": (left - right).tolist()}
    listed = {"outputs": [{"name": name, "data": data} for name, data in outputs.items()]}
    wrong = BY_NAME["add_sub"].wrong
    assert wrong(body, answer(outputs)) == wrong(body, answer(listed)) == ""
    outputs["OUTPUT1"][3] += 1
    assert wrong(body, answer(outputs)).startswith("expected OUTPUT1")
    assert wrong(body, answer({"OUTPUT0": [1.0]})) == "expected output OUTPUT0 of 8 numbers"
    assert wrong(body, answer({"error": "no"})).startswith("no outputs")
    assert wrong(body, Answer(200, None, b"<html>")).startswith("no outputs")


def test_a_right_stream_and_wrong_ones():
    body = sent("tokens", "v2").partition(b"\r\n\r\n")[2]
    number = json.loads(body)["text_input"].split()[-1]
    pieces = [f"{number}:{index} " for index in range(TOKENS)]
    forms = [
        "".join(pieces),
        "".join(f'data: {{"text_output":"{each}"}}\n\n' for each in pieces),
        "".join(f'data: {{"outputs":[{{"data":["{each}"]}}]}}\n\n' for each in pieces),
    ]
    wrong = BY_NAME["tokens"].wrong
    assert [wrong(body, Answer(200, None, each.encode())) for each in forms] == ["", "", ""]
    assert wrong(body, Answer(200, None, "".join(pieces[1:]).encode()))
    assert "no stream" in wrong(body, Answer(200, None, b'data: {"error":"no"}\n\n'))


@pytest.mark.parametrize("server", [contender(Gpubridge()), *PEERS], ids=lambda each: each.name)
def test_each_server_has_a_command_for_each_work(server, tmp_path):
    for work in BY_NAME:
        folder = tmp_path / work
        folder.mkdir()
        place = Place(work, Ports(1, 2, 3), tmp_path / "bin" / "python", folder)
        launch = server.launch(place)
        assert launch.directory.is_dir()
        assert launch.environment["PATH"]
        if server.install is None:
            code = (folder / "models" / work / "1" / "model.py").read_text()
            compile(code, "model.py", "exec")
        else:
            assert re.fullmatch(r"[\w\[\]-]+==[\d.]+", server.install.server)


def test_an_environment_that_cannot_be_had_is_told_with_the_reason(tmp_path, monkeypatch):
    with pytest.raises(BridgeError, match="no-such-python"):
        make_environment(tmp_path / "made", "/no-such-python", ["x==1"])
    programs = []

    def refuse(command, folder):
        programs.append(command)
        if "pip" in command:
            raise BridgeError("environment: no matching distribution")

    monkeypatch.setattr(environments, "_run", refuse)
    monkeypatch.setattr("benchmarks.peers.__main__._measure", lambda *_: [])
    monkeypatch.delenv("GPUBRIDGE_PEER", raising=False)
    given = ["--environments", str(tmp_path), "--servers", "LitServe", "--output", str(tmp_path)]
    assert main(given) == 1
    assert (
        "- LitServe is absent: environment: no matching distribution"
        in (tmp_path / "peers.md").read_text()
    )
    assert json.loads((tmp_path / "peers.json").read_text())["absent"].keys() == {
        "Triton",
        "LitServe",
    }
    base = str(Path(sys.executable).resolve())
    assert programs[0] == [base, "-m", "venv", str(tmp_path / "litserve")]


def test_an_environment_is_kept_until_its_packages_change(tmp_path, monkeypatch):
    made = []

    def run(command, folder):
        made.append(command)
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    for packages, count in ((["x==1"], 2), (["x==1"], 2), (["x==2"], 4)):
        make_environment(tmp_path / "made", "python", packages)
        assert len(made) == count


def sample(cpu, rate):
    others = {"p50_us": 1.0, "p99_us": 2.0, "pss_mib": 3.0, "processes": 4, "start_seconds": 5.0}
    return {"cpu_us": cpu, "rate": rate, **others}


def run_of_peers():
    results = [
        PeerResult("add_sub", "gpubridge", [sample(10, 900)]),
        PeerResult("add_sub", "Triton", [sample(45, 300)]),
        PeerResult("add_sub", "LitServe", [sample(1000, 20)]),
        PeerResult("add_sub", "BentoML", [], "ended\nbefore"),
    ]
    about = {**ABOUT, "installed": {"LitServe": "litserve==1"}, "absent": {"MLServer": "no pip"}}
    return about, results


def test_the_page_compares_and_names_what_failed():
    text = page(*run_of_peers())
    assert "| Triton | 45.0 | 4.5 | 300 | 1 | 2 | 3 | 4 | 5 |" in text
    assert "| gpubridge | 10.0 | – | 900 |" in text
    assert "- BentoML failed: ended before" in text
    assert "- MLServer is absent: no pip" in text
    assert "- LitServe: litserve==1" in text


def test_the_table_of_the_readme_has_json_first():
    varied = json.loads((readme.RESULTS / "varied.json").read_text())
    peers = json.loads(json.dumps(document(*run_of_peers())))
    rows = [line for line in readme.section(varied, peers).splitlines() if line.startswith("|")]
    assert rows[0].startswith("| work | gpubridge | Triton |  | PyTriton | MLServer | LitServe |")
    assert rows[2] == (
        "| JSON in and out, 16 connections | 10.0 µs (900/s) | 45.0 µs (300/s) | **4.5×** "
        "| – | – | 1,000 µs (20.0/s) | – | – |"
    )
    alone = [line for line in readme.section(varied, None).splitlines() if line.startswith("|")]
    assert alone[2].startswith("| JSON in and out, 16 connections | ")
    assert len({line.count("|") for line in alone}) == 1
    text = "a\n<!-- benchmarks -->\nold\n<!-- end of benchmarks -->\nb\n"
    assert readme.replaced(text, "new\n") == text.replace("old", "new")


def test_bounds_that_a_run_did_not_reach_are_named():
    varied = json.loads((readme.RESULTS / "varied.json").read_text())
    rows = {row["name"]: row for row in varied["rows"]}
    rows["json_add_sub"]["gpubridge"] = [{"cpu_us": 100.5, "rate": 1.0}]
    rows["json_add_sub"]["triton"] = [{"cpu_us": 401.9, "rate": 1.0}]
    rows["add_sub_ids"]["triton"] = [{"cpu_us": 1e6, "rate": 1.0}] * 2
    rows["start_50"]["gpubridge"] = [{"seconds": 9.0}]
    varied["failures"] = {"bls_1": "ended"}
    said = " ".join(readme.section(varied, None).split())
    assert "add_sub, JSON in and out, HTTP, 16 (3.99 of 4)" in said
    assert "start to ready, 50 small models (9 s of at most 6)" in said
    assert "bls_1 (no figures)" in said
    assert "a new id in every request (" not in said


def test_a_server_that_is_not_ready_is_told_from_a_wrong_answer(monkeypatch):
    answers = iter(
        [ConnectionRefusedError(), http.client.BadStatusLine("x"), answer({}, status=404)]
    )

    def ask(*_):
        found = next(answers, answer({"OUTPUT0": [1.0]}))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("benchmarks.peers.works.ask", ask)
    kinds = []
    for _ in range(4):
        with pytest.raises(BridgeError) as caught:
            BY_NAME["add_sub"].check("body", 1, 1)
        kinds.append(type(caught.value).__name__)
    assert kinds == ["NotReadyError"] * 3 + ["BridgeError"]
