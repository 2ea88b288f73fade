"""Every figure that a server tells of a known load: the metrics, the statistics and the status document.

The tables below say what each figure is by its help text alone. A figure without an entry fails the tests.
"""

import json
import math
import re
import time

import pytest
import tritonclient.grpc as triton

from gpubridge.telemetry.metrics import MODEL_STATES
from gpubridge.telemetry.own_metrics import OWN_FAMILIES
from tests.plane import ROOT
from tests.process.flag_sets import METRICS
from tests.process.known_load import KNOWN, KnownLoad, write
from tests.process.server import running_server, send_request, wait_until

KEY = {"X-Secret": "w"}
STEPS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
PARTS = ("queue_us", "input_us", "execute_us", "output_us", "cache_us", "answer_us")
REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
SECONDS = "gpubridge_request_duration_seconds"
FIRST = "nv_inference_first_response_histogram_ms"
ROUNDED = len(PARTS)
"""Sums of microseconds may differ by so many: each is rounded."""
MEASURED = object()
"""A figure that is no number to know: `check_durations` says what holds of it."""
CPU = {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"}
ELSEWHERE = re.compile(
    r"nv_gpu_|nv_energy_|gpubridge_device_|gpubridge_fallbacks_total|gpubridge_(http|grpc|access_log)_"
    r"|nv_inference_load_ratio|nv_pinned_memory_pool_"
)
"""Families of GPUs, slower paths and endpoints, not of this load's models; and those that are Triton's alone."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    gates = write(folder / "models", folder / "gates")
    with running_server(folder / "models", *METRICS) as running:
        load = KnownLoad(running, gates)
        try:
            load.send()
            # Clients have their answers a moment before these are counted.
            wait_until(lambda: are_counted(running), "all requests to be counted", running)
            yield running
        finally:
            load.close()


def are_counted(server):
    found = server.metrics()
    return [found.get(f'{SECONDS}_count{{model="{name}",version="1"}}', 0) for name in KNOWN] == [
        known.success for known in KNOWN.values()
    ]


@pytest.fixture(scope="module")
def page(server):
    """Samples of each model by their names with the other labels; those of the machine at ""."""
    text = send_request(server.metrics_url, "GET", "/metrics", None, KEY)[2].decode()
    helped = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    samples = {}
    for name, labels, value in re.findall(r"^([a-z]\w+)(?:{(.*)})? (\S+)$", text, re.MULTILINE):
        family = name if name in helped else re.sub(r"_(bucket|sum|count)$", "", name)
        assert helped.get(family), f"{name} has no help text"
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        model = found.pop("model", "")
        assert found.pop("version", "") == ("1" if model else "")
        key = name + "".join(f" {label}={text}" for label, text in found.items())
        samples.setdefault(model, {})[key] = float(value)
    return samples


@pytest.fixture(scope="module")
def statistics(server):
    body = server.request("GET", "/v2/models/stats", None, KEY)[2]
    return {model["name"]: model for model in json.loads(body)["model_stats"]}


@pytest.fixture(scope="module")
def status(server):
    def read():
        return json.loads(
            send_request(server.metrics_url, "GET", "/v2/gpubridge/status", None, KEY)[2]
        )

    first = found = read()

    def is_later():
        nonlocal found
        found = read()
        return found["number"] > first["number"]

    wait_until(is_later, "a document of after the load", server)
    return found


def cumulative(bounds, rows):
    """Return the buckets of rows of values and counts."""
    return {f"le={bound:g}": sum(n for value, n in rows if value <= bound) for bound in bounds}


def metrics_of(known):
    """Return the samples of a model."""
    executed, executions = known.executed, sum(known.sizes.values())
    first = known.success if known.first is None else known.first
    ends = ["le=+Inf", "le=100", "le=500", "le=2000", "le=5000"]
    made = {
        "nv_inference_request_success": known.success,
        **{
            f"nv_inference_request_failure reason={reason}": known.failures.get(reason, 0)
            for reason in REASONS
        },
        "nv_inference_count": inferences(known),
        "nv_inference_exec_count": executions,
        **{f"nv_inference_{step}_duration_us": MEASURED for step in STEPS},
        "nv_inference_pending_request_count": 0,
        **{f"gpubridge_model_state state={state}": state == "ready" for state in MODEL_STATES},
        **{f"{FIRST}_bucket {end}": MEASURED for end in ends},
        f"{FIRST}_count": first,
        f"{FIRST}_sum": MEASURED,
        "gpubridge_open_requests": 0,
        "gpubridge_queued_requests": 0,
        "gpubridge_answer_duration_us_total": MEASURED,
        "gpubridge_copied_bytes_total kind=host": MEASURED,
        "gpubridge_copies_total kind=host": MEASURED,
        "gpubridge_stub_restarts_total": known.restarts,
    }
    for step in STEPS:
        counted = known.success if step in STEPS[:2] else executed
        made[f"nv_inference_{step}_summary_us_count"] = counted
        for rest in ("_sum", " quantile=0.5", " quantile=1"):
            made[f"nv_inference_{step}_summary_us{rest}"] = MEASURED
    if known.misses:
        made |= {
            "nv_cache_num_hits_per_model": known.hits,
            "nv_cache_num_misses_per_model": known.misses,
            "nv_cache_hit_duration_per_model": MEASURED,
            "nv_cache_miss_duration_per_model": MEASURED,
        }
    if known.success:
        bounds = [step * 10**power for power in range(-6, 2) for step in (10, 25, 50)][3:]
        bounds = [f"le={bound:g}" for bound in bounds if 1e-4 <= bound <= 10]
        made |= {f"{SECONDS}_bucket {bound}": MEASURED for bound in [*bounds, "le=+Inf"]}
        made |= {f"{SECONDS}_count": known.success, f"{SECONDS}_sum": MEASURED}
    if executions:
        sizes = cumulative([*(1 << power for power in range(9)), math.inf], known.sizes.items())
        name = "gpubridge_batch_size"
        made |= {f"{name}_bucket {le.replace('inf', '+Inf')}": n for le, n in sizes.items()}
        summed = sum(size * n for size, n in known.sizes.items())
        made |= {f"{name}_count": executions, f"{name}_sum": summed}
    return made


def inferences(known):
    return known.executed if known.inferences is None else known.inferences


def known_part(found, known):
    """Return what is found, without values that are measured."""
    measured = {key for key, value in known.items() if value is MEASURED}
    return {key: MEASURED if key in measured else value for key, value in found.items()}


@pytest.mark.parametrize("name", KNOWN)
def test_the_metrics_of_a_model(page, name):
    known = metrics_of(KNOWN[name])
    assert known_part(page[name], known) == known
    check_durations(page[name], KNOWN[name])


def check_durations(found, known):
    us = {step: found[f"nv_inference_{step}_duration_us"] for step in STEPS}
    parts = sum(us[step] for step in STEPS[1:])
    hits = found.get("nv_cache_hit_duration_per_model", 0)
    if known.steps:
        # Only requests to members take time.
        assert us["queue"] == us["compute_input"] == us["compute_output"] == 0
        assert known.beside or parts <= us["request"] + ROUNDED
    else:
        assert abs(us["request"] - hits - parts) <= ROUNDED
    assert (us["request"] > 0) == (known.success > 0)
    assert (us["compute_infer"] > 0) == (known.executed > 0)
    assert (hits > 0) == (known.hits > 0)
    assert (found.get("nv_cache_miss_duration_per_model", 0) > 0) == (known.misses > 0)
    answers = found["gpubridge_answer_duration_us_total"]
    assert (answers > 0) <= (known.success > 0)
    copied = found["gpubridge_copied_bytes_total kind=host"]
    assert (copied > 0) == (found["gpubridge_copies_total kind=host"] > 0)
    assert (copied > 0) <= (known.success + len(known.failures) > 0)
    for step in STEPS:
        family = f"nv_inference_{step}_summary_us"
        count, most = found[f"{family}_count"], found[f"{family} quantile=1"]
        assert found[f"{family}_sum"] == us[step]
        if count:
            assert found[f"{family} quantile=0.5"] <= most <= us[step] <= count * (most + 1)
        else:
            assert math.isnan(most)
    check_histogram(found, FIRST)
    assert found[f"{FIRST}_sum"] * 1000 <= us["request"] + answers + known.success * 100_000
    if known.success:
        check_histogram(found, SECONDS)
        assert found[f"{SECONDS}_sum"] * 1e6 == pytest.approx(us["request"] + answers, abs=ROUNDED)


def check_histogram(found, family):
    rows = [
        (float(key.rpartition("le=")[2]), value)
        for key, value in found.items()
        if key.startswith(f"{family}_bucket ")
    ]
    counts = [count for _, count in sorted(rows)]
    assert counts == sorted(counts)
    assert counts[-1] == found[f"{family}_count"]
    assert (found[f"{family}_sum"] > 0) == (counts[-1] > 0)


def test_every_family_is_in_a_table(page):
    assert page.keys() == {"", *KNOWN}
    machine = page[""]
    assert {name for name in machine if not ELSEWHERE.match(name)} == CPU
    assert 0 <= machine["nv_cpu_utilization"] <= 1
    assert 0 < machine["nv_cpu_memory_used_bytes"] <= machine["nv_cpu_memory_total_bytes"]
    samples = {key.partition(" ")[0] for found in page.values() for key in found}
    families = {re.sub(r"_(bucket|sum|count)$", "", each) for each in samples} | samples
    assert {name for name in OWN_FAMILIES if not ELSEWHERE.match(name)} <= families


def ns(count):
    return {"count": count, "ns": MEASURED}


@pytest.mark.parametrize("name", KNOWN)
def test_the_statistics_of_a_model(statistics, page, name):
    known, found, metrics = KNOWN[name], dict(statistics[name]), page[name]
    executed, failed = known.executed, sum(known.failures.values())
    counts = [known.success, failed, known.success, *[executed] * 3, known.hits, known.misses]
    names = ["success", "fail", *STEPS[1:], "cache_hit", "cache_miss"]
    batches = found.pop("batch_stats")
    durations = found.pop("inference_stats")
    last = found.pop("last_inference")
    assert found == {
        "name": name,
        "version": "1",
        "inference_count": inferences(known),
        "execution_count": sum(known.sizes.values()),
        "response_stats": {},
        "memory_usage": [],
    }
    assert {key: each["count"] for key, each in durations.items()} == dict(
        zip(names, counts, strict=True)
    )
    assert (last > 0) == bool(known.sizes)
    assert last <= time.time_ns() // 1_000_000
    for key, step in [("success", "request"), *((step, step) for step in STEPS[1:])]:
        assert durations[key]["ns"] // 1000 == metrics[f"nv_inference_{step}_duration_us"]
    assert (durations["fail"]["ns"] > 0) <= (failed > 0)
    for each in batches:
        steps = [each[step] for step in STEPS[2:]]
        assert each.keys() == {"batch_size", *STEPS[2:]}
        assert [step["count"] for step in steps] == [known.sizes[each["batch_size"]]] * 3
        assert (sum(step["ns"] for step in steps) > 0) or known.steps
    assert [each["batch_size"] for each in batches] == sorted(known.sizes)


def test_an_execution_counts_for_each_of_its_requests(statistics):
    """The two requests that made the batch of five spent its time both; the batch of two failed."""
    model = statistics["batched"]
    times = {1: 1, 2: 0, 3: 1, 5: 2, 8: 1}
    rows = {each["batch_size"]: each for each in model["batch_stats"]}
    for step in STEPS[2:]:
        summed = sum(times[size] * row[step]["ns"] for size, row in rows.items())
        assert model["inference_stats"][step]["ns"] == summed


def test_both_protocols_say_the_same(server, statistics):
    with triton.InferenceServerClient(server.grpc_url) as client:
        told = client.get_inference_statistics("plain", as_json=True)["model_stats"]
    (model,) = told
    assert int(model["execution_count"]) == statistics["plain"]["execution_count"]
    for key, each in model["inference_stats"].items():
        assert {n: int(v) for n, v in each.items()} == {
            n: v for n, v in statistics["plain"]["inference_stats"][key].items() if v
        }


def test_models_that_are_not_loaded_have_no_statistics(server, statistics):
    assert statistics.keys() == KNOWN.keys()
    for name in ("gone", "none"):
        code, _, body = server.request("GET", f"/v2/models/{name}/stats", None, KEY)
        text = f"requested model '{name}' is not available"
        assert (code, json.loads(body)) == (400, {"error": text})


MODEL_FIELDS = {
    "name", "version", "state", "reason", "condition", "ready", "backend", "max_batch_size", "scheduler", "decoupled",
    "pending", "queued", "statistics", "instances", "fallbacks", "calls", "errors", "slowest", "ensemble",
}  # fmt: skip
INSTANCE_FIELDS = {
    "name", "state", "device", "interpreter", "in_flight", "restarts", "ends", "pid", "python", "started",
    "executing_us", "memory", "device_memory_bytes",
}  # fmt: skip
SCHEDULERS = {
    **dict.fromkeys(("batched", "timed", "short", "cancelled"), "dynamic_batching"),
    **dict.fromkeys(("direct", "oldest", "iterative"), "sequence_batching"),
    **dict.fromkeys((name for name, known in KNOWN.items() if known.steps), "ensemble_scheduling"),
}


def row_of(status, name):
    (row,) = [row for row in status["models"] if row["name"] == name]
    return row


@pytest.mark.parametrize("name", KNOWN)
def test_the_status_of_a_model(server, status, page, name):
    known, row = KNOWN[name], row_of(status, name)
    assert row.keys() == MODEL_FIELDS
    assert (row["version"], row["state"], row["reason"], row["ready"]) == (1, "READY", "", True)
    assert row["condition"] == "ready"
    assert (row["pending"], row["queued"], row["fallbacks"]) == (0, 0, {})
    assert row["scheduler"] == SCHEDULERS.get(name, "")
    assert row["backend"] == ("ensemble" if known.steps else "python")
    assert row["decoupled"] == (name in ("decoupled", "threads", "streams", "iterative"))
    assert sum(each["requests"] for each in row["errors"]) == known.errors
    called = [(each["model"], each["version"], each["count"]) for each in row["calls"]]
    assert called == ([("called", 1, 5)] if name == "caller" else [])
    assert all(each["call_us"] > 0 for each in row["calls"])
    assert len(row["instances"]) == known.instances
    assert sum(each["restarts"] for each in row["instances"]) == known.restarts
    for each in row["instances"]:
        assert each.keys() == INSTANCE_FIELDS
        assert (each["state"], each["in_flight"]) == ("ready", 0)
        assert each["device"] is None or status["machine"]["gpus"]
        assert (each["executing_us"], each["device_memory_bytes"]) == (None, 0)
        assert each["pid"] in server.stubs()
        assert len(each["ends"]) == known.restarts
        assert status["server"]["started"] < each["started"] < status["time"]
    check_statistics(row["statistics"], known, status, page[name])
    check_slowest(row, status, known)
    check_graph(row["ensemble"], known)


def check_statistics(found, known, status, metrics):
    bounds = [*status["duration_bounds_us"], math.inf]
    exact = {
        "success": known.success,
        "failures": dict(known.failures),
        "cache_hits": known.hits,
        "cache_misses": known.misses,
        "inferences": inferences(known),
        "executions": sum(known.sizes.values()),
        "batch_sizes": sorted(map(list, known.sizes.items())),
        "device_waits": 0,
    }
    measured = {"since", "last_execution", "request_us", "durations", "copies", *PARTS}
    assert found.keys() == exact.keys() | measured
    assert {key: found[key] for key in exact} == exact
    assert status["server"]["started"] < found["since"] < status["time"]
    last = found["last_execution"]
    assert (found["since"] < last < status["time"]) if known.sizes else last == 0
    for step, part in zip(STEPS[1:], PARTS, strict=False):
        assert found[part] == metrics[f"nv_inference_{step}_duration_us"]
    assert found["answer_us"] == metrics["gpubridge_answer_duration_us_total"]
    assert found["cache_us"] == metrics.get("nv_cache_hit_duration_per_model", 0)
    total, parts = found["request_us"], sum(found[part] for part in PARTS)
    assert known.beside or parts <= total + ROUNDED
    assert known.steps or parts >= total - ROUNDED
    assert sum(count for _, count in found["durations"]) == known.success
    least = sum(bounds[index - 1] * count for index, count in found["durations"] if index)
    assert least - ROUNDED <= total <= sum(bounds[i] * n for i, n in found["durations"]) + ROUNDED
    assert found["copies"] == {
        "host": {
            "count": metrics["gpubridge_copies_total kind=host"],
            "bytes": metrics["gpubridge_copied_bytes_total kind=host"],
        }
    }


def check_slowest(row, status, known):
    rows, found = row["slowest"], row["statistics"]
    assert len(rows) == min(5, known.success - known.again)
    for each in rows:
        assert each.keys() == {"model", "version", "id", "time", "request_us", *PARTS}
        assert (each["model"], each["version"], each["id"]) == (row["name"], 1, "")
        assert found["since"] < each["time"] < status["time"]
        assert (
            row["ensemble"]
            or abs(sum(each[part] for part in PARTS) - each["request_us"]) <= ROUNDED
        )
    spent = [each["request_us"] for each in rows]
    assert spent == sorted(spent, reverse=True)
    if known.success == len(rows):
        for part in ("request_us", *PARTS):
            assert sum(each[part] for each in rows) == pytest.approx(found[part], abs=ROUNDED * 2)


def check_graph(found, known):
    if not known.steps:
        assert found is None
        return
    assert [(each["model"], each["version"], each["count"]) for each in found["steps"]] == [
        (known.member, None, count) for count in known.steps
    ]
    assert all((each["step_us"] > 0) == (each["count"] > 0) for each in found["steps"])
    last = [known.executed] * (len(known.steps) if known.beside else 1)
    begun = [max(count, 1) for count in known.steps]
    assert [each["count"] for each in found["edges"]] == [*begun, *last]
    assert all(each["wait_us"] >= 0 for each in found["edges"])


def test_the_rest_of_the_status(server, status):
    gone = row_of(status, "gone")
    state = {"state": "UNAVAILABLE", "reason": "unloaded", "condition": "unloaded"}
    assert gone == {"name": "gone", "version": 1, **state}
    assert {row["name"] for row in status["models"]} == {"gone", *KNOWN}
    assert status.keys() == {
        "schema", "number", "complete", "time", "server", "machine", "loads", "regions",
        "duration_bounds_us", "slowest", "models",
    }  # fmt: skip
    assert (status["schema"], status["complete"], status["loads"], status["regions"]) == (
        1,
        True,
        [],
        [],
    )
    assert status["server"].keys() == {
        "name", "version", "python", "pid", "started", "live", "ready", "sends", "endpoints", "memory",
    }  # fmt: skip
    assert (status["server"]["pid"], status["server"]["live"]) == (server.pid, True)
    assert status["machine"].keys() == {"gpus", *(name.removeprefix("nv_") for name in CPU)}
    models = [row["model"] for row in status["slowest"]]
    assert max(map(models.count, models)) <= 5
    slowest = [row["request_us"] for row in status["slowest"]]
    assert len(slowest) == 20
    assert slowest == sorted(slowest, reverse=True)
    rows = [each["request_us"] for row in status["models"] for each in row.get("slowest", ())]
    assert slowest[0] == max(rows)


def fields_of(value):
    """Return the names of the fields of a document, without reasons of failures."""
    if isinstance(value, list):
        return {name for each in value for name in fields_of(each)}
    if not isinstance(value, dict):
        return set()
    inner = (fields_of(each) for name, each in value.items() if name != "failures")
    return set(value).union(*inner)


def test_every_field_of_the_status_is_described(status, server):
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/status.md").read_text()))
    path = "/v2/gpubridge/status?history=1"
    told = json.loads(send_request(server.metrics_url, "GET", path, None, KEY)[2])
    assert fields_of(status) | fields_of(told) <= described
