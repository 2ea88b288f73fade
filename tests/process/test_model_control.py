"""Loading, replacing and unloading models while the server runs, by clients and by their files."""

import json
import os
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.process.controlled import (
    EXPLICIT,
    ask,
    asked_by_many,
    control,
    states,
    wait_for_answer,
    write,
)
from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_code_model

POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1")


def test_loads_that_fail_say_why_and_leave_what_is_served(tmp_path):
    write(tmp_path)
    write(tmp_path, "bad", initialize="raise ValueError('no way')")
    write(tmp_path, "odd", config="nonsense: 1")
    write(tmp_path, "none", config="version_policy { specific { versions: [7] } }")
    polled = "failed to load '{}', failed to poll from model repository: "
    with running_server(tmp_path, *EXPLICIT, "--load-model", "m") as server:
        for name, status, text in (
            ("nope", 404, polled.format("nope") + "model not found in any model repository"),
            ("odd", 500, polled.format("odd") + "failed to read text proto from "),
            ("none", 400, "load failed for model 'none': at least one version must be available"),
            (
                "bad",
                400,
                "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: Value",
            ),
            ("..", 404, polled.format("..")),
        ):
            told = control(server, "load", name)
            assert told[0] == status, told
            assert told[1].startswith(text), told
        assert states(server, "bad") == {1: "UNAVAILABLE"}
        assert not states(server, "none")
        assert not server.is_ready()
        assert control(server, "unload", "bad") == (200, "")
        assert server.is_ready()
        # A version that fails takes those with it that came up, and a reload changes nothing then.
        write(tmp_path, tag="b")
        write(tmp_path, tag="b", version=2, initialize="raise ValueError('later')")
        assert control(server, "load")[1].startswith("load failed for model 'm': version 2 is at")
        assert ask(server) == "a/1"
        assert states(server)[1] == "READY"
        assert len(server.stubs()) == 1


def test_a_reload_takes_only_what_has_changed(tmp_path):
    for version in (1, 2):
        write(tmp_path, version=version, config="version_policy { all {} }")
    with running_server(tmp_path, *EXPLICIT, "--load-model", "m") as server:
        before = set(server.stubs())
        assert control(server, "load") == (200, "")
        assert set(server.stubs()) == before
        write(tmp_path, tag="b", version=2, config="version_policy { all {} } # as ever")
        assert control(server, "load") == (200, "")
        assert ask(server, version="1") == "a/1"
        assert ask(server) == ask(server, version="2") == "b/2"
        wait_until(
            lambda: sorted(pid in before for pid in server.stubs()) == [False, True],
            "the old stub to end",
            server,
        )
        # The policy alone: versions that stay are not loaded again.
        kept = set(server.stubs())
        config = tmp_path / "m" / "config.pbtxt"
        all_of_them = config.read_text()
        only = "{ specific { versions: [1] } }"
        config.write_text(all_of_them.replace("{ all {} }", only))
        assert control(server, "load") == (200, "")
        told = "Request for unknown model: 'm' version 2 is not at ready state"
        assert ask(server, version="2") == (503, told)
        assert ask(server) == "a/1"
        wait_until(lambda: states(server) == {1: "READY", 2: "UNAVAILABLE"}, "2 to end", server)
        assert json.loads(server.request("GET", "/v2/models/m/config")[2])["version_policy"] == {
            "specific": {"versions": [1]}
        }
        config.write_text(all_of_them)
        assert control(server, "load") == (200, "")
        assert states(server) == {1: "READY", 2: "READY"}
        assert len(kept & set(server.stubs())) == 1
        # A time alone: it may be another file of the same size.
        os.utime(tmp_path / "m" / "1" / "model.py", ns=(1, 1))
        assert control(server, "load") == (200, "")
        wait_until(lambda: not kept & set(server.stubs()), "all to be new", server)


def test_no_request_fails_while_a_model_is_loaded_anew(tmp_path):
    write(tmp_path, tag="0")
    with running_server(tmp_path, *EXPLICIT, "--load-model", "m") as server:
        with asked_by_many(server, 6) as answers:
            for tag in "12":
                write(tmp_path, tag=tag)
                assert control(server, "load") == (200, "")
                wait_for_answer(server, answers, tag)
        assert set(answers) == set("012")
        wait_until(lambda: len(server.stubs()) == 1, "the old stubs to end", server)


def test_a_request_whose_body_is_still_coming_goes_to_the_new_model(tmp_path):
    write(tmp_path)
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with running_server(tmp_path, *EXPLICIT, "--load-model", "m") as server:
        connection = tritonclient.http.InferenceServerClient(server.http_url)
        assert ask(server) == "a/1"
        late = _Late(server, body)
        write(tmp_path, tag="b")
        assert control(server, "load") == (200, "")
        assert "b/1/" in late.finish()
        late = _Late(server, body)
        connection.unload_model("m")
        assert late.finish().startswith("HTTP/1.1 503 ")
        connection.close()


class _Late:
    """A request of which the last byte is missing until :meth:`finish`."""

    def __init__(self, server, body):
        host, port = server.http_url.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=150)
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        self._socket.sendall(head.encode() + body[:-1])
        self._last = body[-1:]
        # Answered by the same loop after it has read the head.
        server.request("GET", "/v2/health/live")

    def finish(self):
        self._socket.sendall(self._last)
        with self._socket, self._socket.makefile("rb") as answer:
            return answer.read().decode()


def test_an_unloaded_model_answers_what_it_has_accepted(tmp_path):
    started = tmp_path / "m" / "started"
    executed, finalized = Gate(tmp_path / "executed"), Gate(tmp_path / "finalized")
    execute = f"open({str(started)!r}, 'w').close(); {executed.wait}"
    write(tmp_path, execute=execute, finalize=finalized.wait)
    with running_server(tmp_path, *EXPLICIT, "--load-model", "m") as server:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in "123"]
        threads[0].start()
        wait_until(started.exists, "the first request to run", server)
        for thread in threads[1:]:
            thread.start()
        # The one whose execution has begun counts until the server hears of its end.
        wait_until(lambda: server.open_requests() == 3, "requests to queue", server)
        assert control(server, "unload") == (200, "")
        assert states(server)[1] == "UNLOADING"
        gone = (404, "Request for unknown model: 'm' has no available versions")
        assert ask(server) == gone
        assert not server.is_ready("m")
        executed.open()
        for thread in threads:
            thread.join()
        assert answers == ["a/1"] * 3
        assert states(server)[1] == "UNLOADING"
        finalized.open()
        wait_until(lambda: states(server)[1] == "UNAVAILABLE", "the end", server)
        assert server.index()["m", 1]["reason"] == "unloaded"
        assert server.stubs() == []
        assert server.is_ready()
        assert control(server, "load") == (200, "")
        assert ask(server) == "a/1"


def test_one_model_loads_while_another_does(tmp_path):
    gate = Gate(tmp_path / "gate")
    write(tmp_path, "slow", initialize=gate.wait)
    write(tmp_path)
    with running_server(tmp_path, *EXPLICIT) as server:
        slow = threading.Thread(target=control, args=(server, "load", "slow"))
        slow.start()
        wait_until(lambda: states(server, "slow") == {1: "LOADING"}, "the load to begin", server)
        assert control(server, "load") == (200, "")
        assert states(server, "slow") == {1: "LOADING"}
        # What comes next for the same model waits its turn.
        with ThreadPoolExecutor(1) as threads:
            unloaded = threads.submit(control, server, "unload", "slow")
            assert control(server, "load") == (200, "")
            assert not unloaded.done()
            gate.open()
            assert unloaded.result() == (200, "")
        slow.join()
        assert states(server, "slow")[1] in ("UNLOADING", "UNAVAILABLE")


@pytest.fixture(scope="module")
def polled(tmp_path_factory):
    """A repository of the models m and other, and a server that polls it, and the directory of a model."""
    repository = tmp_path_factory.mktemp("polled") / "models"
    write(repository)
    write(repository, "other")
    alone = repository.with_name("alone")
    write(alone, "single")
    with running_server(repository, str(alone / "single"), *POLL) as server:
        yield repository, server


def refuse_control(server):
    refused = "explicit model load / unload is not allowed if polling is enabled"
    assert control(server, "load") == control(server, "unload") == (503, refused)
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match=refused) as raised:
            call("m")
        assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert server.is_ready("m")


def test_poll_mode_refuses_control(polled):
    refuse_control(polled[1])


def test_poll_mode_follows_the_files(polled):
    repository, server = polled
    stubs = set(server.stubs())
    for tag in "bc":
        write(repository, tag=tag)
        wait_until(lambda tag=tag: ask(server) == f"{tag}/1", "the change", server)
    wait_until(lambda: len(server.stubs()) == 3, "the old stubs to end", server)
    assert len(stubs & set(server.stubs())) == 2, "only the model that changed is loaded anew"
    write(repository, tag="g", initialize="raise ValueError('broken')")
    wait_until(lambda: "ValueError: broken" in server.log(), "the load to fail", server)
    assert ask(server) == "c/1"
    assert server.is_ready()
    write(repository, "new", "n")
    wait_until(lambda: server.is_ready("new"), "the new model", server)
    assert ask(server, "new") == "n/1"
    shutil.rmtree(repository / "new")
    wait_until(lambda: ask(server, "new")[0] == 404, "the model to go", server)
    assert states(server, "new") == {}
    assert server.log().count("ValueError: broken") == 1, "it is not tried again and again"


def test_one_models_directory_is_polled(polled):
    repository, server = polled
    alone = repository.with_name("alone")
    assert ask(server, "single") == "a/1"
    write(alone, "beside")
    write(alone, "single", tag="b")
    wait_until(lambda: ask(server, "single") == "b/1", "the change", server)
    assert states(server, "beside") == {}


def test_a_repository_that_cannot_be_read_unloads_nothing(polled):
    repository, server = polled
    repository.rename(repository.parent / "elsewhere")
    wait_until(lambda: "failed to poll model repository" in server.log(), "a poll", server)
    (repository.parent / "elsewhere").rename(repository)
    write(repository, "later")
    wait_until(lambda: server.is_ready("later"), "the next poll", server)
    assert server.is_ready("m")
    assert "unloaded 'other'" not in server.log()


def _loads(server):
    return json.loads(server.request("GET", "/v2/gpubridge/status")[2])["loads"]


def test_a_slow_load_is_told_in_the_log_and_the_status_and_no_mode_refuses_control(tmp_path):
    gate = Gate(tmp_path / "gate")
    write(tmp_path, "slow", initialize=gate.wait)
    write_code_model(tmp_path)
    with running_server(tmp_path, ready=False) as server:
        told = "model 'slow' version 1 has been loading for 5 s: instance slow_0 in initialize"
        wait_until(lambda: told in server.log(), "a line of progress", server)
        assert states(server, "slow") == {1: "LOADING"}
        (load,) = _loads(server)
        assert load.pop("since") > 1e9
        step = "instance slow_0 in initialize"
        assert load == {"model": "slow", "version": 1, "step": step, "fraction": None}
        gate.open()
        wait_until(server.is_ready, "the model", server)
        # A document is at most a second old.
        wait_until(lambda: not _loads(server), "no load to be listed", server)
        refuse_control(server)
        for call in ("load", "unload"):
            refused = "explicit model load / unload is not allowed if polling is enabled"
            assert refused in server.ask(f"pb_utils.{call}_model('m')")[1]
        assert server.ask("self.said = pb_utils.is_model_ready('m')") == (200, "True")
