"""Rows of the status document, which are kept until something in them changes."""

from types import SimpleNamespace

import pytest

from gpubridge.engine.repository.model_index import VersionStatus
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.frontend.status.rows import condition, row_key
from gpubridge.telemetry.statistics import ModelStatistics

CHANGES = {
    "a request that begins": lambda model: setattr(model, "pending", 1),
    "a model that is not ready": lambda model: setattr(model, "ready", False),
    "a process that does not run": lambda model: setattr(model, "whole", False),
    "an answer that is passed on": lambda model: model.statistics.passed_on("", 1, 1, 0, 1),
    "an execution": lambda model: model.statistics.executed(1, 1, (1, 1, 1), (1, 1, 1)),
    "a failure": lambda model: model.statistics.failed("OTHER", 1),
    "a copy": lambda model: model.statistics.copied(1),
    "a slower path of the server's": lambda model: model.statistics.fallbacks.update(["x"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_row_is_made_anew_with_each_change(change):
    model = SimpleNamespace(
        statistics=ModelStatistics("m", 1),
        ready=True,
        whole=True,
        members=(),
        pending=0,
        instances=[],
    )
    key = row_key(model, {})
    assert row_key(model, {}) == key
    change(model)
    assert row_key(model, {}) != key


def model_of(*states, members=()):
    """Return a model with instances in these states, or an ensemble of ``members``."""
    states = [InstanceState(state) for state in states]
    return SimpleNamespace(
        ready=InstanceState.READY in states or (bool(members) and all(m.ready for m in members)),
        whole=set(states) <= {InstanceState.READY} and all(m.whole for m in members),
        instances=[SimpleNamespace(state=state) for state in states],
        members=members,
    )


READY, FAILED, RESTARTING = (model_of(state) for state in ("ready", "failed", "restarting"))
CONDITIONS = [
    ("", "", None, "unloaded"),
    ("LOADING", "", None, "loading"),
    ("UNLOADING", "", READY, "unloading"),
    ("UNAVAILABLE", "unloaded", None, "unloaded"),
    ("UNAVAILABLE", "no such file", None, "failed"),
    ("READY", "", READY, "ready"),
    ("READY", "", model_of("ready", "failed"), "degraded"),
    ("READY", "", model_of("failed", "restarting"), "restarting"),
    ("READY", "", model_of("failed", "failed"), "failed"),
    ("READY", "", model_of(members=[READY, READY]), "ready"),
    ("READY", "", model_of(members=[READY, model_of("ready", "failed")]), "degraded"),
    ("READY", "", model_of(members=[RESTARTING, model_of(members=[FAILED])]), "failed"),
    ("READY", "", model_of(members=[READY, RESTARTING]), "restarting"),
]


@pytest.mark.parametrize(("state", "reason", "model", "word"), CONDITIONS)
def test_a_condition_has_one_word(state, reason, model, word):
    assert condition(VersionStatus("m", 1, state, reason), model) == word
