"""Parts 1.11 and 1.12 of the API's tables: what models ask of the server, metrics and other models."""

from __future__ import annotations

from tests.conformance.api_case import ApiCase


def _cases(part: str, row: str, codes: dict[str, str]) -> list[ApiCase]:
    return [ApiCase(part, row, name, code) for name, code in codes.items()]


def _metric(name: str, kind: str, then: str, buckets: str = "None") -> str:
    """Code that makes a metric of a family of its own and looks at it."""
    return (
        f"f = pb_utils.MetricFamily('api_{name}', 'asked', pb_utils.MetricFamily.{kind})\n"
        f"m = f.Metric(labels={{'of': 'api'}}, buckets={buckets})\n"
        f"{then}"
    )


METRICS = [
    *_cases(
        "1.11",
        "MetricFamily",
        {
            "kinds": (
                "[hasattr(pb_utils.MetricFamily, kind) for kind in 'COUNTER GAUGE HISTOGRAM'.split()]"
            ),
            "keywords": (
                "type(pb_utils.MetricFamily(name='api_keywords', description='asked', "
                "kind=pb_utils.MetricFamily.GAUGE)).__name__"
            ),
            "kind missing": "raises(lambda: pb_utils.MetricFamily('api_none', 'asked'))",
            "kind of a wrong type": "raises(lambda: pb_utils.MetricFamily('api_none', 'asked', 'COUNTER'))",
            "again, of the same kind": (
                "of = lambda: pb_utils.MetricFamily('api_twice', 'asked', pb_utils.MetricFamily.COUNTER)\n"
                "a, b = of(), of()\nx, y = a.Metric({'of': 'api'}), b.Metric({'of': 'api'})\n"
                "x.increment(2)\ny.increment(3)\nsaid = x.value(), y.value()"
            ),
            "again, of another kind": (
                "a = pb_utils.MetricFamily('api_kinds', 'asked', pb_utils.MetricFamily.COUNTER)\n"
                "said = raises(lambda: pb_utils.MetricFamily('api_kinds', 'asked', "
                "pb_utils.MetricFamily.GAUGE))"
            ),
            "gone before its metric": _metric(
                "gone", "COUNTER", "del f\nsaid = raises(lambda: m.increment(1))"
            ),
        },
    ),
    *_cases(
        "1.11",
        "Metric",
        {
            "labels are no dictionary": (
                "f = pb_utils.MetricFamily('api_labels', 'asked', pb_utils.MetricFamily.COUNTER)\n"
                "said = raises(lambda: f.Metric(labels=['a']))"
            ),
            "no labels": (
                "f = pb_utils.MetricFamily('api_plain', 'asked', pb_utils.MetricFamily.COUNTER)\n"
                "m = f.Metric()\nm.increment(1)\nsaid = m.value()"
            ),
            "same labels": (
                "f = pb_utils.MetricFamily('api_same', 'asked', pb_utils.MetricFamily.GAUGE)\n"
                "a, b = f.Metric({'of': 'api'}), f.Metric({'of': 'api'})\na.set(4)\nsaid = b.value()"
            ),
            "buckets are no list": (
                "f = pb_utils.MetricFamily('api_no_list', 'asked', pb_utils.MetricFamily.HISTOGRAM)\n"
                "said = raises(lambda: f.Metric(labels={}, buckets=3))"
            ),
            "buckets of a counter": (
                "f = pb_utils.MetricFamily('api_buckets', 'asked', pb_utils.MetricFamily.COUNTER)\n"
                "said = raises(lambda: f.Metric(labels={}, buckets=[1.0]))"
            ),
            "histogram without buckets": (
                "f = pb_utils.MetricFamily('api_bare', 'asked', pb_utils.MetricFamily.HISTOGRAM)\n"
                "said = raises(lambda: f.Metric(labels={}))"
            ),
        },
    ),
    *_cases(
        "1.11",
        "counter",
        {
            "increment": _metric(
                "counts", "COUNTER", "m.increment(2)\nm.increment(0.5)\nsaid = m.value()"
            ),
            "negative": _metric("down", "COUNTER", "said = raises(lambda: m.increment(-1))"),
            "observe": _metric("observed", "COUNTER", "said = raises(lambda: m.observe(1))"),
            "text": _metric("text", "COUNTER", "said = raises(lambda: m.increment('1'))"),
        },
    ),
    *_cases(
        "1.11",
        "gauge",
        {
            "set and increment": _metric(
                "gauge", "GAUGE", "m.set(5)\nm.increment(-2.5)\nsaid = m.value()"
            ),
            "observe": _metric("gauge_observed", "GAUGE", "said = raises(lambda: m.observe(1))"),
        },
    ),
    *_cases(
        "1.11",
        "histogram",
        {
            "observe": _metric("seen", "HISTOGRAM", "said = m.observe(1.5)", "[1.0, 2.0]"),
            "value": _metric("h_value", "HISTOGRAM", "said = raises(lambda: m.value())", "[1.0]"),
            "increment": _metric(
                "h_more", "HISTOGRAM", "said = raises(lambda: m.increment(1))", "[1.0]"
            ),
            "set": _metric("h_set", "HISTOGRAM", "said = raises(lambda: m.set(1))", "[1.0]"),
        },
    ),
]
CONTROL = [
    *_cases(
        "1.12",
        "is_model_ready",
        {
            "itself": "pb_utils.is_model_ready('api')",
            "its version": "pb_utils.is_model_ready(model_name='api', model_version='1')",
            "another version": "raises(lambda: pb_utils.is_model_ready('api', '7'))",
            "nobody": "raises(lambda: pb_utils.is_model_ready('nobody'))",
            "no version": "raises(lambda: pb_utils.is_model_ready('api', 'first'))",
            "number": "raises(lambda: pb_utils.is_model_ready('api', 1))",
        },
    ),
    *_cases(
        "1.12",
        "load_model, unload_model",
        {
            "load without --model-control-mode=explicit": (
                "raises(lambda: pb_utils.load_model('api_add'))"
            ),
            "unload without --model-control-mode=explicit": (
                "raises(lambda: pb_utils.unload_model('api_add'))"
            ),
            "files are no dictionary": (
                "raises(lambda: pb_utils.load_model('api_add', '{}', ['file:1/model.py']))"
            ),
            "text instead of a name": "raises(lambda: pb_utils.load_model(3))",
        },
    ),
]
# Triton 2.51 answers nothing after this one.
LAST = _cases(
    "1.11",
    "counter",
    {"set": _metric("set", "COUNTER", "said = raises(lambda: m.set(1))")},
)
CASES = [*METRICS, *CONTROL, *LAST]
