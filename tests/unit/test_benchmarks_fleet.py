"""The simulation of fleets: figures that arithmetic gives, and faults that lose no request."""

from dataclasses import replace

import pytest

from benchmarks.fleet.acceptance import judged_rows
from benchmarks.fleet.day import DayPlan, run_day
from benchmarks.fleet.simulation import Plan, Simulation

PLAN = Plan(servers=8, service_seconds=0.01, proxy_seconds=1e-4, seconds=2.0)


def test_one_client_waits_for_the_proxy_and_the_server_only():
    said = Simulation(replace(PLAN, clients=1, variation=0.01)).run()
    assert said.percentile(0.5) == pytest.approx(0.0101, rel=0.02)


def test_busy_servers_answer_as_much_as_they_can():
    said = Simulation(replace(PLAN, clients=64)).run()
    assert said.rate(0.5, 2.0) == pytest.approx(800, rel=0.05)
    # Little's law.
    assert said.percentile(0.5) == pytest.approx(64 / 800, rel=0.1)


def test_a_proxy_with_too_few_threads_is_the_limit():
    said = Simulation(replace(PLAN, clients=64, threads=1, proxy_seconds=0.01)).run()
    assert said.rate(0.5, 2.0) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("fault", ["servers", "cell", "update"])
def test_every_request_is_answered_or_under_way_after_a_fault(fault):
    plan = replace(PLAN, cells=2, rate=200.0, seconds=4.0, detect_seconds=0.2, retry_seconds=0.2)
    simulation = Simulation(plan)
    if fault == "servers":
        simulation.lose(1.0, 0, range(2))
    elif fault == "cell":
        simulation.lose_cell(1.0, 0)
    else:
        for index in range(4):
            simulation.replace(1.0 + index * 0.5, 0, index, 0.4)
    said = simulation.run()
    assert (said.retried > 0) is (fault != "update")
    assert said.unanswered < 20
    assert said.rate(2.5, 4.0) == pytest.approx(200, rel=0.15)


def test_a_day_has_the_servers_that_its_load_needs():
    plan = DayPlan(peak=3000.0, capacity=300.0, least=2, most=32)
    day = run_day(plan)
    assert min(day.servers) < 5
    assert 10 <= max(day.servers) <= 16
    assert max(day.wait) < 1.0
    held = run_day(replace(plan, most=8))
    assert max(held.servers) == 8
    assert max(held.wait) > 60


def test_a_row_says_whether_the_middle_round_keeps_its_bound():
    loads = ("HTTP 1", "HTTP 16", "gRPC 16", "gRPC 64", "gRPC 600 KB 4")
    rounds = []
    for rate in (500.0, 900.0, 1000.0):
        proxied = {"rate": rate, "p50_us": 200.0, "server_us": 15.0}
        direct = {"rate": 1000.0, "p50_us": 150.0, "server_us": 10.0}
        slow = {"rate": 50.0}
        rounds.append(
            {f"proxy, {load}": proxied for load in loads}
            | {f"direct, {load}": direct for load in loads}
            | {
                f"{serve}, {load}": slow
                for serve in ("Serve", "Serve, HAProxy mode")
                for load in loads
            }
        )
    rows = {row["row"]: row for row in judged_rows(rounds)}
    assert rows["proxy / direct, HTTP 16"] == {
        "row": "proxy / direct, HTTP 16",
        "bound": "≥ 0.8",
        "seen": "0.9",
        "rounds": "0.5 to 1",
        "holds": "yes",
    }
    assert rows["proxy p50 minus direct, HTTP 1, µs"]["seen"] == "50"
    assert rows["proxy / plain Ray Serve, HTTP 16"]["holds"] == "**no**"
    assert rows["server's CPU time, proxy / direct, gRPC 16"]["holds"] == "**no**"
