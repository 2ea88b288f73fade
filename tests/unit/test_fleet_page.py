"""The page of a fleet: sums of its servers, links to their pages, and what does not answer."""

import http.client
import socket

import pytest

from gpubridge.ray import fleet_endpoint
from gpubridge.ray.fleet_endpoint import FleetEndpoint
from gpubridge.ray.server_address import ServerAddress


def stats(name, good, failed=0):
    counts = {"success": {"count": good, "ns": good * 2_000_000}, "fail": {"count": failed}}
    return {"name": name, "version": "1", "inference_stats": counts}


ANSWERS = {
    "a": (200, {"model_stats": [stats("m<b>", 1000), stats("n", 0)]}),
    "b": (200, {"model_stats": [stats("m<b>", 500, failed=7)]}),
    "c": (503, {"error": "c:8000 gives <no> answer"}),
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_endpoint, "request", lambda address, *_: ANSWERS[address])
    endpoint = FleetEndpoint(tmp_path / "http", tmp_path / "grpc")
    endpoint.servers = tuple(ServerAddress(each, 8000, 8001, 8002, each == "b") for each in ANSWERS)
    connection = http.client.HTTPConnection("fleet")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(tmp_path / "http"))
    connection.request("GET", "/")
    response = connection.getresponse()
    assert (response.status, response.headers["content-type"]) == (200, "text/html")
    yield response.read().decode()
    connection.close()
    endpoint.close()


def test_it_has_servers_with_links_and_models_with_sums(page):
    cells = [line.replace(' class="number"', "") for line in page.splitlines() if "<tr><td" in line]
    link = '<a href="http://{0}:8002/">{0}:8000</a>'
    bad = '<span class="bad">{}</span>'
    wanted = [
        (link.format("a"), "ready", "2", "1,000", "0"),
        (link.format("b"), "draining", "1", "507", bad.format("7")),
        (link.format("c"), bad.format("c:8000 gives &lt;no&gt; answer")),
        ("m&lt;b&gt;", "1", "2", "1,507", bad.format("7"), "2.000", ""),
        ("n", "1", "1", "0", "0", "", ""),
    ]
    assert cells == [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in wanted
    ]
    assert "2 of 3 servers answer" in page
