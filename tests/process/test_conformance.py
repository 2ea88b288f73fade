"""A running server against recorded answers of Triton 2.51: what differs has a reason, or is a fault."""

import json
import re
from pathlib import Path

import pytest

from tests.conformance import deliberate
from tests.conformance.http_cases import CASES
from tests.conformance.http_record import differences, steady
from tests.conformance.load_cases import BROKEN
from tests.conformance.load_outcomes import LOADS, OTHERWISE, outcomes_of_peer
from tests.conformance.load_probe import REQUEST, write_repository
from tests.conformance.run import collect
from tests.process.server import running_server, wait_until

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "conformance"
PEER = json.loads((HERE / "peer_http.json").read_text(encoding="utf-8"))
PEER_LOAD = json.loads((HERE / "peer_load.json").read_text(encoding="utf-8"))["models"]
STATUSES = {100, 200, 400, 404, 405, 413, 431, 500, 501}


def loaded(server) -> bool:
    """Return whether no model is still being loaded."""
    return "] ready" in server.log()


@pytest.fixture(scope="module")
def asked():
    """Every case asked once; the answers, and what the log said after the loading."""
    flags = "--exit-on-error=false", "--allow-client-shm=true"
    with running_server(HERE / "repository", *flags, ready=False) as server:
        wait_until(lambda: loaded(server), "the models to be loaded", server)
        before, stubs = len(server.log()), server.stubs()
        answers = collect(f"http://{server.http_url}", list(CASES))
        return answers, server.log()[before:], (stubs, server.stubs())


def found_in(answers) -> dict[str, dict]:
    found = {case.name: differences(case, answers[case.name], PEER[case.name]) for case in CASES}
    return {name: differing for name, differing in found.items() if differing}


def test_answers_are_those_of_triton_or_differ_with_a_reason(asked):
    explained = {case.name for case in CASES if case.differs}
    found = found_in(asked[0])
    assert {name: found[name] for name in found if name not in explained} == {}


def test_no_reason_outlives_its_difference(asked):
    found = found_in(asked[0])
    firm = [case for case in CASES if case.differs and not case.differs.chance]
    assert [case.name for case in firm if case.name not in found] == []


def test_a_differing_case_still_gets_a_response(asked):
    for case in CASES:
        if case.differs:
            answers = asked[0][case.name]["responses"]
            assert answers, case.name
            assert {answer["status"] for answer in answers} <= STATUSES, case.name


def test_no_request_harms_the_server_or_a_model(asked):
    _, log, (before, after) = asked
    assert before == after
    # What a model raises is logged, as at Triton: that is no harm.
    told = "Failed to process the request(s)", 'model="misbehaving" version="1" client='
    lines = [line for line in log.splitlines() if not any(text in line for text in told)]
    assert [line for line in lines if line.startswith("E") or "Traceback" in line] == []


def outcome_fault(server_rows, name, repository) -> str | None:
    """Return the fault in the repository index's rows of a model, or None."""
    rows = [
        (row["state"], steady(row.get("reason", "")).replace(str(repository), "<repository>"))
        for (model, _), row in sorted(server_rows.items())
        if model == name
    ]
    if name not in OTHERWISE:
        expected = outcomes_of_peer(PEER_LOAD[name])
        fits = len(rows) == len(expected) and all(
            state == wanted and reason.startswith(text)
            for (state, reason), (wanted, text) in zip(rows, expected, strict=True)
        )
        return None if fits else f"expected {expected}, got {rows}"
    _, pattern = OTHERWISE[name]
    state, reason = rows[0]
    if pattern == LOADS:
        fits = state == "READY"
    else:
        fits = state == "UNAVAILABLE" and re.match(pattern, reason) is not None
    return None if fits else f"expected {pattern or 'READY'}, got {rows}"


def answers_of_models_that_die(server):
    """Status and text of one request to each model that the peer was asked one."""
    for model in BROKEN:
        if model.gets_request:
            status, _, body = server.request("POST", f"/v2/models/{model.name}/infer", REQUEST)
            yield model.name, status, steady(body.decode())


def test_models_that_do_not_load_tell_why_and_disturb_no_other(tmp_path):
    repository = tmp_path / "models"
    write_repository(repository, list(BROKEN))
    with running_server(repository, "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: loaded(server), "the models to be loaded", server)
        index = server.index()
        faults = {model.name: outcome_fault(index, model.name, repository) for model in BROKEN}
        assert {name: fault for name, fault in faults.items() if fault} == {}
        for name, status, text in answers_of_models_that_die(server):
            recorded = PEER_LOAD[name]["infer"]
            assert text.startswith(recorded["text"].removesuffix('"}')), name
            assert status == (503 if "is not healthy" in text else recorded["status"]), name
        assert server.is_ready("good")
        for name in ("execute_dies", "execute_segfaults", "execute_exits"):
            wait_until(lambda name=name: server.is_ready(name), f"{name} to be ready again", server)
        assert server.request("POST", "/v2/models/good/infer", REQUEST)[0] == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def test_every_difference_is_met_by_a_case_or_is_a_rule():
    met = {case.differs for case in CASES} | {difference for difference, _ in OTHERWISE.values()}
    met |= {*deliberate.RULES, deliberate.REASON, deliberate.DEATH}
    documented = {v for v in vars(deliberate).values() if isinstance(v, deliberate.Difference)}
    assert met - {None} == documented
    assert set(OTHERWISE) <= {model.name for model in BROKEN}


def test_the_document_lists_every_difference():
    assert (ROOT / "docs" / "reference" / "differences.md").read_text() == deliberate.document()
