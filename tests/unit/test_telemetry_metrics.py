"""The metrics page, read back by the library that Prometheus' users read it with."""

import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpubridge.errors import BridgeError
from gpubridge.telemetry.exposition import Family, render
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.metrics import ModelState, metrics_page
from gpubridge.telemetry.settings import MetricsSettings
from gpubridge.telemetry.statistics import (
    DeviceWork,
    LatencyHistogram,
    LatencyWindow,
    ModelStatistics,
)

PLAIN = MetricsSettings(gpu=False)


def page_of(statistics, **settings):
    settings = MetricsSettings(cpu=False, gpu=False, **settings)
    return metrics_page([ModelState(statistics, 5, 4, 3, 6)], MachineMetrics(settings), settings)


def samples(page):
    # The library calls every counter's sample by a name that ends in _total.
    return {
        (sample.name.removesuffix("_total"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_names_labels_and_values_survive():
    family = Family("a_b", 'text with "quotes", \\ and\nlines', "gauge")
    family.add({"model": 'say "hi" \\ \n'}, 1.5)
    family.add({}, 7)
    (read,) = text_string_to_metric_families(render([family]).decode())
    assert (read.name, read.type, read.documentation) == ("a_b", "gauge", family.text)
    assert [(s.labels, s.value) for s in read.samples] == [
        ({"model": 'say "hi" \\ \n'}, 1.5),
        ({}, 7),
    ]


def test_counters_keep_tritons_names_and_sum_over_requests():
    statistics = ModelStatistics("m", 3)
    statistics.executed(1, 5, (2, 9_000_000, 1_000_000), (10_000, 200_000, 3_000))
    statistics.failed("BACKEND", 1)
    statistics.copied(64)
    page = page_of(statistics)
    assert b"# TYPE nv_inference_count counter\n" in page
    found = samples(page)
    model, version = ("model", "m"), ("version", "3")
    expected = {
        "nv_inference_request_success": 2,
        "nv_inference_count": 5,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 9000,
        "nv_inference_queue_duration_us": 1000,
        "nv_inference_compute_input_duration_us": 20,
        "nv_inference_compute_infer_duration_us": 400,
        "nv_inference_compute_output_duration_us": 6,
        "nv_inference_pending_request_count": 4,
        "gpubridge_open_requests": 5,
        "gpubridge_queued_requests": 3,
        "gpubridge_stub_restarts": 6,
    }
    assert {name: found[name, model, version] for name in expected} == expected
    assert found["gpubridge_copied_bytes", ("kind", "host"), model, version] == 64
    failures = {
        reason: found["nv_inference_request_failure", model, ("reason", reason), version]
        for reason in ("OTHER", "BACKEND", "CANCELED", "REJECTED")
    }
    assert failures == {"OTHER": 0, "BACKEND": 1, "CANCELED": 0, "REJECTED": 0}


def test_the_machine_is_measured():
    found = samples(metrics_page([], MachineMetrics(PLAIN), PLAIN))
    assert 0 <= found[("nv_cpu_utilization",)] <= 1
    total = found[("nv_cpu_memory_total_bytes",)]
    assert 0 < found[("nv_cpu_memory_used_bytes",)] < total


def test_the_machine_is_measured_once_per_interval():
    often = MachineMetrics(MetricsSettings(gpu=False, interval_ms=1e-6))
    assert often.families()[0] is not often.families()[0]
    seldom = MachineMetrics(MetricsSettings(gpu=False, interval_ms=1e9))
    assert seldom.families()[0] is seldom.families()[0]
    assert MachineMetrics(MetricsSettings(cpu=False, gpu=False)).families() == []


def test_tags_of_a_model_are_labels_with_an_underscore():
    page = page_of(ModelStatistics("m", 1, {"team": "vision"}))
    assert b'nv_inference_count{_team="vision",model="m",version="1"} 0\n' in page


def test_quantiles_are_those_of_the_last_minute():
    window = LatencyWindow()
    minute = 60_000_000_000
    window.observe(1, (9_000_000,) * 5)
    for number in range(1, 101):
        window.observe(minute, (number * 1000, 1000, 2000, 3000, 4000))
    found = window.quantiles((0.5, 0.9, 1.0), now=minute + 2)
    assert found[0] == [50, 90, 100]
    assert [step[1] for step in found[1:]] == [1, 2, 3, 4]
    assert all(value != value for value in window.quantiles((0.5,), now=3 * minute)[0])


def test_the_window_keeps_the_latest_observations_only():
    window = LatencyWindow()
    for number in range(100_000):
        window.observe(1, (number * 1000, 0, 0, 0, 0))
    ((least,), *_) = window.quantiles((0.0,), now=1)
    assert 50_000 < least < 99_999


def test_durations_and_batch_sizes_are_histograms():
    assert b"gpubridge_batch_size" not in page_of(ModelStatistics("m", 1))
    statistics = ModelStatistics("m", 1)
    for size, times in ((1, 2), (3, 1), (1000, 1)):
        statistics.executed(times, size, (times, 9_000_000 * times, 0), (0, 0, 0))
    for spent, answer in ((99_000, 1_000), (100_001, 0), (9_000_000, 0), (200_000_000_000, 0)):
        statistics.passed_on("", 1, spent, 0, answer)
    page = page_of(statistics)
    found = samples(page)

    def buckets(name):
        rows = [(key[1][1], value) for key, value in found.items() if key[0] == f"{name}_bucket"]
        return dict(rows)

    labels = ("model", "m"), ("version", "1")
    sizes = buckets("gpubridge_batch_size")
    assert list(sizes) == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "+Inf"]
    assert [sizes[le] for le in ("1", "2", "4", "256", "+Inf")] == [2, 2, 3, 3, 4]
    assert found[("gpubridge_batch_size_count", *labels)] == 4
    assert found[("gpubridge_batch_size_sum", *labels)] == 1005
    durations = buckets("gpubridge_request_duration_seconds")
    assert len(durations) == 17
    assert [durations[le] for le in ("0.0001", "0.00025", "0.005", "0.01", "10", "+Inf")] == [
        *(1, 2, 2, 3, 3, 4)
    ]
    assert found[("gpubridge_request_duration_seconds_count", *labels)] == 4
    assert found[("gpubridge_request_duration_seconds_sum", *labels)] == pytest.approx(0.036001)
    assert found[("gpubridge_answer_duration_us", *labels)] == 1
    assert b"_bucket" not in page_of(statistics, histograms=False)


def test_summaries_count_what_the_counters_count():
    statistics = ModelStatistics("m", 1, window=LatencyWindow())
    statistics.executed(1, 1, (1, 9_000_000, 1_000_000), (10_000, 200_000, 3_000))
    statistics.window.observe(time.monotonic_ns(), (9_000_000, 1_000_000, 10_000, 200_000, 3_000))
    found = samples(
        page_of(
            statistics,
            summary_latencies=True,
            summary_quantiles=((0.5, 0.1),),
            counter_latencies=False,
        )
    )
    model = ("model", "m"), ("version", "1")
    quantile = ("model", "m"), ("quantile", "0.5"), ("version", "1")
    for name, microseconds in (("request", 9000), ("queue", 1000), ("compute_infer", 200)):
        family = f"nv_inference_{name}_summary_us"
        assert found[(f"{family}_count", *model)] == 1
        assert found[(f"{family}_sum", *model)] == microseconds
        assert found[(family, *quantile)] == microseconds
    assert ("nv_inference_request_duration_us", *model) not in found


def test_hits_of_the_cache_are_in_no_summary_of_executions():
    statistics = ModelStatistics("m", 1, window=LatencyWindow())
    statistics.executed(1, 1, (1, 9_000_000, 1_000_000), (10_000, 200_000, 3_000))
    statistics.window.observe(time.monotonic_ns(), (9_000_000, 1_000_000, 10_000, 200_000, 3_000))
    for _ in range(3):
        statistics.cache_hit(5_000)
    quantiles = ((0.5, 0.1),)
    found = samples(page_of(statistics, summary_latencies=True, summary_quantiles=quantiles))
    model = ("model", "m"), ("version", "1")
    quantile = ("model", "m"), ("quantile", "0.5"), ("version", "1")
    for name, count, half in (("request", 4, 5), ("queue", 4, 0), ("compute_infer", 1, 200)):
        family = f"nv_inference_{name}_summary_us"
        assert found[(f"{family}_count", *model)] == count
        assert found[(family, *quantile)] == half


def test_a_histogram_is_cumulative_and_ends_at_infinity():
    statistics = ModelStatistics("m", 1, first_response=LatencyHistogram((1.0, 2.5)))
    for milliseconds in (0.5, 1.0, 2.0, 99.0):
        statistics.first_response.observe(int(milliseconds * 1e6))
    found = samples(page_of(statistics))
    family = "nv_inference_first_response_histogram_ms"
    model = ("model", "m"), ("version", "1")
    buckets = {le: found[(f"{family}_bucket", ("le", le), *model)] for le in ("1", "2.5", "+Inf")}
    assert buckets == {"1": 2, "2.5": 3, "+Inf": 4}
    assert found[(f"{family}_sum", *model)] == 102.5


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("summary_latencies", "expects SETTING=VALUE"),
        ("summary_latencies=maybe", "expects true or false, got 'maybe'"),
        ("summary_quantiles=0.5", "expects QUANTILE:ERROR"),
        ("summary_quantiles=2:0.1", "from 0 to 1"),
        ("colour=red", "expects one of counter_latencies"),
    ],
)
def test_settings_that_there_are_not_are_refused(entry, text):
    with pytest.raises(BridgeError, match=re.escape(text)):
        MetricsSettings(config=(entry,))


def test_settings_are_read():
    settings = MetricsSettings(
        gpu=False,
        config=(
            "summary_latencies=true",
            "summary_quantiles=0.5:0.05,0.9:0.01",
            "counter_latencies=false",
        ),
    )
    assert settings.summary_latencies
    assert not settings.counter_latencies
    assert not settings.histogram_latencies
    assert settings.summary_quantiles == ((0.5, 0.05), (0.9, 0.01))


def test_work_on_gpus_is_counted_by_kind():
    settings = MetricsSettings(cpu=False, gpu=False)
    # Bytes and copies of each kind, and waits.
    state = ModelState(ModelStatistics("m", 1), 0, 0, 0, 0, {}, DeviceWork(range(1, 10)))
    found = samples(metrics_page([state], MachineMetrics(settings), settings))
    model = ("model", "m"), ("version", "1")
    for place, kind in enumerate(("host", "h2d", "d2h", "d2d", "p2p")):
        assert found[("gpubridge_copied_bytes", ("kind", kind), *model)] == place
        assert found[("gpubridge_copies", ("kind", kind), *model)] == (place and place + 4)
    assert found[("gpubridge_device_waits", *model)] == 9


def test_fallbacks_of_models():
    settings = MetricsSettings(cpu=False, gpu=False)
    state = ModelState(ModelStatistics("m", 1), 0, 0, 0, 0, {"no_gpu": 2})
    page = metrics_page([state], MachineMetrics(settings), settings)
    found = {key: value for key, value in samples(page).items() if "fallbacks" in key[0]}
    assert found == {
        ("gpubridge_fallbacks", ("model", "m"), ("reason", "no_gpu"), ("version", "1")): 2
    }
