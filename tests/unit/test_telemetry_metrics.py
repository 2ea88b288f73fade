"""The metrics page, read back by the library that Prometheus' users read it with."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gpubridge.telemetry.exposition import Family, render
from gpubridge.telemetry.metrics import HostMetrics, ModelState, metrics_page
from gpubridge.telemetry.statistics import FAILURE_REASONS, ModelStatistics


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


def test_a_family_without_samples_is_left_out():
    assert render([Family("nothing", "", "counter")]) == b""


def test_counters_keep_tritons_names_and_sum_over_requests():
    statistics = ModelStatistics("m", 3)
    statistics.executed(1, 5, (2, 9_000_000, 1_000_000), (10_000, 200_000, 3_000))
    statistics.failed("BACKEND", 1)
    statistics.copied(64)
    page = metrics_page([ModelState(statistics, 4, 6)], HostMetrics())
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
        "gpubridge_stub_restarts": 6,
    }
    assert {name: found[name, model, version] for name in expected} == expected
    assert found["gpubridge_copied_bytes", ("kind", "host"), model, version] == 64
    failures = {
        reason: found["nv_inference_request_failure", model, ("reason", reason), version]
        for reason in FAILURE_REASONS
    }
    assert failures == {"OTHER": 0, "BACKEND": 1, "CANCELED": 0, "REJECTED": 0}


def test_the_machine_is_measured():
    found = samples(metrics_page([], HostMetrics()))
    assert 0 <= found[("nv_cpu_utilization",)] <= 1
    total = found[("nv_cpu_memory_total_bytes",)]
    assert 0 < found[("nv_cpu_memory_used_bytes",)] < total
