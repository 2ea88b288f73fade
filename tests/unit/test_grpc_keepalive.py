"""gRPC's PINGs as pure rules: when a client is asked for a sign of life, and when it asks too often."""

import pytest

from gpubridge.config import GrpcConnections
from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc.connection_timeouts import Keepalive, TimeoutAction


def keepalive(**limits):
    return Keepalive(GrpcConnections(**limits), 0.0)


def pulses(rules, times, *, heard=False, calls=1, sent=0):
    """The times at which something was to be done, and what."""
    found = [(time, rules.check(time, heard=heard, calls=calls, sent=sent)) for time in times]
    return [(time, pulse) for time, pulse in found if pulse is not None]


def test_a_silent_client_is_pinged_and_then_dead():
    rules = keepalive(keepalive_time=10_000, keepalive_timeout=3_000)
    assert pulses(rules, range(14)) == [(10, TimeoutAction.PING), (13, TimeoutAction.END)]


def test_one_that_is_heard_is_not():
    rules = keepalive(keepalive_time=10_000, keepalive_timeout=3_000)
    assert pulses(rules, range(100), heard=True) == []
    assert pulses(rules, (109, 110)) == [(109, TimeoutAction.PING)]
    assert pulses(rules, (111,), heard=True) == []
    assert pulses(rules, (112, 120, 121)) == [(121, TimeoutAction.PING)]


def test_one_without_calls_is_pinged_only_where_permitted():
    limits = {"keepalive_time": 10_000}
    assert pulses(keepalive(**limits), range(50), calls=0) == []
    limits["keepalive_permit_without_calls"] = True
    assert pulses(keepalive(**limits), range(30), calls=0) == [(10, TimeoutAction.PING)]


def test_pings_without_data_have_an_end():
    rules = keepalive(keepalive_time=1_000, http2_max_pings_without_data=2)
    found = []
    for time in range(20):
        # Every ping is answered.
        found += pulses(rules, (time,), heard=any(at == time - 1 for at, _ in found))
    assert len(found) == 2
    assert pulses(rules, (30,), sent=1) == [(30, TimeoutAction.PING)]


@pytest.mark.parametrize("limits", [{"keepalive_time": 0}, {"keepalive_time": 10**9}])
def test_without_a_time_nothing_is_sent(limits):
    assert pulses(keepalive(**limits), range(0, 10_000, 100)) == []


def test_zero_pings_without_data_is_any_number():
    rules = keepalive(keepalive_time=1_000, http2_max_pings_without_data=0)
    found = pulses(rules, range(1, 21), heard=False)
    assert found[0] == (1, TimeoutAction.PING)
    for time in range(30, 60, 2):
        assert pulses(rules, (time,), heard=True) == []
        assert pulses(rules, (time + 1,)) == [(time + 1, TimeoutAction.PING)]


def strikes(rules, times, *, calls=1, sent=0):
    return [rules.ping_received(time, calls=calls, sent=sent) for time in times]


def test_the_third_ping_too_early_is_too_many():
    # The first comes at a time of its own.
    assert strikes(keepalive(), (1, 2, 3, 4)) == [False, False, False, True]


def test_pings_that_are_far_enough_apart_are_welcome():
    assert not any(strikes(keepalive(), range(0, 10_000, 300)))
    limits = {"http2_min_recv_ping_interval_without_data": 5_000}
    assert not any(strikes(keepalive(**limits), range(0, 1000, 5)))
    assert strikes(keepalive(**limits), (0, 4, 8, 12))[-1]


def test_without_calls_they_must_be_further_apart():
    assert strikes(keepalive(), (0, 300, 600, 900), calls=0)[-1]
    assert not any(strikes(keepalive(), range(0, 72_001, 7200), calls=0))
    limits = {"keepalive_permit_without_calls": True}
    assert not any(strikes(keepalive(**limits), (0, 300, 600, 900), calls=0))


def test_sent_data_resets_the_count_of_pings():
    rules = keepalive()
    for sent in range(10):
        # A client measures its bandwidth with pings while data comes.
        assert not any(strikes(rules, (sent, sent + 0.1, sent + 0.2), sent=sent))


def test_zero_strikes_is_any_number():
    assert not any(strikes(keepalive(http2_max_ping_strikes=0), range(100)))


def test_wrong_limits_are_refused():
    with pytest.raises(BridgeError, match="--grpc-keepalive-time expects an integer of at least 0"):
        GrpcConnections(keepalive_time=-1)
    with pytest.raises(BridgeError, match="compression-level expects one of none, low, medium"):
        GrpcConnections(infer_response_compression_level="best")
