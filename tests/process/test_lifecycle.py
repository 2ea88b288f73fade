"""Start, drain, stop: what a server promises when it is told to end, or is killed, or cannot load."""

from __future__ import annotations

import json
import mmap
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.process.gates import Gate
from tests.process.server import (
    Server,
    alive,
    descendants,
    named_memory,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)
from tests.waits import poll, polling

FOR_EVER = "threading.Event().wait()"


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def gone(pids):
    # The kernel kills a fork server when the server has ended.
    return poll(lambda: not any(alive(pid) for pid in pids), 60)


def mark_and(path, code):
    return f"open({str(path)!r}, 'w').close()\n{code}"


# -- SIGTERM --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_was_asked_refuses_what_is_new_and_finalizes(threads, tmp_path, number):
    write_code_model(tmp_path)
    gate, started = Gate(tmp_path / "gate"), tmp_path / "started"
    with running_server(tmp_path) as server:
        pids = descendants(server.pid)
        host, port = server.http_url.split(":")
        idle = socket.create_connection((host, int(port)))
        slow = threads.submit(server.ask, mark_and(started, f"{gate.wait}; self.said = 1"))
        wait_until(started.exists, "execute to start", server)
        queued = [threads.submit(server.ask, f"self.said = {i}") for i in range(3)]
        pending = 'nv_inference_pending_request_count{model="m",version="1"}'
        wait_until(lambda: server.metrics()[pending] == 4, "four requests to wait", server)
        server.process.send_signal(number)
        with idle:
            assert idle.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            server.ask("pass")
        assert "Finalize" not in server.log()
        gate.open()
        assert slow.result() == (200, "1")
        assert [answer.result() for answer in queued] == [(200, str(i)) for i in range(3)]
        assert server.process.wait(150) == 0
        assert gone(pids)
        assert server.log().count("Finalize\n") == 1
        assert "Traceback" not in server.log()


def test_an_open_stream_is_told_that_the_server_stops(tmp_path):
    grpc_client = pytest.importorskip("tritonclient.grpc")
    write_code_model(tmp_path)
    tensor = grpc_client.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"self.said = 1"], np.object_))
    answers = queue.Queue()
    with (
        running_server(tmp_path) as server,
        grpc_client.InferenceServerClient(server.grpc_url) as client,
    ):
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("m", [tensor])
        assert answers.get(timeout=150)[1] is None
        server.process.send_signal(signal.SIGTERM)
        assert "the server is stopping" in str(answers.get(timeout=60)[1])
        assert server.process.wait(150) == 0


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
    f"""        (self.place / "request waits").touch()
        text = pb_utils.Tensor("IN", np.array([{FOR_EVER!r}], object))
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


def test_a_request_that_does_not_end_is_given_up_after_the_exit_timeout(threads, tmp_path):
    models = tmp_path / "models"
    write_code_model(models)
    write_code_model(models, "deaf")
    for name in CLEANED:
        write_model(
            models,
            name,
            ASKS if name == "asks" else WAITS,
            config="model_transaction_policy { decoupled: true }" if name == "stream" else "",
            inputs='name: "IN" data_type: TYPE_STRING dims: [1]',
            outputs='name: "OUT" data_type: TYPE_STRING dims: [1]',
        )
        (tmp_path / f"of {name}").mkdir()
    started = tmp_path / "started"
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
        assert status == 503
        assert error.startswith(
            "Stub process 'm_0' is not healthy. It was killed: it had not ended "
        )
        # A coroutine is cancelled, a call fails, and the model is finalized before the process ends.
        assert 200 not in [each.result()[0] for each in given_up]
        for name, cleaned in CLEANED.items():
            for what in (*(f"{each} cleans up" for each in cleaned), "finalize"):
                assert (tmp_path / f"of {name}" / what).exists(), (name, what)
        assert gone(pids)
        assert "model 'm' still has 1 requests after 1 s" in server.log()


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


def test_a_finalize_that_hangs_or_fails_keeps_neither_the_server_nor_other_models(tmp_path):
    for name, (finalize, _) in FINALIZES.items():
        write_code_model(tmp_path, name, finalize=finalize)
    write_code_model(tmp_path, "tidy")
    with running_server(tmp_path, "--exit-timeout-secs=3") as server:
        pids = descendants(server.pid)
        assert server.stop() == 0
        assert gone(pids)
        log = server.log()
    for name, (_, logged) in FINALIZES.items():
        assert logged.format(name) in log
    assert "Finalize\n" in log


def test_a_stop_does_not_wait_for_models_that_are_still_initializing(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_code_model(tmp_path / "models", "quick")
    write_code_model(
        tmp_path / "models",
        "slow",
        initialize=f"""
if args["model_instance_name"] == "slow_0_1":
    {polling(f"os.path.exists({str(first)!r})")}
    time.sleep(1)  # by then the server has heard of it
    open({str(second)!r}, "w").close()
    {FOR_EVER}
open({str(first)!r}, "w").close()
""",
        config="instance_group [{ count: 2 }]",
    )
    with running_server(tmp_path / "models", ready=False) as server:
        wait_until(second.exists, "initialize", server)
        wait_until(lambda: server.is_ready("quick"), "the other model", server)
        pids = descendants(server.pid)
        assert len(server.stubs()) == 3
        assert not server.is_ready()
        assert server.stop() == 0
        assert gone(pids)
        # The model that was up, and the instance that was.
        assert server.log().count("Finalize\n") == 2


def test_a_stop_does_not_wait_for_the_next_restart_of_a_crash_looping_model(tmp_path):
    broken = tmp_path / "broken"
    write_code_model(
        tmp_path / "models", initialize=f"if os.path.exists({str(broken)!r}): os._exit(1)"
    )
    with running_server(tmp_path / "models") as server:
        broken.touch()
        assert server.ask("os._exit(1)")[0] == 503
        wait_until(lambda: "restarts in 0.8 s" in server.log(), "a longer wait", server)
        restarts = server.log().count("failed to start")
        assert server.stop() == 0
        assert server.log().count("failed to start") == restarts


def test_a_stop_does_not_wait_for_a_restart_that_hangs(tmp_path):
    second = tmp_path / "second"
    write_code_model(
        tmp_path / "models",
        initialize=f"if os.path.exists({str(second)!r}): {FOR_EVER}\nopen({str(second)!r}, 'w')",
    )
    with running_server(tmp_path / "models") as server:
        assert server.ask("os._exit(1)")[0] == 503
        wait_until(server.stubs, "the next stub", server)
        assert server.stop() == 0


def test_an_answer_is_sent_to_its_end_to_a_client_that_reads_slowly(tmp_path):
    source = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.full(4 << 20, 7, np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
    write_model(tmp_path, "m", source)
    body = json.dumps(
        {
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    with running_server(tmp_path) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        host, port = server.http_url.split(":")
        client.connect((host, int(port)))
        head = b"POST /v2/models/m/infer HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        answer = bytearray(client.recv(1000))
        pids = descendants(server.pid)
        server.process.send_signal(signal.SIGTERM)
        assert gone(pids)
        while part := client.recv(1 << 20):
            answer += part
        header, _, data = answer.partition(b"\r\n\r\n")
        assert header.startswith(b"HTTP/1.1 200")
        assert len(data) > 16 << 20
        assert server.process.wait(150) == 0


# -- SIGKILL --------------------------------------------------------------------------------------


def test_named_memory_is_found():
    before = named_memory(os.getpid())
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        assert named_memory(os.getpid()) - before == {file.name}
        with Path(file.name).open("rb") as again:
            mapped = mmap.mmap(again.fileno(), 4096, access=mmap.ACCESS_READ)
        file.close()
        assert named_memory(os.getpid()) - before == {f"{file.name} (deleted)"}
        mapped.close()
    assert named_memory(os.getpid()) <= before


def test_a_killed_server_leaves_no_stub_and_no_shared_memory(threads, tmp_path):
    marks = {
        "idle": "pass",
        "busy": "while True: pass",
        "sleeping": FOR_EVER,
        "holding_gil": "ctypes.PyDLL(None).pause()",
    }
    for name in marks:
        write_code_model(tmp_path / "models", name)
    with running_server(tmp_path / "models") as server:
        pids = descendants(server.pid)
        assert len(server.stubs()) == len(marks)
        # Nothing of theirs has a name there, even while they live: others' things come and go.
        assert not set().union(*map(named_memory, [server.pid, *pids]))
        for name, code in marks.items():
            threads.submit(server.ask, mark_and(tmp_path / name, code), name)
        wait_until(lambda: all((tmp_path / name).exists() for name in marks), "them", server)
        server.process.kill()
        assert server.process.wait(150) == -signal.SIGKILL
        assert gone(pids)


# -- what loads -----------------------------------------------------------------------------------

BAD_STARTS = {
    "exits": ("sys.exit(3)", "SystemExit: 3"),
    "raises": ("raise ValueError('no weights')", "ValueError: no weights"),
    "ends": ("os._exit(4)", "Stub process 'ends_0' is not healthy. It exited with code 4."),
    "crashes": (
        "ctypes.string_at(0)",
        "Stub process 'crashes_0' is not healthy. It was killed by signal 11 (SIGSEGV).",
    ),
    "deaf": (
        "os.closerange(3, 4096)",
        "Stub process 'deaf_0' is not healthy. It exited with code 1.",
    ),
}
BAD_FILES = {
    "no_such_readiness": (
        (
            "class TritonPythonModel:\n    def execute(self, requests): pass\n    @property\n"
            "    def is_ready(self): raise KeyError('planted')"
        ),
        "KeyError: 'planted'",
    ),
    "syntax": ("def broken(:", "SyntaxError: "),
    "no_execute": ("class TritonPythonModel: pass", "does not implement `execute` method."),
    "no_class": ("x = 1", "has no attribute 'TritonPythonModel'"),
    "no_import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
}


@pytest.fixture(scope="module")
def half_broken(tmp_path_factory):
    """A repository of which one model loads."""
    repository = tmp_path_factory.mktemp("half_broken")
    write_code_model(repository, "good")
    for name, (code, _) in BAD_STARTS.items():
        write_code_model(repository, name, initialize=code)
    for name, (source, _) in BAD_FILES.items():
        write_model(repository, name, source)
    (write_model(repository, "no_file", "") / "1" / "model.py").unlink()
    write_code_model(repository, "needs_gpu", config="instance_group [{ kind: KIND_GPU }]")
    write_code_model(
        repository,
        "one_of_two",
        initialize="if args['model_instance_name'].endswith('_1'): raise ValueError('second')",
        config="instance_group [{ count: 2 }]",
    )
    return repository


def test_models_that_do_not_load_tell_why_and_the_others_serve(half_broken):
    with running_server(half_broken, "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: "] ready" in server.log(), "the loading to end", server)
        index = server.index()
        expected = {name: text for name, (_, text) in (BAD_STARTS | BAD_FILES).items()}
        expected["no_file"] = "Python model file not found in '"
        expected["one_of_two"] = "ValueError: second"
        expected["needs_gpu"] = "KIND_GPU"
        reasons = {name: row["reason"] for (name, _), row in index.items() if name != "good"}
        assert {n for n, text in expected.items() if text not in reasons.pop(n)} == set(), index
        assert reasons == {}
        assert index["good", 1]["state"] == "READY"
        assert server.ask("self.said = 1", "good") == (200, "1")
        # Of the GPU that one of them asks for, one short line.
        lines = [line for line in server.log().splitlines() if "no GPU is used" in line]
        assert [line.count(":") for line in lines] in ([], [4])
        assert server.is_ready("good")
        assert not server.is_ready("raises")
        assert not server.is_ready()
        # No stub stays of a model that did not load, not even the instance that was up.
        assert len(server.stubs()) == 1
        assert server.log().count("Finalize\n") == 1


def test_a_directory_whose_name_is_no_text_is_left_out_with_a_warning(tmp_path):
    write_code_model(tmp_path, "good")
    for name in (os.fsdecode(b"b\xff"), "new\nline"):
        (tmp_path / name / "1").mkdir(parents=True)
    with running_server(
        tmp_path, "--model-control-mode=explicit", "--load-model=*", own=True
    ) as server:
        assert set(server.index()) == {("good", 1)}
        lines = [line for line in server.log().splitlines() if "not UTF-8" in line]
        assert r"'b\udcff' is no model: " in lines[0]
        assert r"'new\nline' is no model: " in lines[1]
        load = server.request("POST", "/v2/repository/models/new%0Aline/load", "{}")
        assert load[0] == 500
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
        assert last.endswith(f" failed; 'crashes': {BAD_STARTS['crashes'][1]}")


def test_more_instances_than_a_model_may_have_are_refused(tmp_path):
    write_code_model(tmp_path, "few", config="instance_group [{ count: 2 }]")
    write_code_model(tmp_path, "many", config="instance_group [{ count: 3 }]")
    flags = ("--max-model-instances=2", "--exit-on-error=false", "--strict-readiness=false")
    with running_server(tmp_path, *flags, own=True) as server:
        reason = server.index()["many", 0]["reason"]
        assert "asks for 3 instances: expected at most 2 (--max-model-instances)" in reason
        assert server.ask("self.said = 1", "few") == (200, "1")
        assert len(server.stubs()) == 2
        # Without strict readiness, a server with a model that failed is ready.
        assert server.is_ready()
        assert not server.is_ready("many")


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
        server = Server(process, log)
        server.http_url = re.search(r"HTTPService at (\S+)", log.read_text())[1]
        assert server.ask("print('out'); self.said = 1") == (200, "1")
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_a_repository_without_models_is_warned_of(tmp_path):
    with running_server(tmp_path, own=True) as server:
        assert f"there is no model in {tmp_path}: a model is a directory" in server.log()
