"""The status document: what it tells of models, and that it costs nobody else."""

import asyncio
import gzip
import json
import os
import signal

import pytest

from tests.process.controlled import control, only
from tests.process.ensembles import ADD, write_ensemble
from tests.process.flag_sets import BARE
from tests.process.server import (
    running_server,
    send_request,
    wait_until,
    write_code_model,
    write_model,
)

PATH = "/v2/gpubridge/status"
NUMBER = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]})


def fetch(url, path=PATH, headers=None):
    """Send one GET; returns status, headers and body."""
    return send_request(url, "GET", path, None, headers)


def status(server):
    """Return the document, and its models by name."""
    code, _, body = fetch(server.metrics_url)
    assert code == 200
    document = json.loads(body)
    return document, {model["name"]: model for model in document["models"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    write_code_model(repository)
    write_model(repository, "add", ADD)
    write_model(repository, "fresh", ADD)
    write_ensemble(repository, "chain", "add IN=A > OUT=t", "add IN=t > OUT=B")
    write_ensemble(repository, "nested", "chain A=A > B=B")
    write_model(repository, "broken", "import none")
    loaded = "add", "chain", "m", "nested", "fresh"
    with running_server(repository, *only(*loaded), own=True) as server:
        assert control(server, "load", "broken")[0] == 400
        yield server


def model_status(server, name, holds=lambda model: True):
    """Return the row of a model once a document has one for which ``holds``."""
    found = {}

    def is_there():
        found.update(status(server)[1][name])
        return holds(found)

    wait_until(is_there, f"the status of {name}", server)
    return found


def infer(server, model, body=NUMBER):
    answer = server.request("POST", f"/v2/models/{model}/infer", body)
    assert answer[0] == 200, answer[2]


def test_the_server_and_its_models(server):
    document, models = status(server)
    assert document["schema"] == 1
    assert document["server"]["pid"] == server.pid
    assert document["server"]["ready"] is False
    assert document["server"]["memory"]["pss_bytes"] > 1 << 20
    for name in ("add", "broken", "chain", "fresh", "m", "nested"):
        assert models[name]["state"] == ("UNAVAILABLE" if name == "broken" else "READY")
    assert "none" in models["broken"]["reason"]
    (instance,) = models["m"]["instances"]
    assert instance["state"] == "ready"
    assert instance["pid"] in server.stubs()
    assert instance["python"].startswith("3.")
    measured = model_status(server, "m", lambda m: m["instances"][0]["memory"])
    assert measured["instances"][0]["memory"]["rss_bytes"] > 1 << 20


def test_where_the_time_of_requests_went(server):
    before = status(server)[1]["m"]["statistics"]
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["time.sleep(0.3)"]}
    infer(server, "m", json.dumps({"id": "the slow one", "inputs": [tensor]}))
    model = model_status(server, "m", lambda m: m["statistics"]["success"] == before["success"] + 1)
    after = model["statistics"]
    assert after["since"] == before["since"]
    assert after["execute_us"] - before["execute_us"] >= 300_000
    slow = model["slowest"][0]
    assert (slow["id"], slow["model"]) == ("the slow one", "m")
    assert slow["request_us"] >= slow["execute_us"] >= 300_000
    document, _ = status(server)
    bounds = document["duration_bounds_us"]
    index, _ = after["durations"][-1]
    assert bounds[index - 1] < slow["request_us"] <= bounds[index]
    assert slow in document["slowest"]


def test_errors_with_the_traceback_of_the_model(server):
    for number in range(3):
        server.ask("raise KeyError('<script>missing')")
        server.ask(f"raise ValueError({number})")
    model = model_status(server, "m", lambda m: len(m["errors"]) == 4)
    errors = {error["text"].partition("\n")[0]: error for error in model["errors"]}
    (repeated,) = (error for text, error in errors.items() if "missing" in text)
    assert repeated["requests"] == 3
    assert "model.py" in repeated["text"]
    assert "ValueError" in model["errors"][0]["text"]
    assert model["errors"][0]["text"].partition("\n")[0].endswith("2")
    assert model["statistics"]["failures"] == {"BACKEND": 6}
    for number in range(10):
        server.ask(f"raise ValueError('{number}' * 100_000)")
    model = model_status(server, "m", lambda m: m["statistics"]["failures"]["BACKEND"] == 16)
    assert len(model["errors"]) == 5
    assert all(len(error["text"]) <= 4000 for error in model["errors"])


def test_restarts_and_their_reasons(server):
    server.ask("sys.stderr.write('the last word\\n'); os._exit(7)")
    model = model_status(
        server, "m", lambda m: m["ready"] and m["instances"][0].get("restarts") == 1
    )
    (end,) = model["instances"][0]["ends"]
    assert "exited with code 7" in end["reason"]
    assert end["output"][-1] == "the last word"
    assert "exited with code 7" in model["errors"][0]["text"]
    os.kill(model["instances"][0]["pid"], signal.SIGKILL)
    model = model_status(
        server, "m", lambda m: m["ready"] and m["instances"][0].get("restarts") == 2
    )
    assert "signal 9 (SIGKILL)" in model["instances"][0]["ends"][-1]["reason"]


def test_graphs_of_ensembles(server):
    for _ in range(3):
        infer(server, "nested", NUMBER.replace("IN", "A"))
    chain = model_status(server, "chain", lambda m: m["statistics"]["success"] == 3)
    steps, edges = chain["ensemble"]["steps"], chain["ensemble"]["edges"]
    assert [(step["model"], step["count"]) for step in steps] == [("add", 3), ("add", 3)]
    assert all(step["step_us"] > 0 for step in steps)
    assert [(edge["from"], edge["to"], edge["tensors"], edge["count"]) for edge in edges] == [
        (None, 0, ["A"], 3),
        (0, 1, ["t"], 3),
        (1, None, ["B"], 3),
    ]
    nested = status(server)[1]["nested"]
    assert nested["statistics"]["success"] == 3
    assert sum(count for _, count in nested["statistics"]["durations"]) == 3


def test_both_ports_and_codings(server):
    code, headers, body = fetch(server.http_url)
    assert code == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Type"] == "application/json"
    code, headers, packed = fetch(server.metrics_url, headers={"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed)).keys() == json.loads(body).keys()
    assert server.request("POST", PATH, "{}")[0] == 405


def rows_after_a_request(server):
    """Infer once with one model; return the rows that have changed since, by name, and those of before."""
    document, models = status(server)
    assert document["complete"] is True
    infer(server, "add")

    def changed():
        path = f"{PATH}?after={document['number']}"
        code, _, body = fetch(server.metrics_url, path)
        assert code == 200
        latest.update(json.loads(body))
        return latest["models"]

    latest = {}
    wait_until(changed, "a change")
    assert latest["complete"] is False
    return {model["name"]: model for model in latest["models"]}, models


def test_only_what_has_changed_since_an_earlier_document(server):
    wait_until(lambda: not status(server)[1]["m"]["pending"], "no request")
    rows, models = rows_after_a_request(server)
    assert rows["add"]["statistics"]["success"] == models["add"]["statistics"]["success"] + 1
    for _ in range(2):
        if not rows.keys().isdisjoint(("broken", "chain")):
            # Each is also made again every two minutes, the two a second apart.
            rows, _ = rows_after_a_request(server)
    # Of the others at most the memory was measured again.
    assert "broken" not in rows
    assert "chain" not in rows
    for unknown in ("1", "x", "9" * 30):
        _, _, body = fetch(server.metrics_url, f"{PATH}?after={unknown}")
        assert json.loads(body)["complete"] is True
        assert len(json.loads(body)["models"]) == len(models)


def test_the_past_is_there_for_who_comes_later(server):
    infer(server, "add")

    def history():
        _, _, body = fetch(server.metrics_url, f"{PATH}?history=1")
        document = json.loads(body)
        assert document["complete"] is True
        assert document["server"]["started"] <= document["history"]["begin"] <= document["time"]
        return {model["name"]: model for model in document["history"]["models"]}

    wait_until(lambda: "add" in history(), "a step of ten seconds", server)
    past, now = history()["add"], status(server)[1]["add"]["statistics"]
    assert past["since"] == now["since"]
    assert past["sums"]["success"] == sum(step.get("success", 0) for step in past["steps"])
    assert "history" not in status(server)[0]


def test_hundreds_of_tabs_cost_nobody_else(server):
    host, _, port = server.metrics_url.rpartition(":")

    async def tab():
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % PATH.encode()
        )
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return head.startswith(b"HTTP/1.1 200 ") and json.loads(body)["time"]

    async def tabs():
        requests = [asyncio.to_thread(infer, server, "add") for _ in range(50)]
        return await asyncio.gather(*(tab() for _ in range(300)), *requests)

    answers = asyncio.run(tabs())[:300]
    assert all(answers)
    # They share documents.
    assert len(set(answers)) < 100


def test_switched_off(tmp_path):
    with running_server(tmp_path, *BARE) as server:
        assert server.request("GET", PATH)[0] == 404
        for path in (PATH, "/", "/v2/models/add"):
            assert fetch(server.metrics_url, path)[0] == 404
        assert fetch(server.metrics_url, "/metrics")[0] == 200


def test_counters_begin_anew_with_each_load(server):
    infer(server, "fresh")
    first = model_status(server, "fresh", lambda m: m["statistics"]["success"] == 1)
    assert control(server, "unload", "fresh") == (200, "")
    model_status(server, "fresh", lambda m: m["state"] == "UNAVAILABLE")
    assert "statistics" not in status(server)[1]["fresh"]
    assert control(server, "load", "fresh") == (200, "")
    again = model_status(server, "fresh", lambda m: m["state"] == "READY")["statistics"]
    assert (again["success"], again["durations"]) == (0, [])
    assert again["since"] > first["statistics"]["since"]
