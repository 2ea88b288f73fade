"""Start, drain, stop: what a server promises when it is told to end, or is killed, or cannot load."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tests.process.controlled import control, only
from tests.process.ensembles import TEXT, infer, write_ensemble
from tests.process.gates import Gate, waiting_at
from tests.process.model_sources import answering
from tests.process.raw_http import connected, inference, read_answer
from tests.process.raw_http2 import open_stream
from tests.process.server import (
    Server,
    alive,
    descendants,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)
from tests.process.streams import Stream, write_models as write_streams
from tests.waits import poll, polling

FOR_EVER = "threading.Event().wait()"
# OUT has 16 MiB.
FILL = answering("return respond(OUT=np.full(4 << 20, 7, np.float32))")
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
FILLED = json.dumps({"inputs": [TENSOR], "parameters": {"binary_data_output": True}}).encode()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def gone(pids):
    # The kernel kills a fork server when the server has ended.
    return poll(lambda: not any(alive(pid) for pid in pids), 60)


def mark_and(path, code):
    return f"open({str(path)!r}, 'w').close()\n{code}"


# Each of these does something before the stop, looks when the server has been told to stop, and looks again
# when the gate is open, at which its model waits.


def an_idle_connection(server, place, threads):
    with connected(server.http_url) as idle:
        yield
        assert idle.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            server.ask("pass", "code")


def half_a_request_and_a_call_without_a_message(server, place, threads):
    with connected(server.http_url) as half, connected(server.grpc_url) as call:
        half.sendall(inference("code", b"x", length=10_000))
        open_stream(call)
        yield
        yield
        assert read_answer(half)[0] == 503


def requests_of_a_model_and_an_ensemble(server, place, threads):
    started = place / "started"
    code = mark_and(started, f"{waiting_at(place / 'gate')}; self.said = 1")
    slow = threads.submit(server.ask, code, "code")
    wait_until(started.exists, "execute to start", server)
    queued = [threads.submit(server.ask, f"self.said = {i}", "code") for i in range(3)]
    both = threads.submit(infer, server, "e", {"A": "self.said = \"self.said = 'done'\""})
    wait_until(lambda: server.open_requests("code") == 5, "five requests to wait", server)
    yield
    assert "code is finalized" not in server.log()
    yield
    assert slow.result() == (200, "1")
    assert [answer.result() for answer in queued] == [(200, str(i)) for i in range(3)]
    assert both.result() == {"B": ["done"]}


def a_stream_without_a_request(server, place, threads):
    with Stream(server) as stream:
        stream.ask("request.get_response_sender().send(answer(1), FINAL)")
        assert stream.take() == ("", "1", True)
        yield
        assert stream.take() == "the server is stopping"


def a_response_that_is_still_to_come(server, place, threads):
    with Stream(server) as stream:
        stream.ask(
            "s = request.get_response_sender(); s.send(answer(1))\n"
            "def late():\n"
            f"    {waiting_at(place / 'gate')}\n"
            "    s.send(answer(2), FINAL)\n"
            "threading.Thread(target=late).start()"
        )
        assert stream.take() == ("", "1", False)
        yield
        yield
        assert stream.take() == ("", "2", True)


def a_client_that_reads_slowly(server, place, threads):
    pids = descendants(server.pid)
    with connected(server.http_url, receive_bytes=32768) as client:
        client.sendall(inference("fill", FILLED, "Connection: close"))
        answer = bytearray(client.recv(1000))
        yield
        yield
        assert gone(pids)
        while part := client.recv(1 << 20):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(answer) > 16 << 20


def restarts_that_hang_or_are_far_away(server, place, threads):
    assert server.ask("os._exit(1)", "hangs")[0] == 503
    wait_until((place / "hangs").exists, "the next stub", server)
    (place / "broken").touch()
    assert server.ask("os._exit(1)", "loops")[0] == 503
    wait_until(lambda: "restarts in 1.6 s" in server.log(), "a longer wait", server)
    failed = server.log().count("failed to start")
    yield
    yield
    assert server.process.wait(150) == 0
    assert server.log().count("failed to start") == failed


def a_load_that_hangs(server, place, threads):
    loading = threads.submit(control, server, "load", "slow")
    wait_until((place / "second").exists, "initialize", server)
    yield
    yield
    assert loading.result()[0] == 503


QUESTIONS = (
    an_idle_connection,
    half_a_request_and_a_call_without_a_message,
    requests_of_a_model_and_an_ensemble,
    a_stream_without_a_request,
    a_response_that_is_still_to_come,
    a_load_that_hangs,
    a_client_that_reads_slowly,
    # The last: no time is to pass before the stop.
    restarts_that_hang_or_are_far_away,
)
SLOW = """
if args["model_instance_name"] == "slow_0_1":
    {first_is_up}
    time.sleep(1)  # by then the server has heard of it
    open({second!r}, "w").close()
    threading.Event().wait()
open({first!r}, "w").close()
"""


def write_stopped(models, place):
    """Write the models that are asked at the stop."""
    write_streams(models)
    write_code_model(models, "code", finalize="print('code is finalized', flush=True)")
    write_code_model(models, "other")
    write_ensemble(models, "e", "code IN=A > OUT=t", "other IN=t > OUT=B", kind=TEXT)
    write_model(models, "fill", FILL)
    broken, hangs, again = (str(place / name) for name in ("broken", "hangs", "again"))
    write_code_model(models, "loops", initialize=f"if os.path.exists({broken!r}): os._exit(1)")
    hang = f"if os.path.exists({again!r}): open({hangs!r}, 'w').close(); {FOR_EVER}"
    write_code_model(models, "hangs", initialize=f"{hang}\nopen({again!r}, 'w')")
    first = str(place / "first")
    first_is_up = polling(f"os.path.exists({first!r})")
    slow = SLOW.format(first=first, first_is_up=first_is_up, second=str(place / "second"))
    write_code_model(models, "slow", initialize=slow, config="instance_group [{ count: 2 }]")


def test_a_stop_answers_what_was_asked_refuses_what_is_new_and_finalizes(threads, tmp_path):
    models = tmp_path / "models"
    write_stopped(models, tmp_path)
    gate = Gate(tmp_path / "gate")
    asked = only("m", "e", "code", "fill", "loops", "hangs")
    with running_server(models, *asked) as server, ExitStack() as ends:
        questions = [question(server, tmp_path, threads) for question in QUESTIONS]
        for question in questions:
            ends.callback(question.close)
            next(question)
        pids = descendants(server.pid)
        server.process.send_signal(signal.SIGTERM)
        for question in questions:
            next(question, None)
        gate.open()
        for question in questions:
            next(question, None)
        assert server.process.wait(150) == 0
        assert gone(pids)
        assert server.log().count("code is finalized\n") == 1
        # "other", and the instance that was up of the model that was being loaded.
        assert server.log().count("Finalize\n") == 2
        assert "Traceback" not in server.log()


WAITS = """
import asyncio
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        self.place = Path(requests[0].inputs()[0].as_numpy()[0].decode())
        self.task = asyncio.ensure_future(self.wait("background"))
        await self.wait("request")

    async def wait(self, name):
        try:
            (self.place / f"{name} waits").touch()
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            (self.place / f"{name} cleans up").touch()

    def finalize(self):
        (self.place / "finalize").touch()
"""


# A plain `execute` that waits for a model that never answers, then for another one.
ASKS = WAITS.replace("async def execute", "def execute").replace(
    """        self.task = asyncio.ensure_future(self.wait("background"))
        await self.wait("request")
""",
    f"""        # The called model says so: it is unloaded at once while it has no request.
        code = f"open({{str(self.place / 'request waits')!r}}, 'w').close(); {FOR_EVER}"
        text = pb_utils.Tensor("IN", np.array([code], object))
        for name in ("deaf", "m"):
            asked = pb_utils.InferenceRequest(
                model_name=name, inputs=[text], requested_output_names=["OUT"]
            ).exec()
            assert "'asks', which makes it, is being unloaded" in asked.error().message()
            (self.place / f"{{name}} cleans up").touch()
""",
)
CLEANED = {
    "stream": ("request", "background"),
    "plain": ("request", "background"),
    "asks": ("deaf", "m"),
}
KILLED = "Stub process '{}_0' is not healthy. It was killed: it had not ended "
FINALIZES = {
    "hangs": (FOR_EVER, KILLED),
    "holds_gil": ("ctypes.PyDLL(None).pause()", KILLED),
    "leaves_a_thread": ("threading.Thread(target=threading.Event().wait).start()", KILLED),
    "crashes": ("ctypes.string_at(0)", "stopped"),
    "exits": ("os._exit(3)", "stopped"),
    "raises": ("undefined_variable", "NameError: name 'undefined_variable' is not defined"),
    "ends": ("sys.exit(7)", "SystemExit: 7"),
}


@contextmanager
def health_watched(server, gate):
    """Watch the health of a server whose model m waits at a gate when it starts again, to its end."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watch, unknown = watching(b"", timeout=150), watching(b"\x0a\x05nobod")
        assert next(unknown) == b"\x08\x03"
        unknown.cancel()
        assert next(watch) == b"\x08\x01"
        assert server.ask("os._exit(1)")[0] == 503
        assert next(watch) == b"\x08\x02"
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x02"
        gate.open()
        assert next(watch) == b"\x08\x01"
        yield
        assert next(watch) == b"\x08\x02"
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the server is stopping"


def test_a_request_that_does_not_end_is_given_up_after_the_exit_timeout(threads, tmp_path):
    models, started = tmp_path / "models", tmp_path / "started"
    write_code_model(models)
    write_code_model(models, "deaf")
    for name in CLEANED:
        decoupled = "model_transaction_policy { decoupled: true }" if name == "stream" else ""
        source = ASKS if name == "asks" else WAITS
        write_model(
            models, name, source, config=decoupled, tensors="IN STRING [1] > OUT STRING [1]"
        )
        (tmp_path / f"of {name}").mkdir()
    with running_server(models, "--exit-timeout-secs=1") as server:
        pids = descendants(server.pid)
        endless = threads.submit(server.ask, mark_and(started, FOR_EVER))
        wait_until(started.exists, "execute to start", server)
        given_up = []
        for name in CLEANED:
            body = json.dumps({"IN": str(tmp_path / f"of {name}")})
            path = f"/v2/models/{name}/generate"
            given_up.append(threads.submit(server.request, "POST", path, body))
            waits = tmp_path / f"of {name}" / "request waits"
            wait_until(waits.exists, f"'{name}' to wait", server)
        assert server.stop() == 0
        status, error = endless.result()
        assert (status, error.startswith(KILLED.format("m"))) == (503, True), error
        # A coroutine is cancelled, a call fails, and the model is finalized before the process ends.
        assert 200 not in [each.result()[0] for each in given_up]
        for name, cleaned in CLEANED.items():
            for what in (*(f"{each} cleans up" for each in cleaned), "finalize"):
                assert (tmp_path / f"of {name}" / what).exists(), (name, what)
        assert gone(pids)
        assert "model 'm' still has 1 request after 1 s" in server.log()


def read_slowly(client, ended):
    """Read an answer at 400 kB/s until the server has ended, and what is left; return how much it was."""
    got = 0
    with suppress(ConnectionResetError):
        while not ended.wait(0.01):
            got += len(client.recv(1 << 12))
        while data := client.recv(1 << 20):
            got += len(data)
    return got


def test_what_hangs_or_fails_at_the_end_keeps_neither_the_server_nor_other_models(
    threads, tmp_path
):
    models, gate = tmp_path / "models", Gate(tmp_path / "gate")
    again = str(tmp_path / "again")
    at_gate = f"if os.path.exists({again!r}): {gate.wait}\nopen({again!r}, 'w')"
    write_code_model(models, initialize=at_gate)
    write_model(models, "fill", FILL)
    for name, (finalize, _) in FINALIZES.items():
        write_code_model(models, name, finalize=finalize)
    with (
        running_server(models, "--exit-timeout-secs=3") as server,
        connected(server.http_url, 4096) as unread,
        connected(server.http_url, 1 << 18) as slow,
        ExitStack() as stack,
    ):
        for client in (unread, slow):
            client.sendall(inference("fill", FILLED))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        ended = threading.Event()
        stack.callback(ended.set)
        read = threads.submit(read_slowly, slow, ended)
        with health_watched(server, gate):
            pids = descendants(server.pid)
            assert server.stop(signal.SIGINT) == 0
        ended.set()
        # What it would still read after the exit timeout is given up.
        assert read.result() < 16 << 20
        assert gone(pids)
        log = server.log()
    for name, (_, logged) in FINALIZES.items():
        assert logged.format(name) in log
    assert "Finalize\n" in log


# Faults of other kinds are compared with Triton's answers.
UNHEALTHY = "Stub process '{}_0' is not healthy. It {}."
BAD_STARTS = {
    "raises": ("raise ValueError('no weights')", "ValueError: no weights"),
    "ends": ("os._exit(4)", UNHEALTHY.format("ends", "exited with code 4")),
    "crashes": (
        "ctypes.string_at(0)",
        UNHEALTHY.format("crashes", "was killed by signal 11 (SIGSEGV), at File ")[:-1],
    ),
    "deaf": ("os.closerange(3, 4096)", UNHEALTHY.format("deaf", "exited with code 1")),
}
NO_SUCH_READINESS = """
class TritonPythonModel:
    def execute(self, requests): pass
    @property
    def is_ready(self): raise KeyError('planted')
"""


@pytest.fixture(scope="module")
def half_broken(tmp_path_factory):
    """A repository of which one model loads, and one ensemble."""
    repository = tmp_path_factory.mktemp("half_broken")
    write_code_model(repository, "good", config="instance_group [{ count: 2 }]")
    write_code_model(repository, "many", config="instance_group [{ count: 3 }]")
    for name, (code, _) in BAD_STARTS.items():
        write_code_model(repository, name, initialize=code)
    write_model(repository, "no_such_readiness", NO_SUCH_READINESS)
    write_code_model(repository, "needs_gpu", config="instance_group [{ kind: KIND_GPU }]")
    write_code_model(
        repository,
        "one_of_two",
        initialize="if args['model_instance_name'].endswith('_1'): raise ValueError('second')",
        config="instance_group [{ count: 2 }]",
    )
    for name, step in (
        ("missing", "nothing IN=A > OUT=B"),
        ("version", "good:7 IN=A > OUT=B"),
        ("sick", "raises IN=A > OUT=B"),
        ("round", "round A=A > B=B"),
        ("well", "good:1 IN=A > OUT=B"),
    ):
        write_ensemble(repository, name, step, kind=TEXT)
    for name in (os.fsdecode(b"b\xff"), "new\nline"):
        (repository / name / "1").mkdir(parents=True)
    return repository


REASONS = {
    **{name: text for name, (_, text) in BAD_STARTS.items()},
    "no_such_readiness": "KeyError: 'planted'",
    "one_of_two": "ValueError: second",
    "needs_gpu": "KIND_GPU",
    "many": "asks for 3 instances: expected at most 2 (--max-model-instances)",
    "missing": "ensemble missing contains models that are not available or ambiguous: nothing",
    "version": "ensemble 'version' depends on 'good' whose required version 7 is not loaded.",
    "sick": (
        "ensemble 'sick' depends on 'raises' which has no loaded version. Model 'raises' loading "
        "failed with error: version 1 is at UNAVAILABLE state: "
    ),
    "round": "circular dependency between ensembles: round -> ",
}


def test_models_that_do_not_load_tell_why_and_the_others_serve(half_broken):
    flags = ("--model-control-mode=explicit", "--load-model=*", "--max-model-instances=2")
    with running_server(half_broken, *flags, "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: "] ready" in server.log(), "the loading to end", server)
        rows = {name: row for (name, _), row in server.index().items()}
        ready = {name for name, row in rows.items() if row["state"] == "READY"}
        assert ready == {"good", "well"}
        reasons = {name: row["reason"] for name, row in rows.items() if name not in ready}
        assert {name for name, text in REASONS.items() if text not in reasons.pop(name)} == set()
        assert reasons == {}
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert infer(server, "well", {"A": "self.said = 2"}) == {"B": ["2"]}
        # Of the GPU that one of them asks for, one short line.
        lines = [line for line in server.log().splitlines() if "no GPU is used" in line]
        assert [line.count(":") for line in lines] in ([], [4])
        names = ("good", "well", "raises", "sick")
        assert [server.is_ready(name) for name in names] == [True, True, False, False]
        assert not server.is_ready()
        states = {
            re.search(r'model="(.*?)"', name)[1]: value
            for name, value in server.metrics().items()
            if name.startswith("gpubridge_model_state{") and 'state="failed"' in name
        }
        assert states == {name: name not in ready for name in rows}
        # No stub stays of a model that did not load, not even the instance that was up.
        assert len(server.stubs()) == 2
        assert server.log().count("Finalize\n") == 1
        # Directories whose names are no text are left out, with a warning.
        assert control(server, "load", "new%0Aline")[0] == 404
        lines = [line for line in server.log().splitlines() if "not UTF-8" in line]
        assert r"'b\udcff' is no model: " in lines[0]
        assert r"'new\nline' is no model: " in lines[1]
        assert len(lines) == 2


def test_by_default_a_model_that_does_not_load_ends_the_server(half_broken):
    with running_server(half_broken, ready=False) as server:
        pids = descendants(server.pid)
        assert server.process.wait(150) == 1
        assert gone(pids)
        for text in ("ValueError: no weights", "exited with code 4"):
            assert text in server.log()
        last = server.log().splitlines()[-1]
        assert "failed to load all models: 'crashes', 'deaf', 'ends', " in last
        assert f" failed; 'crashes': {BAD_STARTS['crashes'][1]}" in last


def test_a_server_that_is_started_without_standard_streams_opens_them(tmp_path):
    write_code_model(tmp_path / "models")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "gpubridge", "serve", "--http-port=0", "--grpc-port=0"]
    command += [
        "--metrics-port=0",
        f"--log-file={log}",
        f"--model-repository={tmp_path / 'models'}",
    ]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    try:
        wait_until(lambda: log.exists() and "] ready" in log.read_text(), "the server")
        links = [Path(f"/proc/{process.pid}/fd/{n}").readlink() for n in range(3)]
        assert links == [Path(os.devnull)] * 3
        server = Server(process, tmp_path)
        server.http_url = re.search(r"HTTPService at (\S+)", log.read_text())[1]
        assert server.ask("print('out'); self.said = 1") == (200, "1")
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()
