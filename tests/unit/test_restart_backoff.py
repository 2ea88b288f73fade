"""How long instances wait before they start their stubs again."""

from __future__ import annotations

from itertools import accumulate, repeat

from gpubridge.engine.stub_process import RestartBackoff


def test_waits_double_up_to_the_limit() -> None:
    rule = RestartBackoff(0.5)
    waits = list(accumulate(repeat(0.0, 6), lambda wait, _: rule.after(wait)))
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_limit_below_the_first_wait_holds() -> None:
    assert RestartBackoff(0.01).after(0.0) == 0.01


def test_who_ran_for_long_is_healthy() -> None:
    assert RestartBackoff(30.0).was_healthy(11.0)
    assert not RestartBackoff(30.0).was_healthy(9.0)
