"""Models that load, unload and ask after models."""

from __future__ import annotations

import json

import pytest

from tests.process.controlled import CONFIG, EXPLICIT, ask, control, source, write
from tests.process.server import running_server, wait_until, write_code_model

SAID = "Failed to process the request for model 'm_0', message: "


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_code_model(repository)
    write(repository, "other")
    write(repository, "broken", initialize="1 / 0")
    with running_server(repository, *EXPLICIT, "--load-model=m") as running:
        yield running


def run(server, code, model="m"):
    """Have a model say a value, or what was raised."""
    status, said = server.ask(
        f"try:\n    self.said = {code}\n"
        "except (TypeError, pb_utils.TritonModelException) as error:\n"
        "    self.said = type(error).__name__ + ': ' + str(error)",
        model,
    )
    assert status == 200, said
    return said


def failed(what, text):
    return f"TritonModelException: Failed to {what}: {SAID}{text}"


def test_a_model_is_loaded_asked_after_and_unloaded(server):
    assert run(server, "pb_utils.is_model_ready('other')") == "False"
    assert run(server, "pb_utils.load_model('other')") == "None"
    assert run(server, "pb_utils.is_model_ready('other')") == "True"
    assert run(server, "pb_utils.is_model_ready('other', '1')") == "True"
    assert run(server, "pb_utils.is_model_ready(model_name='other', model_version='2')") == "False"
    assert ask(server, "other") == "a/1"
    assert run(server, "pb_utils.load_model('other')") == "None"
    assert run(server, "pb_utils.unload_model('other', unload_dependents=True)") == "None"
    assert run(server, "pb_utils.is_model_ready('other')") == "False"
    assert run(server, "pb_utils.unload_model('nope')") == "None"


def test_a_model_is_loaded_from_what_it_is_sent(server):
    code = source("sent")
    files = {"file:1/model.py": code, "file:1/large.bin": "x" * 300_000, "file:1/empty": ""}
    call = (
        f"pb_utils.load_model('sent', {CONFIG!r}, {{k: v.encode() for k, v in {files!r}.items()}})"
    )
    assert run(server, call) == "None"
    assert ask(server, "sent") == "sent/1"
    assert run(server, "pb_utils.unload_model('sent')") == "None"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "pb_utils.load_model('nope')",
            failed("load model", "failed to load 'nope', failed to poll from model repository"),
        ),
        ("pb_utils.load_model('broken')", failed("load model", "load failed for model 'broken': ")),
        (
            "pb_utils.load_model('other', config='{')",
            failed("load model", "failed to load 'other', failed to poll from model repository"),
        ),
        (
            "pb_utils.load_model('other', '', [1])",
            (
                "TritonModelException: failed to load model 'other', files should be a dictionary of "
                "file paths and file contents"
            ),
        ),
        (
            "pb_utils.load_model('other', files={'file:1/model.py': 1})",
            (
                "TritonModelException: failed to load model 'other', files should be a dictionary of "
                "file paths and file contents"
            ),
        ),
        ("pb_utils.load_model('other', files={'file:1/model.py': b'1'})", failed("load model", "")),
        (
            "pb_utils.load_model('other', '{}', files={'file:../x': b'1'})",
            failed("load model", ""),
        ),
        (
            "pb_utils.load_model('other', '{}', files={'file:1/\\udc80': b'1'})",
            "TypeError: expected str without lone surrogates for a path of files",
        ),
        ("pb_utils.load_model(None)", "TypeError: "),
        ("pb_utils.load_model('other', config={})", "TypeError: "),
        ("pb_utils.unload_model(None)", "TypeError: "),
        ("pb_utils.unload_model('other', None)", "TypeError: "),
        ("pb_utils.is_model_ready('other', 1)", "TypeError: "),
        (
            "pb_utils.is_model_ready('other', 'x')",
            failed(
                "check model readiness",
                "failed to get model version from specified version string 'x' (details: stol), "
                "version should be an integral value > 0",
            ),
        ),
        ("pb_utils.is_model_ready('')", "False"),
    ],
)
def test_failures_have_tritons_texts(server, code, said):
    assert run(server, code).startswith(said)


def test_a_model_may_load_and_unload_itself_while_it_executes(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path, *EXPLICIT, "--load-model=m") as server:
        assert (
            run(server, "pb_utils.load_model('m'), pb_utils.is_model_ready('m')") == "(None, True)"
        )
        # Changed: the new one comes up beside the one that asks for it.
        write_code_model(tmp_path, initialize="self.changed = 1")
        assert run(server, "pb_utils.load_model('m')") == "None"
        assert run(server, "self.changed") == "1"
        assert (
            run(server, "pb_utils.unload_model('m'), pb_utils.is_model_ready('m')")
            == "(None, False)"
        )
        wait_until(lambda: "Finalize" in server.log(), "the model to end", server)


def test_only_in_explicit_mode(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        refused = "explicit model load / unload is not allowed if polling is enabled"
        assert run(server, "pb_utils.load_model('m')") == failed("load model", refused)
        assert run(server, "pb_utils.unload_model('m')") == failed("unload model", refused)
        assert run(server, "pb_utils.is_model_ready('m')") == "True"


LOADS = """
try:
    pb_utils.{call}
    self.answer = "done"
except pb_utils.TritonModelException as error:
    self.answer = str(error)
print(args["model_name"], "was told:", self.answer.replace(chr(10), " "), flush=True)
"""


def test_a_model_that_loads_another_in_initialize(tmp_path):
    write_code_model(tmp_path, "a", initialize=LOADS.format(call="load_model('b')"))
    write_code_model(tmp_path, "b", initialize=LOADS.format(call="load_model('c')"))
    write_code_model(tmp_path, "c")
    with running_server(tmp_path, *EXPLICIT, "--load-model=a") as server:
        assert {name for name, _ in server.index() if server.is_ready(name)} == set("abc")
        assert "a was told: done" in server.log()
    # Where all begin at the same time, too.
    with running_server(tmp_path, *EXPLICIT, "--load-model=*") as server:
        assert {name for name, _ in server.index() if server.is_ready(name)} == set("abc")


@pytest.mark.parametrize("call", ["load_model('a')", "unload_model('a')"])
def test_a_model_that_waits_for_itself_in_initialize_is_told(tmp_path, call):
    write_code_model(tmp_path, "a", initialize=LOADS.format(call=call))
    with running_server(tmp_path, *EXPLICIT, "--load-model=a") as server:
        assert "a was told: Failed to" in server.log()
        assert "deadlock: the initialize of model 'a' waits" in server.log()
        assert server.is_ready("a")


@pytest.mark.parametrize("at_once", [True, False])
def test_models_that_load_each_other_in_initialize_are_told(tmp_path, at_once):
    for name, other in ("ab", "bc", "ca"):
        write_code_model(
            tmp_path,
            name,
            initialize=LOADS.format(call=f"load_model('{other}')") + "time.sleep(0.2)",
        )
    loaded = ["--load-model=*"] if at_once else []
    with running_server(tmp_path, *EXPLICIT, *loaded) as server:
        if not at_once:
            assert control(server, "load", "a") == (200, "")
        assert all(server.is_ready(name) for name in "abc")
        assert "deadlock" in server.log()


def test_a_model_that_loads_an_ensemble_of_itself_in_initialize_is_told(tmp_path):
    write_code_model(tmp_path, "a", initialize=LOADS.format(call="load_model('e')"))
    (tmp_path / "e" / "1").mkdir(parents=True)
    string = "data_type: TYPE_STRING dims: [1]"
    (tmp_path / "e" / "config.pbtxt").write_text(
        f'platform: "ensemble"\ninput [{{ name: "IN" {string} }}]\noutput [{{ name: "OUT" {string} }}]\n'
        'ensemble_scheduling { step [{ model_name: "a" model_version: -1\n'
        'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }] }\n'
    )
    with running_server(tmp_path, *EXPLICIT, "--load-model=a") as server:
        assert "a was told: Failed to load model" in server.log()
        assert server.is_ready("a")
        assert control(server, "load", "e") == (200, "")


def test_a_load_goes_on_when_its_asker_is_gone(tmp_path):
    write_code_model(tmp_path)
    write_code_model(tmp_path, "slow", initialize="time.sleep(1)")
    with running_server(tmp_path, *EXPLICIT, "--load-model=m") as server:
        code = """
threading.Thread(target=pb_utils.load_model, args=("slow",)).start()
while pb_utils.is_model_ready("m") and not os.path.exists("{0}"):
    time.sleep(0.01)
os._exit(3)
"""
        mark = tmp_path / "mark"
        write_code_model(
            tmp_path, "slow", initialize=f"open({str(mark)!r}, 'w').close(); time.sleep(1)"
        )
        status, said = server.ask(code.format(mark))
        assert (status, "exited with code 3" in said) == (503, True)
        wait_until(lambda: server.is_ready("slow"), "the model that it asked for", server)
        wait_until(lambda: server.is_ready("m"), "the model itself", server)
        assert json.loads(server.request("GET", "/v2/models/slow")[2])["versions"] == ["1"]


def test_the_server_stops_while_a_model_waits_for_a_load(tmp_path):
    write_code_model(tmp_path)
    write_code_model(tmp_path, "slow", initialize="time.sleep(600)")
    with running_server(tmp_path, *EXPLICIT, "--load-model=m") as server:
        code = """
def load():
    try:
        pb_utils.load_model("slow")
    except pb_utils.TritonModelException as error:
        print("the load ended:", error, flush=True)
self.loader = threading.Thread(target=load)
self.loader.start()
"""
        assert server.ask(code)[0] == 200
        wait_until(lambda: "loading: slow:1" in server.log(), "the load to begin", server)
        assert server.stop() == 0
        assert "the load ended: Failed to load model" in server.log()
