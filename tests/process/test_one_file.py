"""Models of one file: @gpubridge.model, served by the engine that serves repositories."""

import json
import os
import queue
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import gpubridge
from benchmarks.varied_models import MODELS, write_repository
from gpubridge.develop import child_server
from gpubridge.errors import BridgeError
from gpubridge.one_file.adapter import load_file
from gpubridge.one_file.declare import declaration_of
from tests.commands import run_command
from tests.process.forked_commands import run_forked, servers_are_forked
from tests.process.model_sources import answering
from tests.process.raw_http import connected
from tests.process.server import alive, wait_until, write_model

APP = """
import asyncio
import numpy as np
import gpubridge
import triton_python_backend_utils as pb_utils
from beside import FACTOR


@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def times(X):
    return FACTOR * X


@gpubridge.model(
    inputs={"X": ("FP32", [2])}, outputs={"Y": ("FP32", [2]), "TOGETHER": (np.int32, [1])},
    batching={
        "max_batch_size": 8,
        "preferred_batch_size": [4],
        "max_queue_delay_microseconds": 20_000_000,
    },
)
def batched(X, batch):
    for index, request in enumerate(batch.requests):
        if "refuse" in request.parameters():
            batch.errors[index] = pb_utils.TritonError("refused")
    return X + 1, np.full((len(X), 1), len(batch.requests), np.int32)


@gpubridge.model(inputs={"X": np.float32}, outputs={"A": np.float32, "B": np.float32}, batching=True)
def refusing(X):
    return pb_utils.TritonError("refused", pb_utils.TritonError.INVALID_ARG)


@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32}, batching=True)
async def refusing_later(X):
    return pb_utils.TritonError("refused", pb_utils.TritonError.INVALID_ARG)


@gpubridge.model(
    inputs={"X": np.float32}, outputs={"SUM": np.float32, "WORDS": str, "WORD": str}
)
def scalars(X):
    return X.sum(), np.array(["größte", "Zahl"]), np.str_("é")


@gpubridge.model(inputs={"X": ("FP32", [1])}, outputs={"WORD": (str, [1])}, batching=True)
def words(X):
    return np.array([["é"]] * len(X))


@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32}, name="größer? 50%2C")
def named(X):
    return X


@gpubridge.model(inputs={"N": ("INT32", [1])}, outputs={"I": ("INT32", [1])})
def count(N):
    for number in range(N[0]):
        yield [number]


@gpubridge.model(inputs={"N": ("INT32", [1])}, outputs={"I": ("INT32", [1])}, name="count later")
async def count_later(N):
    for number in range(N[0]):
        await asyncio.sleep(0)
        yield {"I": [number]}


@gpubridge.model(inputs={"N": ("INT32", [1])}, outputs={"I": ("INT32", [1])})
class Meeting:
    def __init__(self):
        self.there, self.all = 0, asyncio.Event()

    async def __call__(self, N):
        self.there += 1
        self.all.set() if self.there == N[0] else await self.all.wait()
        return [self.there]


async def waiting(PLACE):
    try:
        yield ["first"]
        await asyncio.get_running_loop().create_future()
    finally:
        await asyncio.sleep(0)
        open(PLACE[0], "w").close()


waits = gpubridge.model(inputs={"PLACE": str}, outputs={"OUT": str}, name="waits")(waiting)


@gpubridge.model(inputs={"TEXT": str, "MARK": (bytes, [1])}, outputs={"OUT": str},
                 instances=2, device="auto", parameters={"GREETING": "hello"})
class Shout:
    def initialize(self, args):
        print("made", args["model_instance_name"], "GREETING" in args["model_config"])

    async def __call__(self, TEXT, MARK=None, request=None):
        if TEXT[0] == b"wrong":
            return pb_utils.TritonError("a wrong word", pb_utils.TritonError.INVALID_ARG)
        mark = b"!" if MARK is None else MARK[0]
        return {"OUT": [word.decode().upper() + mark.decode() + request.request_id() for word in TEXT]}

    def finalize(self):
        print("bye")


@gpubridge.model(inputs={"HOW": ("INT32", [1])}, outputs={"A": np.float32, "B": np.float32})
def wrong(**given):
    one = np.zeros(1, np.float32)
    return [None, {"A": one}, {"A": one, "B": np.zeros((1, 1), np.int64)}, (one,), one][given["HOW"][0]]
"""


EXECUTE = child_server._start


@pytest.fixture(scope="module", autouse=True)
def forked():
    with servers_are_forked():
        yield


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_file")
    (folder / "beside.py").write_text("FACTOR = 3")
    (folder / "app.py").write_text(APP)
    return folder / "app.py"


@pytest.fixture(scope="module")
def server(app):
    with gpubridge.Server(app) as started:
        yield started


def test_a_function_serves_arrays(server):
    assert server.infer("times", {"X": np.float32([1, 2])})["Y"].tolist() == [3, 6]


def test_a_class_has_instances_parameters_and_optional_inputs(server):
    given = {"TEXT": np.array(["hey", "you"])}
    assert server.infer("Shout", given)["OUT"].tolist() == [b"HEY!", b"YOU!"]
    given["MARK"] = np.array([b"?"])
    assert server.infer("Shout", given)["OUT"].tolist() == [b"HEY?", b"YOU?"]
    assert len(re.findall(r"made Shout_0_\d True", server.log())) == 2
    with pytest.raises(BridgeError, match=r"^a wrong word$"):
        server.infer("Shout", {"TEXT": np.array(["wrong"])})


def test_a_batch_comes_as_one_array(server):
    def ask(value, **settings):
        given = {"X": np.float32([[value, 0]])}
        try:
            return server.infer("batched", given, **settings)["Y"].tolist()
        except BridgeError as error:
            return error.message

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, number) for number in range(3)]
        refused = clients.submit(ask, 3, parameters={"refuse": True})
    assert [each.result() for each in asked] == [[[1, 1]], [[2, 1]], [[3, 1]]]
    assert refused.result() == "refused"
    whole = server.infer("batched", {"X": np.zeros((4, 2), np.float32)})
    assert whole["TOGETHER"].tolist() == [[1]] * 4


def test_coroutines_of_requests_run_beside_each_other(server):
    with ThreadPoolExecutor(5) as clients:
        asked = [clients.submit(server.infer, "Meeting", {"N": np.int32([5])}) for _ in range(5)]
        assert [each.result()["I"].tolist() for each in asked] == [[5]] * 5


def test_infer_finds_a_model_of_any_name(server):
    for version in (None, 1):
        answer = server.infer("größer? 50%2C", {"X": np.float32([4])}, version=version)
        assert answer["Y"].tolist() == [4]


@pytest.mark.parametrize("model", ["refusing", "refusing_later"])
def test_an_error_that_a_function_of_batches_returns_answers_them_all(server, model):
    with pytest.raises(BridgeError, match=r"^refused$"):
        server.infer(model, {"X": np.float32([[1], [2]])})


def test_scalars_and_texts_of_numpy_are_outputs(server):
    outputs = server.infer("scalars", {"X": np.float32([1, 2])})
    assert outputs["SUM"] == np.float32(3)
    assert [each.decode() for each in outputs["WORDS"]] == ["größte", "Zahl"]
    assert outputs["WORD"].item().decode() == "é"
    rows = server.infer("words", {"X": np.float32([[1], [2]])})["WORD"]
    assert rows.tolist() == [["é".encode()]] * 2


@pytest.mark.parametrize("model", ["count", "count later"])
def test_a_generator_is_a_decoupled_model(server, model):
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        number = tritonclient.grpc.InferInput("N", [1], "INT32").set_data_from_numpy(np.int32([3]))
        client.async_stream_infer(model, [number])
        got = [answers.get(timeout=60).as_numpy("I").tolist() for _ in range(3)]
    assert got == [[0], [1], [2]]


def test_an_async_generator_is_closed_when_its_client_leaves(server, tmp_path):
    left = tmp_path / "left"
    with connected(server.http_address) as client:
        body = json.dumps({"PLACE": str(left)}).encode()
        head = f"POST /v2/models/waits/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        answer = b""
        while b"first" not in answer:
            answer += client.recv(4096)
        assert not left.exists()
    # It waits for something that never comes.
    wait_until(left.exists, "the generator to be closed")


# The same mistakes, as a model of a repository.
WRONG = answering(
    """
more = {"B": np.zeros((1, 1), np.int64)} if value[0] == 2 else {}
return respond(A=np.zeros(1, np.float32), **more)
"""
)


def test_a_wrong_return_is_what_it_is_for_a_repository(server, tmp_path):
    write_model(tmp_path, "wrong", WRONG, tensors="HOW INT32 [1] > A FP32 [-1]; B FP32 [-1]")
    with gpubridge.Server(tmp_path) as repository:
        for how in (2, 1):
            given = {"HOW": np.int32([how])}
            answers = [each.infer("wrong", given) for each in (server, repository)]
            for name in ("A", "B"):
                forms = [(a[name].dtype, a[name].shape) if name in a else None for a in answers]
                assert forms[0] == forms[1]
        for each in (server, repository):
            assert "output 'B' of a response is INT64 with 2" in each.log()
    for how, got in [(0, "NoneType"), (3, "tuple"), (4, "ndarray")]:
        with pytest.raises(
            BridgeError, match=f"to return a dict, or a tuple of 2 outputs, got {got}"
        ):
            server.infer("wrong", {"HOW": np.int32([how])})


def test_a_file_answers_as_the_same_model_in_a_repository(tmp_path):
    names = ["softmax_file", "softmax_arrays"]
    write_repository([MODELS[name]() for name in names], tmp_path)
    rows = np.random.default_rng(5).normal(size=(3, 256)).astype(np.float32)
    with gpubridge.Server(tmp_path) as server:
        first, second = (server.infer(name, {"IN": rows}) for name in names)
        assert first["OUT"].tobytes() == second["OUT"].tobytes()
        wrong = {"IN": rows[:, :3]}
        texts = []
        for name in names:
            with pytest.raises(BridgeError) as raised:
                server.infer(name, wrong)
            texts.append(raised.value.message.replace(name, "MODEL"))
        assert texts[0] == texts[1]


def test_gpubridge_run_takes_a_file(app):
    assert run_forked("run", str(app), "--input", "X=[1]").stdout == "Y: FP32 [1] [3.]\n"
    # One request does not fill a batch.
    quick = app.with_name("quick.py")
    quick.write_text(APP.replace("20_000_000", "1"))
    batched = run_forked("run", f"{quick}:batched", "--input", "X=[1, 0]")
    assert "[1, 2] [[2., 1.]]" in batched.stdout
    assert "expected a model that" in run_forked("run", f"{app}:nothing").stderr


def test_the_fixture_takes_a_file(app, gpubridge_model):
    model = gpubridge_model(f"{app}:batched")
    first, second = model.batch([{"X": [[1, 2]]}, {"X": [[3, 4], [5, 6]]}])
    assert first["Y"].tolist() == [[2, 3]]
    assert second["TOGETHER"].tolist() == [[2], [2]]
    model.close()
    assert [each["I"].item() for each in gpubridge_model(f"{app}:count")({"N": [2]})] == [0, 1]


def test_some_models_of_a_file_are_served(app):
    with gpubridge.Server(f"{app}:times") as server:
        assert server.infer("times", {"X": np.float32([1])})["Y"].tolist() == [3]
        with pytest.raises(BridgeError, match="unknown model: 'count'"):
            server.infer("count", {"N": np.int32([1])})


CHANGING = """
import numpy as np
import gpubridge

@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def times(X):
    return X * 2

@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def plus(X):
    return X + 2
"""


def replace_file(path, text):
    """Save a file as editors do, so that no reader finds half of it, in the second of its last change.

    The interpreter's bytecode caches compare the second and the size only.
    """
    changed = path.stat().st_mtime_ns + 1
    fresh = path.with_suffix(".saved")
    fresh.write_text(text)
    os.utime(fresh, ns=(changed, changed))
    fresh.replace(path)


def test_a_changed_file_is_polled(tmp_path):
    app = tmp_path / "app.py"
    app.write_text(CHANGING)

    def answer(model="times"):
        return server.infer(model, {"X": np.float32([3])})["Y"].tolist()

    flags = {"model_control_mode": "poll", "repository_poll_secs": 1}
    with gpubridge.Server(app, **flags) as server:
        assert answer() == [6]
        replace_file(app, CHANGING.replace("X * 2", "X * 5"))
        wait_until(lambda: answer() == [15], "the function")
        third = CHANGING[CHANGING.index("@") :].replace("times", "third").partition("\n\n")[0]
        replace_file(app, f"{CHANGING}{third}\n")
        told = "declares models that are not served, start the server again for them: 'third'"
        wait_until(lambda: told in server.log(), "the new model")
        replace_file(app, "syntax error")
        wait_until(lambda: "SyntaxError" in server.log(), "the error")
        assert answer("plus") == [5]
        replace_file(app, CHANGING.partition("@gpubridge.model")[0] + "x = 1")
        wait_until(lambda: "no longer declares a model 'plus'" in server.log(), "the error")
        assert answer("plus") == [5]
        app.unlink()
        wait_until(lambda: "is not there any more" in server.log(), "the error")
        assert answer("plus") == [5]


def test_a_load_reads_a_changed_file(tmp_path):
    app = tmp_path / "app.py"
    app.write_text(CHANGING)
    flags = {"model_control_mode": "explicit", "load_model": ["*"]}
    with gpubridge.Server(app, **flags) as server:
        text = CHANGING.replace("X * 2", "X * 5").replace("np.float32}", "(np.float32, [2])}", 1)
        replace_file(app, text)
        with tritonclient.http.InferenceServerClient(server.http_address) as client:
            client.load_model("times")
            assert client.get_model_config("times")["input"][0]["dims"] == [2]
        assert server.infer("times", {"X": np.float32([1, 2])})["Y"].tolist() == [5, 10]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import os; os._exit(3)", "its process ended with exit code 3"),
        ("x = 1", "declares no model: expected a function with @gpubridge.model"),
        (
            "import gpubridge\ngpubridge.Server('.')",
            'put that under if __name__ == "__main__":',
        ),
    ],
)
def test_a_file_that_cannot_be_served_says_why(tmp_path, source, text):
    (tmp_path / "app.py").write_text(source)
    with pytest.raises(BridgeError, match=re.escape(text)):
        gpubridge.Server(tmp_path / "app.py").start()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import gpubridge\n@gpubridge.model(inputs={'A': 'FP32'}, outputs={})\ndef f(B): pass",
            "expected an argument for each input, and 'request' if wanted, got the inputs 'A' for the",
        ),
        (
            ("import gpubridge\nm = gpubridge.model(inputs={}, outputs={}, name='n')\n"
            "m(lambda: 1)\na = m(lambda: 1)\nb = m(lambda: 2)"),
            "declares two models 'n'",
        ),
    ],
)  # fmt: skip
def test_a_file_with_wrong_models_is_refused(tmp_path, monkeypatch, source, text):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "app", None)
    (tmp_path / "app.py").write_text(source)
    with pytest.raises(BridgeError, match=re.escape(text)):
        load_file(str(tmp_path / "app.py"))


def test_a_file_that_never_ends_to_load_is_ended(tmp_path, monkeypatch):
    source = "import os, signal\nopen('PID', 'w').write(str(os.getpid()))\nsignal.pause()"
    (tmp_path / "app.py").write_text(source.replace("PID", str(tmp_path / "pid")))

    def interrupt(child, limit):
        wait_until((tmp_path / "pid").exists, "the file to be imported")
        raise KeyboardInterrupt

    monkeypatch.setattr("gpubridge.develop.child_server._Child.wait_until_ready", interrupt)
    # Not forked: what is killed is the group of a process that is this one's to wait for.
    monkeypatch.setattr("gpubridge.develop.child_server._start", EXECUTE)
    with pytest.raises(KeyboardInterrupt):
        gpubridge.Server(tmp_path / "app.py").start()
    wait_until((tmp_path / "pid").read_text, "its number")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid), "its process to end")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"inputs": {"A": "FP33"}}, "'A': expected a data-type or (data-type, shape), got 'FP33'"),
        ({"inputs": {"A": ("FP32", [1], "no")}}, "'A': expected a data-type or (data-type, shape)"),
        ({"inputs": {"A": ("FP32", 3)}}, "'A': expected a data-type or (data-type, shape)"),
        ({"inputs": {"A": ("FP32", [1], "optional", 0)}}, "'A': expected a data-type"),
        ({"outputs": {"C": ()}}, "'C': expected a data-type or (data-type, shape), got ()"),
        ({"device": "tpu"}, "expects device to be one of cpu, gpu, auto, got 'tpu'"),
    ],
)
def test_a_wrong_declaration_is_refused(settings, text):
    with pytest.raises(BridgeError, match=re.escape(text)):
        gpubridge.model(**{"inputs": {"A": "FP32"}, "outputs": {}, **settings})(lambda A: None)  # noqa: N803


@pytest.mark.parametrize(
    ("function", "batching", "expected"),
    [(lambda A, request: A, True, "batch"), (lambda A, batch: A, False, "request")],  # noqa: N803
)
def test_only_a_function_of_batches_gets_the_batch(function, batching, expected):
    with pytest.raises(BridgeError, match=f"for each input, and '{expected}' if wanted"):
        gpubridge.model(inputs={"A": "FP32"}, outputs={"B": "FP32"}, batching=batching)(function)


def test_a_generator_takes_no_batches():
    def stream(A):  # noqa: N803
        yield A

    with pytest.raises(BridgeError, match="a generator answers one request"):
        gpubridge.model(inputs={"A": "FP32"}, outputs={"B": "FP32"}, batching=True)(stream)


def test_functions_of_one_decorator_have_configurations_of_their_own():
    declared = gpubridge.model(inputs={"A": "FP32"}, outputs={"B": "FP32"})

    def once(A):  # noqa: N803
        return A

    def stream(A):  # noqa: N803
        yield A

    declared(once)
    declared(stream)
    assert "model_transaction_policy" not in declaration_of(once).config
    assert declaration_of(stream).config["model_transaction_policy"] == {"decoupled": True}


def test_a_declared_function_stays_callable():
    @gpubridge.model(inputs={"A": ("FP32", [2]), "B": str}, outputs={"C": "BF16"}, batching=16)
    def add(A, B=None):  # noqa: N803
        return A

    assert add(1) == 1
    config = declaration_of(add).config
    assert config["max_batch_size"] == 16
    assert config["input"][1] == {
        "name": "B", "data_type": "TYPE_STRING", "dims": [-1], "optional": True,
    }  # fmt: skip
    with pytest.raises(BridgeError, match="is defined inside of test_a_declared_function"):
        gpubridge.Server([add])
    with pytest.raises(BridgeError, match=r"or a function with @gpubridge.model, got <function"):
        gpubridge.Server([alive_and_well])


def alive_and_well():
    """No model."""


SCRIPT = """
import numpy as np
import gpubridge

@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def half(X):
    return X / 2

if __name__ == "__main__":
    with gpubridge.Server([half]) as server:
        print(server.infer("half", {"X": np.float32([3])})["Y"].tolist())
"""


def test_a_script_serves_its_own_functions(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = run_command(command, cwd=tmp_path)
    assert done.stdout == "[1.5]\n", done.stderr


# What a notebook does: a cell is compiled with a name of its own, whose lines are in linecache.
CELLS = """
import linecache, sys

def run_cell(source):
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), globals())

del __file__
run_cell("import contextlib, functools\\nimport numpy as np, gpubridge\\nfrom math import sqrt as root")
run_cell("from triton_python_backend_utils import TritonError")
run_cell("SCALE = 10\\nLIMITS = -float('inf'), 1e9")
run_cell('''
def scaled(x):
    return np.clip(x, *LIMITS) * SCALE if x.size else scaled(x)

@functools.lru_cache
def offset(n):
    return root(n)

# Its wrapper has the code of a library.
@contextlib.contextmanager
def known(x):
    yield x

class Helper:
    def add(self, x):
        with known(x) as value:
            return scaled(value) + offset(4)
''')
run_cell('''
@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def cell(X):
    if not X.size:
        return TritonError("nothing")
    return Helper().add(X).astype(np.float32)

@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
class Cell:
    def __call__(self, X):
        return X * SCALE
''')
run_cell('''
with gpubridge.Server([cell, Cell]) as server:
    given = {"X": np.float32([1])}
    print([server.infer(name, given)["Y"].tolist() for name in ("cell", "Cell")])
weights = np.ones(3)
@gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})
def weighted(X):
    return X * weights
try:
    gpubridge.Server([weighted])
except gpubridge.errors.BridgeError as error:
    print(error)
''')
"""


def test_cells_of_a_notebook_are_served(tmp_path):
    done = run_command(
        [sys.executable, "-"],
        input=textwrap.dedent(CELLS).replace("del __file__\n", ""),
        cwd=tmp_path,
    )
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert first == "[[12.0], [10.0]]", done.stderr
    assert second.startswith(
        "'weighted' uses 'weights', a ndarray of the notebook, which the model's"
    )
