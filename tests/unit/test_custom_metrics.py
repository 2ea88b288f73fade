"""Custom metrics: their existence, their owners and their removal."""

import pytest

from gpubridge.engine import custom_metrics
from gpubridge.engine.custom_metrics import CustomMetrics, MetricOwner
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.exposition import render
from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
)

MOST = 100


class Instance:
    def __init__(self):
        self.ended = False


class Stub:
    """A stub as the server sees it; `number` families of it so far."""

    def __init__(self, metrics, instance=None):
        self.metrics = metrics
        self.instance = instance or Instance()
        self.heard = 0
        self.owner = MetricOwner(self.instance, self.hear)
        self.number = 0

    def hear(self):
        self.heard += 1

    def family(self, name, kind="counter", text="text"):
        self.number += 1
        self.metrics.open_family(self.owner, self.number, name, text, kind)
        return self.number

    def metric(self, family, kind="counter", buckets=None, **labels):
        opened = self.metrics.open_metric(self.owner, family, labels, buckets)
        board = MetricBoard(self.metrics.segment.view)
        if kind == "histogram":
            return HistogramCell(board, opened.unit, opened.bounds)
        return {"counter": CounterCell, "gauge": GaugeCell}[kind](board, opened.head, opened.unit)


@pytest.fixture
def metrics():
    made = CustomMetrics()
    yield made
    made.close()


def page(metrics):
    lines = render(metrics.families()).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_a_stub_that_dies_takes_its_metrics_and_the_next_goes_on(metrics):
    first = Stub(metrics)
    first.metric(first.family("c"), x="1").add(5)
    histogram = first.family("h", "histogram")
    first.metric(histogram, "histogram", [1.0], x="1").observe(0.5)
    first.metric(first.family("g", "gauge"), "gauge").set(7)
    metrics.leave(first.owner)
    assert page(metrics) == []
    second = Stub(metrics, first.instance)
    second.metric(second.family("c"), x="1").add(1)
    second.metric(second.family("h", "histogram"), "histogram", [1.0], x="1").observe(2)
    second.metric(second.family("g", "gauge"), "gauge")
    assert page(metrics) == [
        'c{x="1"} 6',
        'h_count{x="1"} 2',
        'h_sum{x="1"} 2.5',
        'h_bucket{x="1",le="1"} 1',
        'h_bucket{x="1",le="+Inf"} 2',
        "g 0",
    ]


def test_an_instance_that_ends_leaves_nothing(metrics):
    stub = Stub(metrics)
    stub.metric(stub.family("c")).add(5)
    metrics.leave(stub.owner)
    stub.instance.ended = True
    fresh = Stub(metrics)
    # Also another kind under that name: the family is gone.
    fresh.metric(fresh.family("c", "gauge"), "gauge").set(1)
    assert page(metrics) == ["c 1"]


def test_shared_metrics_stay_until_their_last_owner_is_gone(metrics):
    one, other = Stub(metrics), Stub(metrics)
    family = one.family("c", text="first")
    one.metric(family).add(1)
    other.metric(other.family("c", text="second")).add(2)
    metrics.close_family(one.owner, family)
    assert page(metrics) == ["c 3"]
    assert b"# HELP c first\n" in render(metrics.families())
    other.instance.ended = True
    metrics.leave(other.owner)
    assert page(metrics) == []
    last = Stub(metrics)
    assert last.metric(last.family("c")).total() == 0


def test_two_families_of_one_name_in_one_stub(metrics):
    stub = Stub(metrics)
    first, second = stub.family("g", "gauge"), stub.family("g", "gauge")
    cells = stub.metric(first, "gauge"), stub.metric(second, "gauge")
    cells[0].set(2)
    cells[1].add(1)
    assert cells[0].total() == cells[1].total() == 3
    metrics.close_family(stub.owner, first)
    assert page(metrics) == ["g 3"]


@pytest.mark.parametrize(
    "name", ["", "1x", "a b", "a-b", "ä", "__x", "nv_inference_count", "gpubridge_batch_size_sum"]
)
def test_names_that_are_none_are_refused(metrics, name):
    with pytest.raises(BridgeError, match="Invalid metric name"):
        Stub(metrics).family(name)
    assert page(metrics) == []


@pytest.mark.parametrize(
    "name", ["vllm:tokens_total", "A_1", ":", "_x", "nv_trt_llm_request_metrics", "gpubridge_x"]
)
def test_names_that_are_some_are_taken(metrics, name):
    stub = Stub(metrics)
    stub.metric(stub.family(name), _Label1="")
    assert page(metrics) == [f'{name}{{_Label1=""}} 0']


@pytest.mark.parametrize("label", ["", "a b", "1a", "__a", "a:b"])
def test_labels_that_are_none_are_refused(metrics, label):
    stub = Stub(metrics)
    family = stub.family("c")
    with pytest.raises(BridgeError, match="Invalid label name"):
        metrics.open_metric(stub.owner, family, {label: "x"}, None)
    assert page(metrics) == []


def test_a_histogram_makes_its_own_le(metrics):
    stub = Stub(metrics)
    with pytest.raises(BridgeError, match="Invalid label name"):
        stub.metric(stub.family("h", "histogram"), "histogram", [1.0], le="1")
    stub.metric(stub.family("c"), le="1")
    assert page(metrics) == ['c{le="1"} 0']


def test_a_stub_without_bounds_leaves_room_for_others(metrics, monkeypatch):
    assert 4 * custom_metrics._UNITS_PER_STUB * UNIT_BYTES < custom_metrics._BOARD_BYTES
    monkeypatch.setattr(custom_metrics, "_UNITS_PER_STUB", MOST)
    greedy, modest = Stub(metrics), Stub(metrics)
    family = greedy.family("c")
    for index in range(MOST):
        greedy.metric(family, x=str(index))
    with pytest.raises(BridgeError, match="of one model instance, got one more") as caught:
        greedy.metric(family, x="one more")
    assert caught.value.code == ErrorCode.UNAVAILABLE
    cell = modest.metric(modest.family("d"))
    cell.add(1)
    assert page(metrics)[-1] == "d 1"
    greedy.instance.ended = True
    metrics.leave(greedy.owner)
    assert page(metrics) == ["d 1"]
    # What it had can be had again.
    again = Stub(metrics)
    family = again.family("c")
    for index in range(MOST):
        again.metric(family, x=str(index))


def test_a_page_asks_what_is_not_heard_yet(metrics):
    stub = Stub(metrics)
    stub.family("c")
    page(metrics)
    assert stub.heard == 1
    metrics.leave(stub.owner)
    page(metrics)
    assert stub.heard == 1
