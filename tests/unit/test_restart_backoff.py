"""Back-off of instances before they restart their stubs."""

from itertools import accumulate, repeat

from gpubridge.engine.supervisor.stub_process import next_backoff, was_healthy


def test_waits_double_up_to_the_limit():
    waits = list(accumulate(repeat(0.0, 6), lambda wait, _: next_backoff(wait, 0.5)))
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_limit_below_the_first_wait_holds():
    assert next_backoff(0.0, 0.01) == 0.01


def test_a_stub_that_ran_for_long_is_healthy():
    assert was_healthy(11.0, answered=False)
    assert not was_healthy(9.0, answered=False)
    assert was_healthy(0.1, answered=True)
