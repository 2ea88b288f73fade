"""`gpubridge run`: one model, executed where its developer is."""

import os
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.commands import run_command
from tests.process.ensembles import write_ensemble
from tests.process.forked_commands import fork_command, run_forked
from tests.process.model_sources import answering
from tests.process.server import wait_until, write_model

SUM = """
import sys
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        print("argv", sys.argv)
        if args["model_version"] == "9":
            raise RuntimeError("version nine never loads")

    def execute(self, requests):
        print("batch of", len(requests), "in", self.args["model_instance_name"])
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pb_utils.Logger.log_info("parameters " + request.parameters())
        numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if numbers.size and numbers.min() < 0:
            raise ValueError("negative")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", numbers + 1)])

    def finalize(self):
        print("finalized")
"""
CALLER = answering("""
call = pb_utils.InferenceRequest(
    model_name="sum", requested_output_names=["OUT"], inputs=request.inputs()
)
answer = call.exec()
if answer.has_error():
    raise pb_utils.TritonModelException(answer.error().message())
return pb_utils.InferenceResponse(answer.output_tensors())
""")
REPEAT = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(request.inputs()[0].as_numpy().flat[0])):
                await asyncio.sleep(0)
                words = np.array([f"word {i}"], object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", words)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
UPPER = answering("return respond(OUT=np.char.upper(value.astype(bytes)))")


def run_anew(directory, *flags, stdin=""):
    """Run a model, as a user does; returns what came of it."""
    command = [sys.executable, "-m", "gpubridge", "run", str(directory), *flags]
    return run_command(command, input=stdin)


def run(directory, *flags, **options):
    """Run a model, as `run_anew` does, without the time of imports."""
    return run_forked("run", str(directory), *flags, **options)


@pytest.fixture
def models(tmp_path):
    """A repository with one model, whose configuration asks for two processes of it."""
    write_model(tmp_path, "sum", SUM, config="instance_group [{ count: 2 kind: KIND_CPU }]")
    return tmp_path


def test_a_model_answers_and_is_finalized(models):
    done = run_anew(models / "sum", "--input", "IN=[1, 2.5]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "argv ['']",
        "batch of 1 in sum_0_0",
        "OUT: FP32 [2] [2. , 3.5]",
        "finalized",
    ]
    assert "[sum_0_0] parameters {}" in done.stderr
    assert "loading" not in done.stderr
    # The other instance that is configured would be a process, with lines of its own.
    assert "stdout]" not in done.stderr


def test_an_error_comes_with_the_models_own_traceback(models):
    done = run(models / "sum", "--input", "IN=[-1]")
    assert done.returncode == 1
    assert 'raise ValueError("negative")\n' in done.stderr
    assert "gpubridge/stub" not in done.stderr
    assert (
        "error: INTERNAL: Failed to process the request(s) for model 'sum_0_0', message: "
        "ValueError: negative\n\nAt:\n" in done.stderr
    )
    assert "finalized" in done.stdout


BAD_INPUTS = [
    (["WHAT=1"], "unexpected inference input 'WHAT' for model 'sum'"),
    ([], "expected 1 inputs but got 0 inputs for model 'sum'"),
    (["IN=[[1]]"], "unexpected shape for input 'IN' for model 'sum'. Expected [-1], got [1,1]"),
    (["IN=[1, [2, 3]]"], "Shape does not match true shape of 'data' field"),
    (['IN=["a"]'], "attempt to access JSON non-number as double"),
    (["IN=@int.npy"], "data-type is 'INT64', but model 'sum' expects 'FP32'"),
    (["IN=@short"], "input byte size mismatch for input 'IN' for model 'sum'. Expected 4, got 6"),
    (["IN=@none"], "input 'IN': cannot read none: No such file or directory"),
    (["IN=a"], "input 'IN': expected JSON"),
    (["IN"], "--input expects NAME=VALUE"),
]


def test_a_crash_tells_the_models_python_stack(tmp_path):
    write_model(tmp_path, "crash", answering("import ctypes; ctypes.string_at(0)"))
    done = run_anew(tmp_path / "crash", "--input=IN=[1]")
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(r'File ".*/crash/1/model.py", line \d+ in answer', done.stderr)


def test_bad_inputs_are_refused_as_by_a_server(models):
    np.save(models / "int.npy", np.array([1]))
    (models / "short").write_bytes(b"123456")
    commands = [
        ["run", "sum", *(word for text in inputs for word in ("--input", text))]
        for inputs, _ in BAD_INPUTS
    ]
    # One process runs all of them.
    program = f"""
for words in {commands!r}:
    try: code = main(words)
    except SystemExit as error: code = error.code
    print("exit", code, file=sys.stderr)
"""
    done = run_forked(cwd=models, imports="from gpubridge.cli import main", program=program)
    said = done.stderr.split("exit 1\n")
    assert len(said) == len(BAD_INPUTS) + 1, done.stderr
    for (_, text), each in zip(BAD_INPUTS, said, strict=False):
        assert text in each
    assert "batch of" not in done.stdout


def test_inputs_and_outputs_are_files(models):
    np.save(models / "in.npy", np.arange(3, dtype=np.float32))
    done = run("sum", "--input", "IN=@in.npy", "--output", "OUT=@out.npy", cwd=models)
    assert done.returncode == 0, done.stderr
    assert np.load(models / "out.npy").tolist() == [1, 2, 3]
    (models / "raw").write_bytes(np.float32([7, 8]).tobytes())
    assert "OUT: FP32 [2] [8., 9.]" in run("sum", "--input", "IN=@raw", cwd=models).stdout
    missing = run("sum", "--input", "IN=@raw", "--output", "NO=@out.npy", cwd=models)
    assert missing.returncode == 1
    assert (
        "--output NO: expected an output of the response of 'sum', which are OUT" in missing.stderr
    )


def test_strings_are_text_json_and_files(tmp_path):
    strings = "IN STRING [1] > OUT STRING [1]"
    write_model(tmp_path, "upper", UPPER, tensors=strings, config="max_batch_size: 4")
    (tmp_path / "photo.jpg").write_bytes(b"\xffjpeg")
    for value, shown in [
        ("hello you", "OUT: BYTES [1, 1] [['HELLO YOU']]"),
        ("5", "OUT: BYTES [1, 1] [['5']]"),
        ('"@file"', "OUT: BYTES [1, 1] [['@FILE']]"),
        ('[["a"], ["b"]]', "OUT: BYTES [2, 1]\n  [['A'],\n   ['B']]"),
        ("@photo.jpg", "OUT: BYTES [1, 1] [['\\xffJPEG']]"),
    ]:
        done = run("upper", "--input", f"IN={value}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == shown + "\n"


def test_requests_are_repeated_and_batched(tmp_path):
    write_model(tmp_path, "sum", SUM, config="max_batch_size: 8")
    done = run(tmp_path / "sum", "--input", "IN=[1]", "--repeat", "2", "--batch", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch of 3") == 2
    assert done.stdout.count("OUT: FP32 [1, 1] [[2.]]") == 6
    assert "request 6:\n" in done.stdout
    more = run(tmp_path / "sum", "--input", "IN=[1]", "--batch", "9")
    assert more.returncode == 1
    assert "--batch 9: expected at most max_batch_size 8 of 'sum'" in more.stderr


def test_responses_of_decoupled_models_come_one_by_one(tmp_path):
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(
        tmp_path, "repeat", REPEAT, tensors="IN INT32 [1] > OUT STRING [1]", config=decoupled
    )
    done = run(tmp_path / "repeat", "--input", "IN=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "response 1:",
        "OUT: BYTES [1] ['word 0']",
        "response 2:",
        "OUT: BYTES [1] ['word 1']",
    ]
    none = run(tmp_path / "repeat", "--input", "IN=0")
    assert none.returncode == 0
    assert "ended the request without a response" in none.stdout


def test_it_may_call_models_that_were_named(models):
    write_model(models, "caller", CALLER)
    done = run(models / "caller", "--input", "IN=[1]", "--load-model", "sum")
    assert done.returncode == 0, done.stderr
    assert "OUT: FP32 [1] [2.]" in done.stdout
    alone = run(models / "caller", "--input", "IN=[1]")
    assert alone.returncode == 1
    assert "Request for unknown model: 'sum' is not found" in alone.stderr
    assert "(--load-model sum loads it, for the model to call)" in alone.stderr


def test_breakpoints_stop_it_here(models):
    path = models / "sum" / "1" / "model.py"
    path.write_text(
        SUM.replace("        if numbers.size", "        breakpoint()\n        if numbers.size")
    )
    done = run_anew(models / "sum", "--input", "IN=[4]", stdin="p numbers + 40\nc\n")
    assert done.returncode == 0, done.stderr
    assert "array([44.]" in done.stdout


def test_the_debugger_opens_where_the_model_fails(models):
    done = run(models / "sum", "--pdb", "--input", "IN=[-7]", stdin="p numbers.min() * 2\nq\n")
    assert done.returncode == 1
    assert "-14.0" in done.stdout


def test_a_model_may_complete_its_configuration(tmp_path):
    completing = SUM.replace(
        "    def initialize",
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'IN', 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        "        config.add_output({'name': 'OUT', 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        "        config.set_max_batch_size(4)\n"
        "        return config\n\n"
        "    def initialize",
    )
    directory = write_model(tmp_path, "sum", completing)
    (directory / "config.pbtxt").write_text(
        'backend: "python" instance_group [{ count: 3 kind: KIND_CPU }]'
    )
    done = run(directory, "--input", "IN=[1]", "--batch", "2")
    assert done.returncode == 0, done.stderr
    assert "batch of 2 in sum_0_0" in done.stdout
    assert done.stdout.count("OUT: FP32 [1, 1] [[2.]]") == 2
    assert "stdout]" not in done.stderr
    fails = run(directory, "--input", "WHAT=[1]")
    assert "unexpected inference input 'WHAT' for model 'sum'" in fails.stderr


SLEEPER = """
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        print("asleep", flush=True)
        threading.Event().wait()

    def finalize(self):
        print("finalized")
"""


@pytest.mark.parametrize(("name", "ended"), [("sleeper", "KeyboardInterrupt"), ("around", "")])
def test_it_can_be_interrupted(tmp_path, name, ended):
    write_model(tmp_path, "sleeper", SLEEPER)
    write_ensemble(tmp_path, "around", "sleeper IN=IN > OUT=OUT", inputs="IN", outputs="OUT")
    words = ["run", str(tmp_path / name), "--repeat", "9", "--input", "IN=[1]"]
    log = tmp_path / "log"
    with Path(os.devnull).open() as nothing, log.open("w") as to:
        process = fork_command(words, [nothing.fileno(), to.fileno(), to.fileno()])
    with closing(process):
        wait_until(lambda: "asleep" in log.read_text(), "the model to run")
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 130
    said = log.read_text()
    assert ended in said
    assert "InvalidStateError" not in said
    assert "request 2" not in said


def test_a_model_that_does_not_load_says_why(models):
    (models / "sum" / "1").rename(models / "sum" / "9")
    done = run(models / "sum", "--input", "IN=[1]")
    assert done.returncode == 1
    assert 'raise RuntimeError("version nine never loads")' in done.stderr
    assert "error: model 'sum' was not loaded: " in done.stderr
    wrong = run(models / "sum", "--version", "2", "--input", "IN=[1]")
    assert wrong.returncode == 1
    assert "expected a version that is served (9), got 2" in wrong.stderr


def test_outputs_that_are_not_as_configured_are_noted(models):
    config = models / "sum" / "config.pbtxt"
    config.write_text(
        config.read_text().replace(
            'output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]',
            'output [{ name: "OUT" data_type: TYPE_FP64 dims: [2] }, '
            '{ name: "MORE" data_type: TYPE_FP64 dims: [2] }]',
        )
    )
    done = run(models / "sum", "--input", "IN=[1]")
    assert done.returncode == 0, done.stderr
    assert "note: output 'OUT' is FP32, the configuration says FP64" in done.stdout
    assert "note: output 'OUT' has the shape [1], the configuration says [2]" in done.stdout
    assert "note: the response has no output 'MORE'" in done.stdout


def test_a_response_without_any_configured_output_fails(models):
    config = models / "sum" / "config.pbtxt"
    config.write_text(
        config.read_text().replace('output [{ name: "OUT"', 'output [{ name: "RESULT"')
    )
    done = run(models / "sum", "--input", "IN=[1]")
    assert done.returncode == 1
    assert "error: the response has none of the outputs 'RESULT'" in done.stderr
    assert "a response has an output 'OUT', which is not sent: the configuration has 'RESULT'" in (
        done.stdout + done.stderr
    )


def test_only_a_directory_is_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    missing = run(tmp_path / "modle")
    assert missing.returncode == 1
    told = f"got {tmp_path / 'modle'}, which does not exist; did you mean {tmp_path / 'model'}?"
    assert f"expected the directory of a model, {told}" in missing.stderr
