"""The life of ensembles: what they need to be loaded and ready, and how they end."""

from __future__ import annotations

import os
import signal
import threading

from tests.process.ensembles import ADD, TEXT, infer, write_ensemble
from tests.process.server import running_server, wait_until, write_code_model, write_model


def test_an_ensemble_without_its_members(tmp_path):
    write_model(tmp_path, "add", ADD)
    write_model(tmp_path, "broken", "raise ValueError('no good')")
    for name, step in (
        ("missing", "nothing IN=A > OUT=B"),
        ("version", "add:7 IN=A > OUT=B"),
        ("sick", "broken IN=A > OUT=B"),
        ("circle", "circle A=A > B=B"),
        ("well", "add:1 IN=A > OUT=B"),
    ):
        write_ensemble(tmp_path, name, step)
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with running_server(tmp_path, *flags) as server:
        reasons = {name: row.get("reason", "") for (name, _), row in server.index().items()}
        assert reasons["missing"] == (
            "ensemble missing contains models that are not available or ambiguous: nothing"
        )
        assert reasons["version"] == (
            "ensemble 'version' depends on 'add' whose required version 7 is not loaded."
        )
        assert reasons["sick"].startswith(
            "ensemble 'sick' depends on 'broken' which has no loaded version. Model 'broken' loading "
            "failed with error: version 1 is at UNAVAILABLE state: "
        )
        assert reasons["circle"].startswith("circular dependency between ensembles: circle -> ")
        assert infer(server, "well", {"A": [1.0]}) == {"B": [2.0]}
        assert server.is_ready("well")
        assert not server.is_ready("sick")


def test_an_ensemble_is_ready_when_its_members_are(tmp_path):
    dies = "import os\nif os.path.exists({!r}): os._exit(1)\nself.args = args"
    mark = tmp_path / "mark"
    repository = tmp_path / "models"
    write_code_model(repository, "code", initialize=dies.format(str(mark)))
    write_ensemble(repository, "e", "code IN=A > OUT=B", kind=TEXT)
    with running_server(repository) as server:
        assert server.is_ready("e")
        mark.touch()
        infer(server, "e", {"A": "os._exit(1)"})
        wait_until(lambda: not server.is_ready("code"), "the member to be gone", server)
        assert not server.is_ready("e")
        status, error = infer(server, "e", {"A": ""})
        assert status == 503
        assert error.startswith("in ensemble 'e', ")
        mark.unlink()
        wait_until(lambda: server.is_ready("e"), "the ensemble to be ready", server)


def test_what_is_under_way_is_answered_when_the_server_stops(tmp_path):
    began = tmp_path / "began"
    repository = tmp_path / "models"
    for name in ("code", "other"):
        write_code_model(repository, name)
    write_ensemble(repository, "e", "code IN=A > OUT=t", "other IN=t > OUT=B", kind=TEXT)
    second = "time.sleep(0.3)\nself.said = 'done'"
    first = f"open({str(began)!r}, 'w').close(); time.sleep(0.3); self.said = {second!r}"
    with running_server(repository) as server:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(infer(server, "e", {"A": first})))
        asking.start()
        wait_until(began.exists, "the first member to begin", server)
        os.kill(server.pid, signal.SIGTERM)
        asking.join(30)
        assert answers == [{"B": ["done"]}]
        assert server.process.wait(30) == 0
