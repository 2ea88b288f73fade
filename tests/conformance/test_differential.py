"""The comparison with Triton itself: cases are the same for a seed, and a planted difference is reported."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.conformance import differential
from tests.conformance.differential import Difference, Findings
from tests.conformance.differential_rows import NO_ANSWER, ROWS, row_of
from tests.conformance.random_configs import random_configuration
from tests.conformance.random_requests import FAULTS, TYPES, random_request

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "differences.md"
SEEDS = range(3000)


def test_a_run_that_is_ended_says_what_it_has_found(monkeypatch, capsys):
    def ask(sides, seeds, findings):
        findings.asked = 7
        raise SystemExit(143)

    monkeypatch.setattr(differential, "both", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr(differential, "ask_requests", ask)
    monkeypatch.setattr(differential.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        differential.main(["--peer", "nowhere"])
    assert "7 cases: 0 differ as documented" in capsys.readouterr().out


def test_a_server_that_is_silent_or_gone_is_started_again_without_the_model(monkeypatch, tmp_path):
    class Fake:
        def __init__(self, told):
            self.told, self.left = told, []

        def restart(self):
            self.left.append(list(tmp_path.iterdir()))

    sides = Fake("silent"), Fake("200"), Fake("died")
    monkeypatch.setattr(differential, "_load_outcome", lambda side, *_: side.told)
    for pair in (sides[:2], sides[1:]):
        findings = Findings()
        differential.load_configurations(pair, tmp_path, [3, 3, 4], findings)
        assert findings.asked == 3
    # Equal configurations are compared once.
    assert [side.left for side in sides] == [[[], []], [], [[], []]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.situation)
def test_each_allowed_difference_is_a_row_of_the_document(row):
    assert f"\n| {row.situation}" in DOCUMENT.read_text()


def test_requests_are_those_of_their_seed_and_cover_types_faults_and_endpoints():
    asked = [random_request(seed) for seed in SEEDS]
    assert asked == [random_request(seed) for seed in SEEDS]
    assert set(FAULTS) <= {each.fault for each in asked}
    kinds = Counter(each.kind for each in asked)
    assert {"infer", "grpc infer", "stream", "generate", "raw", "unload", "index"} <= set(kinds)
    bodies = b" ".join(each.http[2] for each in asked if each.http is not None)
    assert all(f"IN_{name}".encode() in bodies for name in TYPES)


def test_configurations_are_those_of_their_seed():
    made = [random_configuration(seed) for seed in SEEDS]
    assert made == [random_configuration(seed) for seed in SEEDS]
    assert any(each.sent is None for each in made)
    assert len({each.kind for each in made}) > 80


def test_a_difference_is_reported_once_for_its_class_and_a_documented_one_only_counted():
    findings = Findings()
    for seed in (7, 8):
        findings.add(Difference(seed, "infer", "no inputs", "400 an error", "200 {}"))
    documented = Difference(9, "unload", "odd {}", "200", "400 an error")
    findings.add(documented)
    text = findings.report()
    assert "DIFFERS: infer, no inputs: 2 times, first with seed 7" in text
    assert "1 classes differ without a row" in text
    assert sum(findings.explained.values()) == 1
    assert row_of("infer", "", "died", "200") == NO_ANSWER
    assert row_of("infer", "", "200 {}", "died") is None
