"""Metrics that models make: on the metrics page, shared, exact, and gone with their owners."""

import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.controlled import EXPLICIT, control
from tests.process.server import NO_SPARES, running_server, wait_until, write_code_model

INITIALIZE = """
self.family = pb_utils.MetricFamily("{family}", "Hits of {name}", pb_utils.MetricFamily.COUNTER)
self.hits = self.family.Metric(labels={{"of": "all"}})
self.hits.increment(1)
"""


def initialize(name, family="hits_total"):
    return INITIALIZE.format(name=name, family=family)


FINALIZE = """
self.hits.increment(1)
late = pb_utils.MetricFamily("late_total", "Made in finalize", pb_utils.MetricFamily.COUNTER)
print("finalized with", self.hits.value(), late.Metric().value(), flush=True)
"""


@pytest.fixture(scope="module")
def server(repository):
    """A server with the models m, and b and asker, which count hits; others are loaded by their tests."""
    write_code_model(repository)
    for name in ("b", "asker"):
        write_code_model(repository, name, initialize=initialize(name, f"{name}_hits_total"))
    # No process more than there are instances, though some die again and again.
    with running_server(repository, *EXPLICIT, "--load-model=*", *NO_SPARES) as running:
        yield running


@pytest.fixture
def load(repository, server):
    """Write a model that runs what it is sent, and load it; it is gone after the test."""
    loaded = []

    def load(name, initialize):
        loaded.append(name)
        write_code_model(repository, name, initialize=initialize)
        assert control(server, "load", name) == (200, "")

    yield load
    for name in loaded:
        control(server, "unload", name)


def told(server, code, model="m"):
    """Have a model run some code; returns what it said."""
    status, said = server.ask(code, model)
    assert status == 200, said
    return said


def page(server, begin):
    """The lines of the metrics page that begin so, comments included."""
    connection = http.client.HTTPConnection(server.metrics_url, timeout=150)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return [line for line in lines if line.removeprefix("# HELP ").startswith(begin)]


def test_each_kind_is_on_the_page_as_triton_writes_it(server):
    told(
        server,
        """
F = pb_utils.MetricFamily
self.kept = c, g, h = [F(name, "text\\\\ of\\n" + name, kind) for name, kind in (
    ("my_c", F.COUNTER), ("my_g", F.GAUGE), ("my_h", F.HISTOGRAM))]
c.Metric({"b": 'x"y\\n\\\\z', "a": ""}).increment(3.5)
c.Metric().increment(1)
for name, value in (("inf", float("inf")), ("nan", float("nan")), ("low", -2.25), ("large", 1e20),
                    ("whole", 7), ("third", 1 / 3)):
    g.Metric({"x": name}).set(value)
m = h.Metric(labels={"x": "1"}, buckets=[0.1, 1, 2.5, 5.0, 10])
for value in (0.05, 1, 1.0001, 3, 100):
    m.observe(value)
# The bounds of the first one stay.
h.Metric(labels={"x": "1"}, buckets=[7]).observe(3)
""",
    )
    assert page(server, "my_") == [
        r"# HELP my_c text\\ of\nmy_c",
        r'my_c{a="",b="x\"y\n\\z"} 3.5',
        "my_c 1",
        r"# HELP my_g text\\ of\nmy_g",
        'my_g{x="inf"} +Inf',
        'my_g{x="nan"} NaN',
        'my_g{x="low"} -2.25',
        'my_g{x="large"} 1e+20',
        'my_g{x="whole"} 7',
        'my_g{x="third"} 0.3333333333333333',
        r"# HELP my_h text\\ of\nmy_h",
        'my_h_count{x="1"} 6',
        'my_h_sum{x="1"} 108.0501',
        'my_h_bucket{x="1",le="0.1"} 1',
        'my_h_bucket{x="1",le="1"} 2',
        'my_h_bucket{x="1",le="2.5"} 3',
        'my_h_bucket{x="1",le="5"} 5',
        'my_h_bucket{x="1",le="10"} 5',
        'my_h_bucket{x="1",le="+Inf"} 6',
    ]


def test_buckets_that_do_not_grow_are_refused(server):
    code = "pb_utils.MetricFamily('h', '', pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[2, 1])"
    status, said = server.ask(code)
    told = "Failed to process the request for model 'm_0', message: Bucket Boundaries must be"
    assert (status, f"Error when creating Metric: {told} strictly sorted" in said) == (500, True), (
        said
    )
    assert page(server, "h") == []


def test_models_and_instances_share_a_metric_and_count_exactly(tmp_path):
    two = "instance_group [{ count: 2 kind: KIND_CPU }]"
    for name in "ab":
        write_code_model(tmp_path, name, initialize=initialize(name), finalize=FINALIZE, config=two)
    count = """
import threading
gauge = pb_utils.MetricFamily("flights", "", pb_utils.MetricFamily.GAUGE)
histogram = pb_utils.MetricFamily("sizes", "", pb_utils.MetricFamily.HISTOGRAM)
self.held = gauge, histogram
def count():
    flights = gauge.Metric()
    sizes = histogram.Metric(buckets=[1.0])
    for _ in range(100):
        self.family.Metric({"of": "all"}).increment(1)
        self.hits.increment(0.5)
        flights.increment(1)
        flights.increment(-1)
        sizes.observe(2)
threads = [threading.Thread(target=count) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
self.said = os.getpid()
"""
    with running_server(tmp_path) as server:
        asked = []
        with ThreadPoolExecutor(8) as pool:
            while len(set(asked)) < 4:
                asked += pool.map(lambda name: told(server, count, name), "aaaabbbb")
        exact = 4 + len(asked) * 12 * 100 * 1.5
        assert float(told(server, "self.said = self.hits.value()", "a")) == exact
        metrics = server.metrics()
        assert metrics['hits_total{of="all"}'] == exact
        assert metrics["flights"] == 0
        assert metrics["sizes_count"] == len(asked) * 12 * 100
        assert metrics["sizes_sum"] == 2 * metrics["sizes_count"]
        # Which of the models came first decides.
        assert page(server, "hits_total")[0] in (
            "# HELP hits_total Hits of a",
            "# HELP hits_total Hits of b",
        )
        server.unload_all()
        assert server.log().count("finalized with") == 4
        assert "Error" not in server.log()


def test_metrics_go_with_their_family_not_with_the_object(server):
    make = """
self.f = pb_utils.MetricFamily("gone_total", "", pb_utils.MetricFamily.COUNTER)
self.f.Metric({"a": "1"}).increment(2)
"""
    told(server, make)
    told(server, 'self.f.Metric({"a": "1"}).increment(2)')
    assert page(server, "gone_total{") == ['gone_total{a="1"} 4']
    assert told(server, "m = self.f.Metric(); del self.f; self.said = 1") == "1"
    assert page(server, "gone") == []
    told(server, make)
    assert page(server, "gone_total{") == ['gone_total{a="1"} 2']


def test_metrics_go_with_their_model(tmp_path):
    for name in "ab":
        write_code_model(tmp_path, name, initialize=initialize(name), finalize=FINALIZE)
    with running_server(tmp_path, *EXPLICIT, "--load-model=*") as server:
        told(server, "self.hits.increment(10)", "a")
        assert control(server, "unload", "a") == (200, "")
        wait_until(lambda: "finalized with 13.0 0.0" in server.log(), "finalize", server)
        # Those that b shares stay.
        wait_until(lambda: not page(server, "late"), "the metrics to be gone", server)
        assert server.metrics()['hits_total{of="all"}'] == 13
        assert control(server, "unload", "b") == (200, "")
        wait_until(lambda: not page(server, "hits"), "the metrics to be gone", server)
        # No instance comes back: they begin anew.
        assert control(server, "load", "b") == (200, "")
        assert server.metrics()['hits_total{of="all"}'] == 1
        # A changed model comes up while the old one still counts.
        write_code_model(tmp_path, "b", initialize=initialize("b") + "#", finalize="0")
        assert control(server, "load", "b") == (200, "")
        assert server.metrics()['hits_total{of="all"}'] >= 2


def test_a_stub_that_is_killed_goes_on_counting_where_it_was(server, load):
    gauge = "self.gauge = pb_utils.MetricFamily('g', '', pb_utils.MetricFamily.GAUGE)\n"
    load("killed", initialize("killed", "killed_total") + gauge)
    make = """
lazy = self.lazy = pb_utils.MetricFamily("lazy_total", "", pb_utils.MetricFamily.COUNTER)
lazy.Metric({"x": "1"}).increment(5)
self.gauge.Metric().set(3)
self.hits.increment(10)
self.said = os.getpid()
"""
    first = int(told(server, make, "killed"))
    assert server.metrics()["g"] == 3
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "'killed_0' is ready again" in server.log(), "another process", server)
    metrics = server.metrics()
    assert metrics['killed_total{of="all"}'] == 12
    # What has not been made again yet is not there.
    assert not {name for name in metrics if name.startswith(("lazy", "g{"))}
    assert "g" not in metrics
    told(server, make, "killed")
    metrics = server.metrics()
    assert metrics['lazy_total{x="1"}'] == 10
    assert metrics["g"] == 3


def test_a_child_that_the_model_forks_counts_for_nobody(server, load):
    load("forks", initialize("forks", "forks_total"))
    said = told(
        server,
        """
pid = os.fork()
if pid == 0:
    self.hits.increment(100)
    try:
        pb_utils.MetricFamily("child", "", pb_utils.MetricFamily.GAUGE)
    except pb_utils.TritonModelException as error:
        del self.family
        os._exit("a child that the model forked" in str(error) and 7)
os.waitpid(pid, 0)
self.said = self.hits.value()
""",
        "forks",
    )
    assert said == "1.0"
    assert server.metrics()['forks_total{of="all"}'] == 1


QUESTIONS = [
    {},
    {"question": 1},
    {"question": 1, "about": "nothing"},
    {"question": 1, "about": "family", "family": 1, "metric": "sum", "name": "x", "text": ""},
    {"question": 1, "about": "family", "family": 1, "metric": "gauge", "name": 1, "text": ""},
    {"question": 1, "about": "metric", "family": 7, "labels": {}},
    {"question": 1, "about": "load", "model": "m", "config": "", "files": [["x", -1]]},
    {"question": 1, "about": "load", "model": "m", "config": "", "files": [["x", 1]]},
    {"question": 1, "about": "unload", "model": "m", "dependents": 1},
    {"question": 1, "about": "ready", "model": 1, "version": ""},
]


@pytest.mark.parametrize("fields", QUESTIONS, ids=json.dumps)
def test_questions_that_no_stub_asks_end_only_the_asker(server, fields):
    spoil = f"""
from gpubridge.pb_utils import host
from gpubridge.transport.messages import control_message
host.current().metrics._calls._outbox.send(bytes([6]) + __import__("json").dumps({fields!r}).encode())
threading.Event().wait()
"""
    status, said = server.ask(spoil, "asker")
    assert (status, "malformed call" in said) == (503, True), said
    assert float(told(server, "self.said = self.hits.value()", "b")) >= 1
    wait_until(lambda: server.is_ready("asker"), "the model to be back", server)
    # It answers, too: so it will be started again at once after the next question.
    assert float(told(server, "self.said = self.hits.value()", "asker")) >= 1
