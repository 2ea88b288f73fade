"""`gpubridge bench load`: what is sent, when latency begins, what bounds a load, and what is told of failures."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.bench import load as load_module
from gpubridge.bench.arrivals import arrivals
from gpubridge.bench.load import Bounds, Load, Request, Server
from gpubridge.bench.load_report import draw, figures, table
from gpubridge.cli import bench_load, main
from gpubridge.errors import BridgeError
from gpubridge.protocol.infer_request import parse_request
from gpubridge.tensor.datatypes import DATATYPES
from tests.unit.model_configs import model_config

MILLISECOND = 1_000_000
NAMES = [name.replace("BYTES", "STRING") for name in DATATYPES]


class VirtualServer:
    """A server of one connection, whose time passes only while it works; ``stalls``: ms by request."""

    def __init__(self, stalls=None, failing=()):
        self.now, self.asked = 0, 0
        self._stalls, self._failing = stalls or {}, failing

    # -- what the load takes for the time

    def monotonic_ns(self):
        return self.now

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)

    # -- the connection

    def connect(self):
        return self

    def request(self, *_):
        self.now += self._stalls.get(self.asked, 1) * MILLISECOND
        self.asked += 1

    def getresponse(self):
        failed = self.asked - 1 in self._failing
        return SimpleNamespace(status=500 if failed else 200, read=lambda: b"no luck")

    def close(self):
        """Nothing is open."""


def loaded(monkeypatch, server, bounds, rate=None):
    monkeypatch.setattr(load_module, "time", server)
    load = Load(server, Request("/", b"", {}), 1, bounds, rate)
    return load, load.run()


def test_a_closed_load_ends_at_either_bound(monkeypatch):
    _, followed = loaded(monkeypatch, VirtualServer(), Bounds(1.0, 7))
    assert len(followed.meant) == 7
    server = VirtualServer()
    loaded(monkeypatch, server, Bounds(0.05))
    assert server.asked == pytest.approx(100, abs=1)


def test_an_open_load_counts_from_the_time_that_was_meant(monkeypatch):
    server = VirtualServer({20: 500})
    load, followed = loaded(monkeypatch, server, Bounds(1.0), 100)
    schedule = arrivals(100, 1.0, 0)
    assert list(followed.meant - followed.meant[0]) == list(schedule - schedule[0])
    took = followed.answered - followed.meant
    # All that were meant to be sent in the half second in which the server stood still waited for its end.
    stalled = (followed.meant > followed.sent[20]) & (followed.meant < followed.answered[20])
    assert stalled.sum() > 30
    assert (took[stalled] > followed.answered[20] - followed.meant[stalled]).all()
    found = figures(followed, load.failures, 100)
    assert found["p50_us"] < 500_000 <= found["max_us"]
    assert found["client"] == ""
    assert "of 100 meant; 0 failed" in table(found)


def test_failures_are_counted_and_the_first_is_told(monkeypatch):
    load, followed = loaded(monkeypatch, VirtualServer(failing={1, 3}), Bounds(1.0, 5))
    found = figures(followed, load.failures, None)
    assert (found["answered"], found["failed"], found["first_failure"]) == (3, 2, "500: no luck")
    assert "first failure: 500: no luck" in table(found)
    with pytest.raises(BridgeError, match="no request was answered: 500: no luck"):
        loaded(monkeypatch, VirtualServer(failing={0}), Bounds(1.0, 1))


def test_the_picture_says_what_it_lacks_or_is_there(monkeypatch, tmp_path):
    _, followed = loaded(monkeypatch, VirtualServer(), Bounds(1.0, 7))
    told = draw(followed, "m", tmp_path / "load.png")
    assert "matplotlib is not installed" in told or (tmp_path / "load.png").stat().st_size


def test_inputs_follow_the_configuration_or_are_given():
    specs = ";".join(f"{name} {name} [-1, 3]" for name in NAMES)
    config = bench_load._config(
        model_config(specs, "", "max_batch_size: 4").to_json().encode(), "m"
    )
    given = ['BYTES=[["a", "bc", "d"]]'.replace("BYTES", "STRING")]
    request = bench_load._request(config, given, "/v2/models/m/infer", {"a": "b"})
    length = int(request.headers["Inference-Header-Content-Length"])
    assert request.headers["a"] == "b"
    form = parse_request(request.body[:length], config, len(request.body) - length)
    assert {entry.shape for entry in form.inputs} == {(1, 1, 3)}
    at = {entry.name: place for entry, place in zip(form.sent, form.places, strict=True)}
    floats = request.body[length:][at["FP32"][0] :][: at["FP32"][1]]
    assert (np.frombuffer(floats, np.float32) < 1).all()
    assert b"\2\0\0\0bc" in request.body


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["load"], "expects the URL of a server and the name of a model"),
        (["load", "http://127.0.0.1:1", "m"], "does not answer"),
        (["load", "ftp://x", "m"], "expected the URL of a server's HTTP port"),
        (["load", "x", "m", "--connections=0"], "--connections expects 1 to 1024, got 0"),
        (["load", "x", "m", "--rate=-1"], "--rate expects a positive number, got -1"),
        (["load", "x", "m", "--rate=1e9"], "more than 10,000,000 requests"),
        (["load", "x", "m", "--header=a"], "--header expects NAME:VALUE, got 'a'"),
        (["zero-copy", "x"], "'gpubridge bench zero-copy' expects flags only, got 'x'"),
    ],
)
def test_wrong_arguments(capsys, words, text):
    assert main(["bench", *words]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", ["model_transaction_policy { decoupled: true }", "sequence_batching { }"]
)
def test_models_that_cannot_be_loaded_so_are_refused(more):
    document = model_config("A FP32 [1]", "", "max_batch_size: 1 " + more).to_json().encode()
    with pytest.raises(BridgeError, match="bench load"):
        bench_load._config(document, "m")


def test_the_scheme_and_port_of_the_url_are_taken():
    assert Server("https://host:7", 1.0).connect().port == 7
    assert Server("host:8", 1.0).connect().host == "host"
