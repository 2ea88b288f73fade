"""The fixtures of pytest: a model without a server, and servers."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections import Counter
from importlib.metadata import entry_points

import numpy as np
import pytest

from gpubridge.develop.in_process import InProcessModel
from gpubridge.errors import BridgeError
from tests.commands import PYTEST, run_command
from tests.process.forked_commands import servers_are_forked
from tests.process.gates import Gate
from tests.process.model_sources import answering, sending
from tests.process.server import open_files, write_model

MODEL = """
import triton_python_backend_utils as pb_utils
import sibling


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            numbers = request.inputs()[0].as_numpy()
            if numbers.size and numbers.min() < 0:
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if numbers.size and numbers.max() > 100:
                raise ValueError("too much for " + self.name)
            total = numbers * len(requests) + sibling.MORE
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)]))
        return responses

    def finalize(self):
        print("finalized")
"""
BATCHED = "max_batch_size: 8"
STREAM = sending("""
for number in range(min(3, int(value[0]))):
    send(OUT=value * 0 + number)
if value[0] > 3:
    raise pb_utils.TritonModelException("three is too many")
""")
CALLER = answering("""
call = pb_utils.InferenceRequest(
    model_name="numbers", requested_output_names=["OUT"], inputs=request.inputs()
)
return call.exec()
""")


@pytest.fixture
def model(gpubridge_model, tmp_path):
    write_model(tmp_path, "numbers", MODEL, config=BATCHED)
    (tmp_path / "numbers" / "sibling.py").write_text("MORE = 0.5")
    return gpubridge_model(tmp_path / "numbers")


def test_a_model_is_called_like_a_function(model):
    assert model({"IN": np.float32([[1, 2]])})["OUT"].tolist() == [[1.5, 2.5]]
    assert model({"IN": [[3]]})["OUT"].tolist() == [[3.5]]
    assert model({"IN": [[3]]}, parameters={"note": 1})["OUT"].dtype == np.float32


def test_errors_are_those_of_a_client(model):
    with pytest.raises(BridgeError, match=r"^negative$"):
        model({"IN": [[-1]]})
    with pytest.raises(BridgeError, match="ValueError: too much for numbers_0"):
        model({"IN": [[101]]})
    with pytest.raises(BridgeError, match=r"unexpected inference input 'X'"):
        model({"X": np.float32([[1]])})
    with pytest.raises(BridgeError, match="FP64"):
        model({"IN": np.float64([[1]])})
    assert model({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


def test_a_batch_is_executed_as_one(model):
    first, refused, last = model.batch([{"IN": [[1]]}, {"IN": [[-1]]}, {"IN": [[2]]}])
    assert (first["OUT"].item(), last["OUT"].item()) == (3.5, 6.5)
    assert refused.message == "negative"
    with pytest.raises(BridgeError, match="at most max_batch_size 8"):
        model.batch([{"IN": [[1]]}] * 9)


def test_one_model_runs_at_a_time(model, gpubridge_model, tmp_path):
    with pytest.raises(BridgeError, match="another model runs in this process"):
        gpubridge_model(tmp_path / "numbers")
    model.close()
    model.close()
    again = gpubridge_model(tmp_path / "numbers")
    assert again({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


def test_a_dropped_model_makes_place_for_another(model, tmp_path, gpubridge_model):
    # The fixture keeps one; these are kept by nobody, the second but for a cycle.
    model.close()
    for _ in range(2):
        dropped = InProcessModel(tmp_path / "numbers")
        assert dropped({"IN": [[1]]})["OUT"].tolist() == [[1.5]]
        dropped.itself = dropped
        del dropped
    assert gpubridge_model(tmp_path / "numbers")({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


@pytest.fixture
def interrupt():
    """Have the first SIGUSR1 interrupt the main thread, as Ctrl-C does elsewhere."""

    def raise_interrupt(*_):
        if not raise_interrupt.taken:
            raise_interrupt.taken = True
            raise KeyboardInterrupt

    raise_interrupt.taken = False

    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_load_that_is_interrupted_is_given_up(
    model, tmp_path, gpubridge_model, interrupt, monkeypatch
):
    model.close()
    gate = Gate(tmp_path / "gate")
    write_model(tmp_path, "waiting", waiting_in("initialize(self, args)", gate))
    with pytest.raises(KeyboardInterrupt):
        InProcessModel(tmp_path / "waiting")
    with monkeypatch.context() as patched:
        patched.setattr("gpubridge.develop.model_run._CLOSE_SECONDS", 0)
        with pytest.raises(
            BridgeError,
            match=r"'waiting', was closed or given up, but its code(?s:.*)in initialize",
        ):
            gpubridge_model(tmp_path / "numbers")
    gate.open()
    assert gpubridge_model(tmp_path / "numbers")({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


def test_a_close_that_is_interrupted_can_be_repeated(model, tmp_path, gpubridge_model, interrupt):
    model.close()
    gate = Gate(tmp_path / "gate")
    write_model(tmp_path, "waiting", waiting_in("finalize(self)", gate))
    waiting = gpubridge_model(tmp_path / "waiting")
    with pytest.raises(KeyboardInterrupt):
        waiting.close()
    gate.open()
    waiting.close()
    gpubridge_model(tmp_path / "numbers")


@pytest.mark.parametrize("begins", ["before", "after"])
def test_an_interrupt_while_its_thread_is_started(
    model, tmp_path, gpubridge_model, interrupt, monkeypatch, begins
):
    model.close()
    gate = Gate(tmp_path / "gate")
    write_model(tmp_path, "waiting", waiting_in("initialize(self, args)", gate))
    start, engines = threading.Thread.start, []

    def interrupted(thread):
        if engines:
            # Those that the first one starts.
            start(thread)
            return
        engines.append(thread)
        if begins == "before":
            # The model's code raises the interrupt.
            start(thread)
            thread.join()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            InProcessModel(tmp_path / "waiting")
    gate.open()
    again = gpubridge_model(tmp_path / "numbers")
    if begins == "after":
        start(engines[0])
    engines[0].join()
    with pytest.raises(BridgeError, match="another model runs in this process"):
        InProcessModel(tmp_path / "numbers")
    assert again({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


def test_a_thread_that_cannot_be_started(model, tmp_path, gpubridge_model, monkeypatch):
    model.close()
    start = threading.Thread.start
    for refused in range(2):
        started = []

        def limited(thread, refused=refused, started=started):
            if len(started) == refused:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr("threading.Thread.start", limited)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                InProcessModel(tmp_path / "numbers")
    gpubridge_model(tmp_path / "numbers")


def test_a_handler_closes_the_model_while_a_call_begins(model, monkeypatch):
    begin = asyncio.run_coroutine_threadsafe

    def interrupted(*call):
        begun = begin(*call)
        model.close()
        return begun

    monkeypatch.setattr("asyncio.run_coroutine_threadsafe", interrupted)
    try:
        answer = model({"IN": [[1]]})
    except BridgeError as error:
        assert "model 'numbers' of this process is closed" in error.message  # noqa: PT017
    else:
        assert answer["OUT"].tolist() == [[1.5]]


def waiting_in(method, gate):
    """A model whose method interrupts the main thread, and waits at a gate.

    A signal that comes just before the main thread waits for a lock does not wake it: it is sent again.
    """
    return f"""
import fcntl, os, signal, threading


class TritonPythonModel:
    def execute(self, requests):
        pass

    def {method}:
        handler = signal.getsignal(signal.SIGUSR1)
        while not handler.taken:
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait(0.01)
        with open({gate.path!r}) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
"""


def test_every_call_ends_when_the_model_is_closed(model):
    endings = []
    begun = [threading.Event() for _ in range(4)]

    def call(event):
        try:
            while True:
                model({"IN": [[1]]})
                event.set()
        except BridgeError as error:
            endings.append(error.message)

    threads = [threading.Thread(target=call, args=(event,)) for event in begun]
    for thread in threads:
        thread.start()
    for event in begun:
        event.wait()
    model.close()
    for thread in threads:
        thread.join()
    assert len(endings) == 4
    with pytest.raises(BridgeError, match="model 'numbers' of this process is closed"):
        model({"IN": [[1]]})


def test_a_forked_child_calls_no_model_of_its_parent_but_may_have_its_own(model, tmp_path):
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(BridgeError, match=f"runs in the process {os.getppid()}, of which"):
                model({"IN": [[1]]})
            model.close()
            with InProcessModel(tmp_path / "numbers") as own:
                assert own({"IN": [[1]]})["OUT"].tolist() == [[1.5]]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert model({"IN": [[1]]})["OUT"].tolist() == [[1.5]]


def test_a_decoupled_model_gives_a_list(gpubridge_model, tmp_path):
    config = "model_transaction_policy { decoupled: true }"
    write_model(tmp_path, "stream", STREAM, config=config)
    model = gpubridge_model(tmp_path / "stream")
    assert [each["OUT"].tolist() for each in model({"IN": [2]})] == [[0], [1]]
    assert model({"IN": [0]}) == []
    with pytest.raises(BridgeError, match="three is too many"):
        model({"IN": [4]})


def test_models_that_it_calls_are_loaded_by_name(gpubridge_model, tmp_path):
    write_model(tmp_path, "numbers", MODEL)
    (tmp_path / "numbers" / "sibling.py").write_text("MORE = 0")
    write_model(tmp_path, "caller", CALLER)
    model = gpubridge_model(tmp_path / "caller", load_models=["numbers"])
    assert model({"IN": [7]})["OUT"].tolist() == [7]


def test_a_model_that_does_not_load_raises(gpubridge_model, tmp_path):
    write_model(tmp_path, "broken", "import nowhere_to_be_found")
    with pytest.raises(BridgeError, match="No module named 'nowhere_to_be_found'"):
        gpubridge_model(tmp_path / "broken")
    with pytest.raises(BridgeError, match="expected the directory of a model"):
        gpubridge_model(tmp_path / "nothing")
    write_model(tmp_path, "whole", STREAM, config="model_transaction_policy { decoupled: true }")
    assert gpubridge_model(tmp_path / "whole")({"IN": [0]}) == []


def test_many_models_leave_nothing_in_the_process(gpubridge_model, tmp_path, capfd):
    write_model(tmp_path, "numbers", MODEL, config=BATCHED)
    (tmp_path / "numbers" / "sibling.py").write_text("MORE = 0")

    def once():
        model = gpubridge_model(tmp_path / "numbers")
        assert model({"IN": [[1]]})["OUT"].tolist() == [[1]]
        model.close()

    # Those of the tests; see tests/conftest.py.
    hidden = gc.get_freeze_count()
    once()
    gc.collect()
    files, threads = Counter(open_files(os.getpid())), threading.active_count()
    paths = list(sys.path)
    for _ in range(5):
        once()
    gc.collect()
    # Clients of earlier tests may let go of theirs meanwhile.
    assert Counter(open_files(os.getpid())) - files == Counter()
    assert threading.active_count() <= threads
    assert sys.path == paths
    assert 0 < gc.get_freeze_count() <= hidden
    assert "1.model" not in sys.modules
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert threading.active_count() <= threads
    assert capfd.readouterr().out.count("finalized") == 6


def test_a_server_for_a_test(gpubridge_server, tmp_path):
    write_model(tmp_path / "models", "numbers", MODEL)
    (tmp_path / "models" / "numbers" / "sibling.py").write_text("MORE = 0")
    with servers_are_forked():
        server = gpubridge_server(tmp_path / "models", log_verbose=1)
    assert server.infer("numbers", {"IN": np.float32([4])})["OUT"].tolist() == [4]


USE = """
def test_the_package_is_not_imported():
    import sys
    assert [name for name in sys.modules if name.startswith("gpubridge.")] == [
        "gpubridge.develop", "gpubridge.develop.pytest_plugin"
    ]

def test_fixtures(gpubridge_model, gpubridge_server):
    pass

def test_the_model_hangs(gpubridge_model):
    import signal, pytest
    from gpubridge.develop import model_run, pytest_plugin

    def interrupt(*_):
        if not interrupt.taken:
            interrupt.taken = True
            model_run._CLOSE_SECONDS = pytest_plugin._END_SECONDS = 0
            pytest.fail("too late")

    interrupt.taken = False
    signal.signal(signal.SIGUSR1, interrupt)
    gpubridge_model("waiting").close()
"""


def test_the_plugin_imports_nothing_until_it_is_used_and_ends_a_run_whose_model_hangs(tmp_path):
    (tmp_path / "test_use.py").write_text(USE)
    gate = Gate(tmp_path / "gate")
    write_model(tmp_path, "waiting", waiting_in("finalize(self)", gate))
    # Without the other packages' plugins, which cost more than the test.
    (plugin,) = (each for each in entry_points(group="pytest11") if each.name == "gpubridge")
    done = run_command(
        [*PYTEST, "-p", plugin.value, "test_use.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 failed, 2 passed, 1 error" in done.stdout, done.stdout
    assert "model 'waiting' of this process was closed, but still runs after 0 s" in done.stdout
    assert "in finalize" in done.stdout.partition("its thread stands at")[2]
    gate.open()
