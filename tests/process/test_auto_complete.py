"""Models complete their own configuration, in the process that then runs them; or fail to."""

import json
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from tests.process.completing import FULL, said, write_completing
from tests.process.controlled import EXPLICIT, control, states
from tests.process.ensembles import TEXT, infer, write_ensemble
from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_code_model
from tests.unit.model_configs import cases

BATCHING = "c.set_max_batch_size(8)\nc.set_dynamic_batching()\n" + FULL
ONE = 'backend: "python"\n'
TWO = 'backend: "python"\ninstance_group [ { count: 2 } ]\n'
THREE = 'backend: "python"\ninstance_group [ { count: 3 } ]\n'


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A repository, its server, on which the model good is served, and the process of that."""
    repository = tmp_path_factory.mktemp("serving") / "models"
    repository.mkdir()
    write_code_model(repository, "good")
    with running_server(repository, *EXPLICIT, "--load-model", "good") as server:
        (good,) = server.stubs()
        yield repository, server, good


@pytest.fixture
def served(serving):
    """That repository and server; the model m, which a test writes and loads, is gone after it."""
    repository, server, good = serving
    yield repository, server
    control(server, "unload")
    shutil.rmtree(repository / "m")
    shutil.rmtree(repository.parent / "m.notes")
    wait_until(lambda: server.stubs() == [good], "good to be alone", server)


@pytest.fixture
def stubs(serving):
    """What returns the processes of m."""
    _, server, good = serving
    return lambda: [pid for pid in server.stubs() if pid != good]


def load(server):
    assert control(server, "load") == (200, "")


def config_of(server, path="m"):
    status, _, body = server.request("GET", f"/v2/models/{path}/config")
    assert status == 200, body
    return json.loads(body)


def ask(server, code, model="m", shape=(1,)):
    data = [code] * int(np.prod(shape))
    tensor = {"name": "IN", "datatype": "BYTES", "shape": list(shape), "data": data}
    body = json.dumps({"inputs": [tensor]})
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"][0]


ARGS = "self.said = self.args['model_config']"


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod"])
def test_a_model_without_config_pbtxt_is_served_as_it_says(served, stubs, kind):
    models, server = served
    write_completing(models, complete=BATCHING, kind=kind)
    load(server)
    config = config_of(server)
    assert (config["backend"], config["max_batch_size"]) == ("python", 8)
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert [t["name"] for t in config["input"] + config["output"]] == ["IN", "OUT"]
    metadata = json.loads(server.request("GET", "/v2/models/m")[2])
    assert metadata["inputs"] == [{"name": "IN", "datatype": "BYTES", "shape": [-1, 1]}]
    assert json.loads(ask(server, ARGS, shape=(2, 1))) == config
    # One process did it all, and imported the model once.
    once = stubs()
    assert len(once) == 1
    assert said(models) == dict.fromkeys(("import", "complete", "initialize", "execute"), once)


def test_a_model_that_declares_nothing_is_warned_of(served):
    models, server = served
    write_completing(models, complete="return c")
    load(server)
    assert "model 'm' takes no inputs and returns no outputs: " in server.log()
    request = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'
    status, _, answer = server.request("POST", "/v2/models/m/infer", request)
    assert status == 400
    told = " It has no input(s) 'IN': it declares none, in config.pbtxt or by auto_complete_config."
    assert json.loads(answer)["error"].endswith(told)


def test_the_scheduler_is_the_completed_one(served):
    models, server = served
    write_completing(models, complete=BATCHING, config=ONE)
    load(server)
    gate = Gate(models / "gate")
    with ThreadPoolExecutor(4) as threads:
        # While the model is busy with the first, the others become one batch.
        asked = [threads.submit(ask, server, gate.wait, shape=(1, 1)) for _ in range(4)]
        wait_until(lambda: server.open_requests() == 4, "the requests to be there", server)
        gate.open()
        [answer.result() for answer in asked]
    sizes = [row["batch_size"] for row in server.statistics("m")["batch_stats"]]
    assert max(sizes) > 1


def test_a_decoupled_model_says_so_itself(served):
    models, server = served
    complete = "c.set_model_transaction_policy({'decoupled': True})\n" + FULL
    write_completing(models, complete=complete)
    source = models / "m" / "1" / "model.py"
    source.write_text(
        source.read_text()
        + """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(3):
                sender.send(self.answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    load(server)
    answers = []
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        data = tritonclient.grpc.InferInput("IN", [1], "BYTES")
        data.set_data_from_numpy(np.array([b"self.said = 1"], np.object_))
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("m", [data])
        wait_until(lambda: len(answers) == 3, "three answers", server)
        assert client.get_model_config("m").config.model_transaction_policy.decoupled


def test_one_instance_completes_for_all(served, stubs):
    models, server = served
    write_completing(models, complete=BATCHING, config=THREE)
    load(server)
    noted = said(models)
    assert len(noted["complete"]) == 1
    assert sorted(noted["import"]) == sorted(noted["initialize"]) == sorted(stubs())
    config = config_of(server)
    gate = Gate(models / "gate")
    with ThreadPoolExecutor(3) as threads:
        asked = [
            threads.submit(ask, server, f"{gate.wait}; {ARGS}", shape=(8, 1)) for _ in range(3)
        ]
        wait_until(lambda: server.open_requests() == 3, "the requests to be there", server)
        gate.open()
    assert [json.loads(answer.result()) for answer in asked] == [config] * 3


def test_each_version_completes_its_own(serving, stubs):
    models, server, _ = serving
    policy = 'backend: "python"\nversion_policy { all { } }\n'
    for version in (1, 2):
        complete = f"c.set_max_batch_size({version})\n{FULL}"
        write_completing(models, "two", complete, config=policy, version=version)
    assert control(server, "load", "two") == (200, "")
    sizes = [config_of(server, f"two/versions/{v}")["max_batch_size"] for v in (1, 2)]
    assert sizes == [1, 2]
    assert control(server, "unload", "two") == (200, "")
    wait_until(lambda: not stubs(), "its stubs to end", server)


def test_a_stub_that_starts_again_is_not_asked_again(served, stubs):
    models, server = served
    write_completing(models, complete=BATCHING)
    load(server)
    (pid,) = stubs()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stubs() not in ([], [pid]), "another stub", server)
    wait_until(lambda: server.is_ready("m"), "the model to be ready again", server)
    assert json.loads(ask(server, ARGS, shape=(1, 1))) == config_of(server)
    assert len(said(models)["complete"]) == 1


def test_a_sample_request_warms_the_completed_model_up(served, stubs):
    models, server = served
    warmup = (
        'model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value '
        "{ data_type: TYPE_STRING dims: [ 1 ] zero_data: true } } } ]\n"
    )
    write_completing(models, config=f'backend: "python"\n{warmup}')
    load(server)
    assert said(models)["execute"] == stubs()
    assert ask(server, "self.said = 'warm'") == "warm"


def test_an_ensemble_is_made_of_what_its_members_say(served):
    models, server = served
    write_completing(models)
    write_ensemble(models, "both", "m IN=A > OUT=B", kind=TEXT)
    assert control(server, "load", "both") == (200, "")
    assert infer(server, "both", {"A": "self.said = 2"}) == {"B": ["2"]}
    assert control(server, "unload", "both") == (200, "")


def test_it_may_log_and_ask_where_it_is(served):
    models, server = served
    complete = "pb_utils.Logger.log_warn('planted ' + pb_utils.get_model_dir())\nprint('said')\n"
    complete += FULL
    directory = write_completing(models, complete=complete)
    load(server)
    assert re.search(rf"planted /\S+/{directory.name}/1\n", server.log())
    assert any(line.endswith("] said") for line in server.log().splitlines())


def test_a_reload_keeps_what_was_completed(served):
    models, server = served
    directory = write_completing(models, complete=BATCHING, config=ONE)
    load(server)
    before = config_of(server)
    load(server)
    assert config_of(server) == before
    # Another policy is no other version.
    (directory / "config.pbtxt").write_text('backend: "python"\nversion_policy { all { } }\n')
    load(server)
    assert config_of(server) == {**before, "version_policy": {"all": {}}}
    assert len(said(models)["complete"]) == 1
    write_completing(models, complete="c.set_max_batch_size(3)\n" + FULL)
    load(server)
    assert config_of(server)["max_batch_size"] == 3
    assert len(said(models)["complete"]) == 2


def test_a_clients_configuration_is_completed_too(served):
    models, server = served
    write_completing(models, complete=BATCHING)
    assert control(server, "load", config='{"max_batch_size": 4}') == (200, "")
    assert config_of(server)["max_batch_size"] == 8
    status, error = control(server, "load", config='{"max_batch_size": 16}')
    assert status == 400
    assert "specified max_batch_size 16, but in auto-complete-config function" in error
    # What was served still is.
    assert config_of(server)["max_batch_size"] == 8
    assert ask(server, "self.said = 1", shape=(1, 1)) == "1"


SECOND = 'if len(open(FOLDER + "/log").read().splitlines()) > 1:\n    raise ValueError("planted")'


PLANTED = "ValueError: planted\n\nAt:\n"
UNHEALTHY = "Stub process 'm_0_0' is not healthy. It "


# What else is told of models is compared with Triton's answers.
@pytest.mark.parametrize(
    ("part", "code", "reason"),
    [
        ("complete", "raise ValueError('planted')", PLANTED),
        ("complete", "os._exit(3)", f"{UNHEALTHY}exited with code 3"),
        ("complete", "os.kill(os.getpid(), 9)", f"{UNHEALTHY}was killed by signal 9"),
        (
            "complete",
            "c.as_dict()['x'] = object()\nreturn c",
            "TypeError: Object of type object is not",
        ),
        (
            "complete",
            "c.as_dict()['x'] = 'x' * 5_000_000\nreturn c",
            "auto_complete_config of model 'm' returned a configuration of 5",
        ),
        ("imported", "raise ValueError('planted')", PLANTED),
        ("imported", SECOND, PLANTED),
        ("initialize", "raise ValueError('planted')", PLANTED),
    ],
)
def test_a_completion_that_fails_is_told_and_leaves_nothing(served, part, code, reason):
    models, server = served
    write_completing(models, config=TWO, **{part: code})
    (good,) = server.stubs()
    before = descriptors(server)
    status, error = control(server, "load")
    assert status == 400
    assert f"version 1 is at UNAVAILABLE state: {expected_code(reason)}: {reason}" in error
    assert states(server)[1] == "UNAVAILABLE"
    assert server.stubs() == [good]
    wait_until(lambda: descriptors(server) <= before, "no more open files than before")
    assert server.ask("self.said = 1", "good") == (200, "1")
    # It may be mended.
    write_completing(models, config=ONE)
    assert control(server, "load") == (200, "")
    assert ask(server, "self.said = 1") == "1"
    assert "never retrieved" not in server.log()


def test_a_completion_may_fail_again(served):
    models, server = served
    write_completing(models, complete="raise ValueError('planted again')")
    for _ in range(2):
        status, error = control(server, "load")
        assert (status, "ValueError: planted again" in error) == (400, True), error
        assert states(server)[1] == "UNAVAILABLE"


CHANNEL = """
from gpubridge.transport import messages as wire
frame = sys._getframe()
while not hasattr(frame.f_locals.get("self"), "_settings"):
    frame = frame.f_back
channel = frame.f_locals["self"]._channel.socket
"""


@pytest.mark.parametrize(
    ("lie", "reason"),
    cases("""
channel.send(wire.control_message(wire.Kind.READY))
    the model's process was ready before its configuration was complete
channel.send(wire.control_message(wire.Kind.COMPLETED, config=7))
    sent a malformed message (field 'config': expected a string or null, got 7)
channel.send(wire.control_message(wire.Kind.COMPLETED, config='{'))
    auto_complete_config of model 'm' returned no valid configuration:
channel.close()
    closed its channel
"""),
)
def test_a_process_that_lies_about_its_configuration_does_not_load(served, lie, reason):
    models, server = served
    write_completing(models, complete=f"{CHANNEL}{lie}\nthreading.Event().wait()")
    (good,) = server.stubs()
    status, error = control(server, "load")
    assert (status, reason in error) == (400, True), error
    assert server.stubs() == [good]
    # Twice is once too often, but it is not waited for any more.
    twice = "for _ in range(2):\n    channel.send(wire.control_message(wire.Kind.COMPLETED, config=None))"
    write_completing(models, complete=f"{CHANNEL}{twice}\n{FULL}")
    assert control(server, "load") == (200, "")
    assert config_of(server)["input"] == []
    assert "Traceback" not in server.log()


def descriptors(server):
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def expected_code(reason):
    if reason.startswith("Stub process"):
        return "Unavailable"
    ours = "auto_complete_config of", "model input"
    return "Invalid argument" if reason.startswith(ours) else "Internal"


def test_completion_can_be_switched_off(tmp_path):
    models = tmp_path / "models"
    whole = (
        'backend: "python"\ninput [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
    )
    write_completing(models, "whole", BATCHING, config=whole)
    write_completing(models, "part", config='backend: "python"\ninput [ { name: "IN" } ]\n')
    write_completing(models, "none")
    flags = ("--disable-auto-complete-config", "--exit-on-error=false", "--strict-readiness=false")
    with running_server(models, *flags, own=True) as server:
        assert config_of(server, "whole")["max_batch_size"] == 0
        assert ask(server, "self.said = self.completed_here", "whole") == "False"
        assert "model input 'IN' must specify 'data_type' for part" in server.log()
        assert "failed to open text file for read" in server.log()
        for name in ("whole", "part", "none"):
            assert said(models, name)["complete"] == []
        # Without strict readiness, a server with models that failed is ready.
        assert server.is_ready()
        assert not server.is_ready("part")


def test_a_completion_that_lasts_is_told_and_holds_up_no_other_model(served, tmp_path):
    models, server = served
    gate = Gate(tmp_path / "gate")
    write_completing(models, complete=f"{gate.wait}\n{FULL}", config=THREE)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(control, server, "load")
        try:
            told = "s: instances m_0_0, m_0_1, m_0_2 in auto_complete_config"
            wait_until(lambda: told in server.log(), "a line that says so", server)
            assert server.ask("self.said = 1", "good") == (200, "1")
        finally:
            gate.open()
        assert loading.result() == (200, "")
