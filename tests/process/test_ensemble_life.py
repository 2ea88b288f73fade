"""The life of ensembles: what they need to be loaded and ready, and how they end."""

import threading

import pytest

from tests.process.controlled import EXPLICIT, control, states
from tests.process.ensembles import ADD, TEXT, infer, write_ensemble
from tests.process.server import running_server, wait_until, write_code_model, write_model


@pytest.fixture
def around(tmp_path):
    """A repository with the ensemble `around` of an ensemble `e` of two members, `add` and `other`."""
    for name in ("add", "other"):
        write_model(tmp_path, name, ADD)
    write_ensemble(tmp_path, "e", "add IN=A > OUT=t", "other IN=t > OUT=B")
    write_ensemble(tmp_path, "around", "e A=A > B=B")
    return tmp_path


def test_an_ensemble_is_ready_when_its_members_are(tmp_path):
    dies = "import os\nif os.path.exists({!r}): os._exit(1)\nself.args = args"
    mark = tmp_path / "mark"
    repository = tmp_path / "models"
    write_code_model(repository, "code", initialize=dies.format(str(mark)))
    write_ensemble(repository, "e", "code IN=A > OUT=B", kind=TEXT)
    with running_server(repository, *EXPLICIT, "--load-model=e") as server:
        assert server.is_ready("e")
        mark.touch()
        infer(server, "e", {"A": "os._exit(1)"})
        wait_until(lambda: not server.is_ready("code"), "the member to be gone", server)
        assert not server.is_ready("e")
        status, error = infer(server, "e", {"A": ""})
        assert status == 503
        assert error.startswith("in ensemble 'e', ")
        # A load tries it at once, whatever its back-off is, and says what came of it.
        status, error = control(server, "load", "code")
        assert status == 400
        assert "exited with code 1" in error
        mark.unlink()
        assert control(server, "load", "e") == (200, "")
        assert server.is_ready("e")


def test_members_come_and_go_with_the_ensemble(around):
    write_ensemble(around, "circle", "circle A=A > B=B")
    with running_server(around, *EXPLICIT) as server:
        assert control(server, "load", "around") == (200, "")
        assert infer(server, "around", {"A": [1.0]}) == {"B": [3.0]}
        assert states(server, "other") == {1: "READY"}
        assert control(server, "unload", "other") == (200, "")
        wait_until(
            lambda: not server.stubs() or len(server.stubs()) == 1, "its stub to end", server
        )
        status, _ = infer(server, "e", {"A": [1.0]})
        assert status == 404
        assert control(server, "load", "e") == (200, "")
        assert infer(server, "e", {"A": [1.0]}) == {"B": [3.0]}
        status, error = control(server, "load", "circle")
        assert status == 400
        assert "circular dependency between ensembles: circle -> ... -> circle -> circle" in error


def test_an_ensemble_comes_back_with_its_member(around):
    write_ensemble(around, "unwanted", "add IN=A > OUT=B")
    with running_server(around, *EXPLICIT) as server:
        for name in ("around", "unwanted", "e"):
            assert control(server, "load", name) == (200, "")
        for name in ("other", "add"):
            assert control(server, "unload", name) == (200, "")
        wait_until(lambda: not server.stubs(), "the stubs to end", server)
        assert control(server, "unload", "unwanted") == (200, "")
        assert control(server, "load", "other") == (200, "")
        assert infer(server, "e", {"A": [1.0]})[0] == 404
        assert control(server, "load", "add") == (200, "")
        assert infer(server, "around", {"A": [1.0]}) == {"B": [3.0]}
        assert states(server, "e") == {1: "READY"}
        assert not server.is_ready("unwanted")


def test_a_member_that_is_loaded_anew_fails_no_request(tmp_path):
    write_model(tmp_path, "add", ADD)
    write_ensemble(tmp_path, "e", "add IN=A > OUT=t", "add IN=t > OUT=B")
    with running_server(tmp_path, *EXPLICIT) as server:
        assert control(server, "load", "e") == (200, "")
        answers, over = [], threading.Event()

        def ask():
            while not over.is_set():
                answers.append(infer(server, "e", {"A": [1.0]}))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            for step in (2, 3):
                source = ADD.replace("+ 1", f"+ {step}")
                (tmp_path / "add" / "1" / "model.py").write_text(source)
                assert control(server, "load", "add") == (200, "")
                begin = len(answers)
                wait_until(
                    lambda new={"B": [1.0 + 2 * step]}, at=begin: new in answers[at:],
                    "answers of the new member",
                    server,
                )
        finally:
            over.set()
            for thread in threads:
                thread.join()
        # Both steps of a request are of one member, the old or the new one.
        assert all(type(answer) is dict for answer in answers)
        assert {answer["B"][0] for answer in answers} == {3.0, 5.0, 7.0}
