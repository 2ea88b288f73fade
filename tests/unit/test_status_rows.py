"""Rows of the status document, which are kept until something in them changes."""

from types import SimpleNamespace

import pytest

from gpubridge.frontend.status.rows import row_key
from gpubridge.telemetry.statistics import ModelStatistics

CHANGES = {
    "a request that begins": lambda model: setattr(model, "pending", 1),
    "a model that is not ready": lambda model: setattr(model, "ready", False),
    "an execution": lambda model: model.statistics.executed(1, 1, (1, 1, 1), (1, 1, 1)),
    "a failure": lambda model: model.statistics.failed("OTHER", 1),
    "a copy": lambda model: model.statistics.copied(1),
    "a slower path of the server's": lambda model: model.statistics.fallbacks.update(["x"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_row_is_made_anew_with_each_change(change):
    model = SimpleNamespace(statistics=ModelStatistics("m", 1), ready=True, pending=0, instances=[])
    key = row_key(model, {})
    assert row_key(model, {}) == key
    change(model)
    assert row_key(model, {}) != key
