"""``python -m benchmarks.fleet``: fleets of 8 to 1,000 GPUs, simulated.

``--measure`` has also local fleets, ``--acceptance`` a server behind the proxy, without it, and plain Ray
Serve. Writes ``fleet.md``, ``fleet.json`` and ``fleet.svg``; what was measured stays until it is measured
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fleet.acceptance import accept
from benchmarks.fleet.day import Day, DayPlan, run_day
from benchmarks.fleet.measure import measure
from benchmarks.fleet.simulation import Plan, Simulation
from benchmarks.machine import commit, describe_machine, started_now

SIZES = (8, 64, 256, 512, 1000)
CELL = 256
IMAGES_PER_GPU = 300
"""Images a second of a GPU, 600 KB each."""
_IMAGE_SECONDS, _IMAGE_PROXY_SECONDS = 2.8e-3, 350e-6
_SMALL_PROXY_SECONDS = 40e-6
_CHECKS = 2
"""Health checks a second of each proxy at each server."""


def plan_of(servers: int) -> Plan:
    """Return the plan of a fleet of images: cells of at most 256, a proxy for each 16 GPUs."""
    cells = -(-servers // CELL)
    return Plan(
        servers=servers,
        cells=cells,
        proxies=max(-(-servers // cells // 16), 2),
        threads=4,
        rate=servers * IMAGES_PER_GPU * 0.8,
        seconds=1.0 if servers > 100 else 3.0,
        service_seconds=_IMAGE_SECONDS,
        proxy_seconds=_IMAGE_PROXY_SECONDS,
    )


def size_rows() -> list[dict[str, Any]]:
    """Return a row for each size of a fleet at 80 % of its GPUs' capacity."""
    rows = []
    for servers in SIZES:
        plan = plan_of(servers)
        said = Simulation(plan).run()
        rows.append(
            {
                "GPUs": servers,
                "cells": plan.cells,
                "proxies": plan.proxies * plan.cells,
                "requests/s": round(said.rate(0.2, plan.seconds)),
                "p50 ms": round(1e3 * said.percentile(0.5), 1),
                "p99 ms": round(1e3 * said.percentile(0.99), 1),
                "proxy cores, images": round(plan.rate * plan.proxy_seconds, 1),
                "proxy cores, 1,000 small/s a GPU": round(servers * 1000 * _SMALL_PROXY_SECONDS, 1),
                "checks/s a server": plan.proxies * _CHECKS,
            }
        )
    return rows


def fault_rows(servers: int = 512) -> list[dict[str, Any]]:
    """Return a row for each fault of a fleet of two cells at half its capacity."""
    plan = replace(plan_of(servers), rate=servers * IMAGES_PER_GPU * 0.45, seconds=4.0)
    runs = {name: Simulation(plan) for name in ("none", "a node of 8", "a cell", "rolling update")}
    runs["a node of 8"].lose(1.0, 0, range(8))
    runs["a cell"].lose_cell(1.0, 0)
    per_cell = servers // plan.cells
    for index in range(per_cell):
        # A quarter at a time, half a second each in the place of a minute.
        runs["rolling update"].replace(1.0 + 0.5 * (index * 4 // per_cell), 0, index, 0.5)
    rows = []
    for name, simulation in runs.items():
        said = simulation.run()
        rows.append(
            {
                "fault": name,
                "answered": len(said.answered),
                "sent again": said.retried,
                "p50 ms": round(1e3 * said.percentile(0.5), 1),
                "p99 ms": round(1e3 * said.percentile(0.99), 1),
                "p99.9 ms": round(1e3 * said.percentile(0.999), 1),
                "requests/s after it": round(said.rate(3.0, plan.seconds)),
            }
        )
    return rows


def day_plans() -> dict[str, DayPlan]:
    """Return the day of a cell whose servers start within a minute, and within five."""
    plan = DayPlan(peak=50_000.0, capacity=float(IMAGES_PER_GPU), least=8, most=CELL)
    return {"a minute": plan, "five minutes": replace(plan, start_seconds=300)}


def day_rows(days: dict[str, Day]) -> list[dict[str, Any]]:
    """Return a row for each day of autoscaling."""
    plans = day_plans()
    return [
        {
            "start of a server": name,
            "fewest": min(day.servers),
            "most": max(day.servers),
            "GPU hours": round(day.server_hours),
            "GPU hours without autoscaling": max(day.servers) * 24,
            "longest wait ms": round(1e3 * max(day.wait)),
            "needed at the peak": round(plans[name].peak / plans[name].capacity),
        }
        for name, day in days.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown."""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("---:" for _ in names)]
    lines += [
        " | ".join(
            f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in names
        )
        for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def plot(path: Path, sizes: Sequence[dict[str, Any]], days: dict[str, Day]) -> None:
    """Draw the sizes and a day."""
    import matplotlib as mpl  # noqa: PLC0415  (only here)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fleet"
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    gpus = [row["GPUs"] for row in sizes]
    left.plot(gpus, [row["p50 ms"] for row in sizes], "o-", label="p50")
    left.plot(gpus, [row["p99 ms"] for row in sizes], "o-", label="p99")
    left.set(xscale="log", xlabel="GPUs", ylabel="ms", ylim=(0, None))
    left.legend()
    day = days["a minute"]
    hours = [minute / 60 for minute in range(len(day.load))]
    right.plot(hours, [load / IMAGES_PER_GPU for load in day.load], label="load, in GPUs")
    right.plot(hours, day.servers, label="GPUs")
    right.set(xlabel="hour", ylim=(0, None))
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Simulate, measure if asked to, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="also fleets on this machine")
    parser.add_argument("--acceptance", action="store_true", help="also the proxy beside Ray Serve")
    parser.add_argument("--rounds", type=int, default=3, help="of --acceptance")
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    default = Path(__file__).parents[1] / "results"
    parser.add_argument("--output", type=Path, default=default, help="folder of the results")
    options = parser.parse_args()
    path = options.output / "fleet.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name, wanted in (("measured", options.measure), ("acceptance", options.acceptance)):
        if wanted:
            about = {"commit": commit(), "started": started_now(), "machine": describe_machine()}
            if name == "measured":
                found: dict[str, Any] = {"rows": measure(options.seconds)}
            else:
                found = accept(options.rounds, options.seconds)
            kept[name] = {**about, **found}
            path.write_text(json.dumps(kept, indent=1) + "\n")
    days = {name: run_day(plan) for name, plan in day_plans().items()}
    sizes = size_rows()
    parts = ["# Fleets, simulated\n", _INTRODUCTION, "## Sizes\n", table(sizes)]
    parts += [
        "## Faults of 512 GPUs in two cells, at 45 % of their capacity\n",
        table(fault_rows()),
    ]
    parts += ["## A day of a cell with autoscaling\n", table(day_rows(days)), "![](fleet.svg)\n"]
    parts += ["## Local fleets beside the simulation\n"]
    parts += _measured(kept.get("measured")) + _accepted(kept.get("acceptance"))
    (options.output / "fleet.md").write_text("\n".join(parts))
    plot(options.output / "fleet.svg", sizes, days)


_INTRODUCTION = """`python -m benchmarks.fleet` writes this page. Simulated are servers of one GPU that take 2.8 ms for an
image of 600 KB (coefficient of variation 0.2), proxies whose threads take 350 µs for it, cells of at
most 256 GPUs, and proxies that know their own requests only. Requests arrive at random at 80 % of what the GPUs can do.
No GPU was measured: the times are assumptions, those of proxies are from measurements of one.
"""


def _measured(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["Not measured yet: `--measure`.\n"]
    return [_about(found), table(_rounded(found["rows"]))]


def _accepted(found: Mapping[str, Any] | None) -> list[str]:
    heading = "## A server behind the proxy, without it, and plain Ray Serve\n"
    if found is None:
        return [heading, "Not measured yet: `--acceptance`.\n"]
    how = (
        f"`add_sub` (gRPC 600 KB: an identity) with one replica, {found['rounds']} rounds of "
        f"{found['seconds']} s a load; the load client shares the cores. Plain Ray Serve adds the "
        "request's bytes and knows nothing of the protocol; its settings are its own.\n"
    )
    return [heading, _about(found), how, table(found["rows"]), table(found["figures"])]


def _about(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load average at the start "
        f"{machine['load_average']}, commit {found['commit']}, {found['started']}.\n"
    )


def _rounded(rows: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "replicas": int(row["replicas"]),
            "start to ready s": round(row["start"], 1),
            "requests/s": round(row["rate"]),
            "predicted": round(row["predicted rate"]),
            "p50 ms": round(1e3 * row["p50"], 1),
            "predicted p50 ms": round(1e3 * row["predicted p50"], 1),
        }
        for row in rows
    ]


if __name__ == "__main__":
    main()
