"""Models that load, unload and ask after models."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.controlled import CONFIG, EXPLICIT, ask, control, source, write
from tests.process.ensembles import TEXT, write_ensemble
from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_code_model
from tests.unit.model_configs import cases
from tests.waits import polling

SAID = "Failed to process the request for model 'm_0', message:"


@pytest.fixture(scope="module")
def server(repository):
    """A server with the model m; others are loaded by their tests."""
    write_code_model(repository)
    write(repository, "other")
    write(repository, "broken", initialize="1 / 0")
    with running_server(repository, *EXPLICIT, "--load-model=m") as running:
        yield running


@pytest.fixture
def folder(repository, server):
    """The repository of that server; the models that a test adds to it are gone after it."""
    before = set(repository.iterdir())
    yield repository
    for added in set(repository.iterdir()) - before:
        control(server, "unload", added.name)
        shutil.rmtree(added)


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
    cases(
        """
load_model('nope')
    $LOAD failed to load 'nope', failed to poll from model repository
load_model('broken')
    $LOAD load failed for model 'broken':
load_model('other', config='{')
    $LOAD failed to load 'other', failed to poll from model repository
load_model('other', files={'file:1/model.py': 1})
    $MODEL failed to load model 'other', files should be a dictionary of file paths and file contents
load_model('other', files={'file:1/model.py': b'1'})
    $LOAD
load_model('other', '{}', files={'file:../x': b'1'})
    $LOAD
load_model('other', '{}', files={'file:1/\\udc80': b'1'})
    TypeError: expected str without lone surrogates for a path of files
load_model(None)
    TypeError:
load_model('other', config={})
    TypeError:
unload_model(None)
    TypeError:
unload_model('other', None)
    TypeError:
is_model_ready('')
    False
""",
        {
            "LOAD": f"TritonModelException: Failed to load model: {SAID}",
            "MODEL": "TritonModelException:",
        },
    ),
)
def test_failures_have_tritons_texts(server, code, said):
    assert run(server, f"pb_utils.{code}").startswith(said)


def test_a_model_may_load_and_unload_itself_while_it_executes(server, folder):
    def is_loaded(code):
        return run(server, f"pb_utils.{code}('own'), pb_utils.is_model_ready('own')", "own")

    def write_own(initialize):
        write_code_model(
            folder, "own", initialize=initialize, finalize="print('Own end', flush=True)"
        )

    write_own("self.changed = 0")
    assert control(server, "load", "own") == (200, "")
    assert is_loaded("load_model") == "(None, True)"
    # Changed: the new one comes up beside the one that asks for it.
    write_own("self.changed = 'yes'")
    assert run(server, "pb_utils.load_model('own')", "own") == "None"
    assert run(server, "self.changed", "own") == "yes"
    wait_until(lambda: server.log().count("Own end") == 1, "the old one to end", server)
    assert is_loaded("unload_model") == "(None, False)"
    wait_until(lambda: server.log().count("Own end") == 2, "the model to end", server)


LOADS = """
try:
    pb_utils.{call}
    self.answer = "done"
except pb_utils.TritonModelException as error:
    self.answer = str(error)
print(args["model_name"], "was told:", self.answer.replace(chr(10), " "), flush=True)
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_a_model_that_loads_another_in_initialize(server, folder, at_once):
    write_code_model(folder, "a", initialize=LOADS.format(call="load_model('b')"))
    write_code_model(folder, "b", initialize=LOADS.format(call="load_model('c')"))
    write_code_model(folder, "c")
    load(server, "abc" if at_once else "a")
    assert all(server.is_ready(name) for name in "abc")
    assert "a was told: done" in server.log()


def load(server, names):
    """Load models, all at the same time."""
    with ThreadPoolExecutor(len(names)) as pool:
        loads = [pool.submit(control, server, "load", name) for name in names]
        assert [each.result() for each in loads] == [(200, "")] * len(names)


@pytest.mark.parametrize("call", ["load_model", "unload_model"])
def test_a_model_that_waits_for_itself_in_initialize_is_told(server, folder, call):
    name = f"{call}s_itself"
    write_code_model(folder, name, initialize=LOADS.format(call=f"{call}('{name}')"))
    assert control(server, "load", name) == (200, "")
    assert f"{name} was told: Failed to" in server.log()
    assert f"deadlock: the initialize of model '{name}' waits" in server.log()
    assert server.is_ready(name)


@pytest.mark.parametrize("at_once", [True, False])
def test_models_that_load_each_other_in_initialize_are_told(server, folder, at_once):
    for name, other in ("de", "ef", "fd"):
        write_code_model(folder, name, initialize=LOADS.format(call=f"load_model('{other}')"))
    load(server, "def" if at_once else "d")
    assert all(server.is_ready(name) for name in "def")
    assert "deadlock" in server.log()


def test_a_model_that_loads_an_ensemble_of_itself_in_initialize_is_told(server, folder):
    write_code_model(folder, "member", initialize=LOADS.format(call="load_model('e')"))
    write_ensemble(folder, "e", "member IN=A > OUT=B", kind=TEXT)
    assert control(server, "load", "member") == (200, "")
    assert "member was told: Failed to load model" in server.log()
    assert server.is_ready("member")
    assert control(server, "load", "e") == (200, "")


def test_a_load_goes_on_when_its_asker_is_gone(server, folder):
    write_code_model(folder, "asker")
    mark = folder / "asker" / "mark"
    gate = Gate(folder / "asker" / "gate")
    initialize = f"open({str(mark)!r}, 'w').close(); {gate.wait}"
    write_code_model(folder, "slow", initialize=initialize)
    assert control(server, "load", "asker") == (200, "")
    code = """
threading.Thread(target=pb_utils.load_model, args=("slow",)).start()
{0}
os._exit(3)
"""
    begun = f"os.path.exists({str(mark)!r}) or not pb_utils.is_model_ready('asker')"
    status, said = server.ask(code.format(polling(begun)), "asker")
    assert (status, "exited with code 3" in said) == (503, True)
    gate.open()
    wait_until(lambda: server.is_ready("slow"), "the model that it asked for", server)
    wait_until(lambda: server.is_ready("asker"), "the model itself", server)
    assert json.loads(server.request("GET", "/v2/models/slow")[2])["versions"] == ["1"]
