"""Metrics as a model sees them, here without a server around."""

import threading
import time

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError
from gpubridge.pb_utils import c_module, host
from gpubridge.pb_utils.metrics import LocalMetrics

Family = pb_utils.MetricFamily
Failure = pb_utils.TritonModelException


def counter():
    return Family("c", "text", Family.COUNTER)


def test_they_count_outside_of_a_server():
    family = counter()
    metric = family.Metric(labels={"a": "1"})
    metric.increment(1)
    metric.increment(np.float32(0.5))
    assert metric.value() == 1.5
    assert family.Metric({"a": "1"}).value() == 1.5
    assert family.Metric({"a": "2"}).value() == 0
    gauges = Family(name="g", description="text", kind=Family.GAUGE)
    gauge = gauges.Metric()
    gauge.set(5)
    gauge.increment(-7.25)
    assert gauge.value() == -2.25
    histograms = Family("h", "text", Family.HISTOGRAM)
    histograms.Metric(buckets=[1, float("inf")]).observe(3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((None, "d", Family.COUNTER), "name"),
        (("n", None, Family.COUNTER), "description"),
        (("n", "d", 0), "kind"),
        (("n", "d", None), "kind"),
    ],
)
def test_arguments_of_a_family_that_are_none(arguments, named):
    with pytest.raises(TypeError, match=f"for {named}, got"):
        Family(*arguments)


@pytest.mark.parametrize("value", ["1", b"1", None, [], 10**400, object()])
@pytest.mark.parametrize("method", ["increment", "set", "observe"])
def test_values_that_are_no_numbers(method, value):
    family = Family("g", "text", Family.GAUGE)
    metric = family.Metric()
    with pytest.raises(TypeError, match="expected float for value"):
        getattr(metric, method)(value)


@pytest.mark.parametrize("amount", [-1, -1e-300, float("-inf"), float("nan")])
def test_a_counter_never_goes_back(amount):
    family = counter()
    metric = family.Metric()
    with pytest.raises(Failure, match="can only be incremented monotonically by non-negative"):
        metric.increment(amount)
    assert metric.value() == 0


def test_a_server_that_refuses_is_quoted_and_left_alone():
    class Refusing(LocalMetrics):
        instance = "m_0_0"
        closed = 0

        def open_family(self, name, description, kind):
            raise BridgeError("Invalid metric name")

        def close_family(self, family):
            self.closed += 1

    store = Refusing()
    host.attach(host.Host("/models/m/1", lambda *record: None, None, store))
    try:
        with pytest.raises(Failure) as caught:
            Family("a b", "d", Family.GAUGE)
    finally:
        host.detach()
    assert str(caught.value) == (
        "Error when creating MetricFamily: Failed to process the request for model 'm_0_0', message: "
        "Invalid metric name"
    )
    assert store.closed == 0


@pytest.mark.parametrize(("kind", "method"), [("GAUGE", "increment"), ("HISTOGRAM", "observe")])
def test_threads_count_one_after_the_other(kind, method):
    class Cell:
        """Counts as slowly as a Python that may switch threads after any step."""

        closed = False
        total = 0

        def __init__(self):
            self.lock = threading.RLock()

        def add(self, amount):
            before = self.total
            time.sleep(0)
            self.total = before + amount

        observe = add

    cell = Cell()
    metric = c_module.Metric._of(cell, getattr(Family, kind), "m_0")
    count = getattr(metric, method)
    threads = [threading.Thread(target=lambda: [count(1) for _ in range(20)]) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cell.total == 50 * 20
