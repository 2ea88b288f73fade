"""Models that call other models: what they get."""

import ast
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.callers import PRELUDE, answered, run, write_models
from tests.process.controlled import control, only
from tests.process.ensembles import infer
from tests.process.gates import Gate
from tests.process.model_sources import answering
from tests.process.raw_http import connected, inference
from tests.process.server import (
    LITTLE_OUTPUT,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)
from tests.unit.model_configs import cases

# Callers see outputs as clients do: in the configured shape, not in that of the reshape.
SHAPED = answering(
    "return respond(ROW=value, PAIR=value.reshape(-1, 2) if value.size < 6 else value[:5])"
)
SHAPES = (
    "IN FP32 [-1] > ROW FP32 [1, -1] reshape { shape: [-1] }; "
    "PAIR FP32 [-1, 2, 1] reshape { shape: [-1, 2] }"
)


AWAITS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        call = pb_utils.InferenceRequest(
            model_name="repeat", inputs=request.inputs(), requested_output_names=["OUT"]
        )
        responses = [each async for each in await call.async_exec(decoupled=True)]
        got = [each.output_tensors()[0].as_numpy() for each in responses[:-1]]
        out = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", sum(got))])
        sender = request.get_response_sender()
        sender.send(out, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return RETURNED
"""
AWAITING = {
    "decoupled": "model_transaction_policy { decoupled: true }",
    "coroutines": 'parameters { key: "COROUTINES" value { string_value: "4" } }',
}


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    write_model(repository, "shaped", SHAPED, tensors=SHAPES)
    for name, config in AWAITING.items():
        source = AWAITS.replace("RETURNED", "None" if name == "decoupled" else "[None]")
        write_model(
            repository, name, source, config=config, tensors="COUNT INT32 [1] > OUT INT32 [1]"
        )
    with running_server(repository) as running:
        yield running


@pytest.mark.parametrize(
    ("code", "said"),
    cases(
        """
call(1, 2).exec()
    {'SUM': [2.0, 3.0]}
call(1, outputs=['DIFFERENCE', 'SUM']).exec()
    {'SUM': [2.0], 'DIFFERENCE': [0.0]}
call(1, outputs=[]).exec()
    {'SUM': [2.0], 'DIFFERENCE': [0.0]}
call(1, model_version=1).exec()
    {'SUM': [2.0]}
call(inputs=[tensor('A', []), tensor('B', [])]).exec()
    {'SUM': []}
shaped(1, 2).exec()
    {'ROW': [[1.0, 2.0]], 'PAIR': [[[1.0], [2.0]]]}
next(iter(shaped(1, 2).exec(decoupled=True)))
    {'ROW': [[1.0, 2.0]], 'PAIR': [[[1.0], [2.0]]]}
shaped(1, 2, 3, 4, 5, 6).exec()
    INTERNAL: output tensor shape does not match size of output for 'PAIR': expected the dims of its
    reshape [-1,2], got [5]
call(1, model_version=-2).exec()
    NOT_FOUND: Model add_sub - Error when running inference: Request for unknown model: 'add_sub' version
    -2 is not found
call(1, correlation_id='a' * 129).exec()
    UNSUPPORTED: Model add_sub - Error when running inference: string correlation ID cannot be longer
    than 128 characters
[q := call(1), setattr(q, '_correlation_id', 1 << 64), q.exec()][2]
    INVALID_ARG: Model add_sub - Error when running inference: the request's correlation id, flags,
    timeout or parameters cannot be passed on: context field 'correlation_id': got 18446744073709551616
"""
    ),
)
def test_a_call_and_its_answer(server, code, said):
    assert run(server, f"said = show({code})") == said


def test_a_request_can_be_sent_again(server):
    assert run(server, "r = call(1)\nsaid = [show(r.exec()) for _ in range(3)]").count("2.0") == 3


def test_a_call_without_memory_for_its_inputs_is_answered_with_an_error(tmp_path):
    write_models(tmp_path)
    with running_server(tmp_path, *only("add_sub", "caller"), LITTLE_OUTPUT) as server:
        error = run(server, "said = show(call(*range(2 << 20)).exec())")
        assert error.startswith("UNAVAILABLE: ")
        assert "Failed to increase the shared memory pool size: " in error
        assert "of 1572864 bytes are in use" in error
        assert run(server, "said = show(call(1).exec())") == "{'SUM': [2.0]}"


def test_calls_are_refused_before_and_after_execute(server):
    attempt = (
        PRELUDE
        + "try: call().exec()\nexcept pb_utils.TritonModelException as e: print('REFUSED', e, flush=True)"
    )
    write_code_model(server.repositories[0], "early", initialize=attempt, finalize=attempt)
    for action in ("load", "unload"):
        assert control(server, action, "early") == (200, "")
    text = "REFUSED BLS is only supported during the 'execute' function."
    wait_until(lambda: server.log().count(text) == 2, "both refusals", server)


@pytest.mark.parametrize("model", AWAITING)
def test_requests_whose_models_await_calls_overlap_and_each_has_its_own_outputs(server, model):
    def ask(count):
        return server.request("POST", f"/v2/models/{model}/generate", f'{{"COUNT": [{count}]}}')

    # The called model answers when all four calls are there, each with as many responses as it says.
    counts = (4, 5, 6, 7)
    with ThreadPoolExecutor(4) as pool:
        answers = [json.loads(body).get("OUT") for _, _, body in pool.map(ask, counts)]
    assert answers == [sum(range(count)) for count in counts]


def test_threads_and_coroutines_call_beside_each_other(server):
    said = run(
        server,
        "sums = []\n"
        "def many():\n"
        "    for i in range(50): sums.append(show(call(i).exec())['SUM'][0] == i + 1)\n"
        "async def more():\n"
        "    for i in range(50): sums.append(show(await call(i).async_exec())['SUM'][0] == i + 1)\n"
        "threads = [threading.Thread(target=many) for _ in range(3)]\n"
        "threads += [threading.Thread(target=lambda: asyncio.run(more())) for _ in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "said = len(sums), all(sums)",
    )
    assert said == "(300, True)"


QUEUED = answering(
    """
if value[0, 0]:
    import fcntl
    fcntl.flock(open(self.args["model_repository"] + "/gate"), fcntl.LOCK_SH)
return respond(OUT=np.array([[request.timeout()]], np.int64))
"""
)


def test_a_time_limit_counts_from_exec_and_arrives_as_it_is(tmp_path):
    write_models(tmp_path)
    policy = "default_timeout_microseconds: 20000000000 allow_timeout_override: true"
    directory = write_model(
        tmp_path,
        "queued",
        QUEUED,
        config=f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ {policy} }} }}",
        tensors="A FP32 [1] > OUT INT64 [1]",
    )
    limited = "call(model='queued', inputs=[tensor('A', [[{}]])], outputs=['OUT'], timeout={})"
    code = (
        "async def one():\n"
        f"    busy = {limited.format(1, 11_000_000_000)}.async_exec()\n"
        "    await asyncio.sleep(0)\n"
        f"    waits = {limited.format(0, 100_000)}.async_exec()\n"
        "    expired = show(await waits)\n"
        f"    open({str(tmp_path / 'expired')!r}, 'w').close()\n"
        "    return expired, show(await busy)\n"
        "said = asyncio.run(one())"
    )
    gate = Gate(directory / "gate")
    with (
        running_server(tmp_path, *only("caller", "queued")) as server,
        ThreadPoolExecutor() as pool,
    ):
        said = pool.submit(run, server, code)
        wait_until((tmp_path / "expired").exists, "the one that waits to expire", server)
        gate.open()
        expired, answer = ast.literal_eval(said.result())
    assert "Request timeout expired" in expired
    assert answer == {"OUT": [[11_000_000_000]]}


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_an_iterator_gives_every_response_and_an_empty_last(server, count):
    said = run(
        server,
        f"got = [show(r).get('OUT') for r in repeat({count}).exec(decoupled=True)]\n"
        f"said = got == [[i] for i in range({count})] + [None]",
    )
    assert said == "True"


def test_an_iterator_can_be_awaited(server):
    said = run(
        server,
        "async def all_of_them():\n"
        "    return [show(r).get('OUT') async for r in await repeat(100).async_exec(decoupled=True)]\n"
        "said = asyncio.run(all_of_them()) == [[i] for i in range(100)] + [None]",
    )
    assert said == "True"


def test_coroutines_that_iterate_without_awaiting_have_their_calls_answered_together(server):
    code = (
        "async def one():\n"
        "    return [show(r).get('OUT') for r in await repeat(4).async_exec(decoupled=True)]\n"
        "async def all_of_them():\n"
        "    return await asyncio.gather(*(one() for _ in range(4)))\n"
        "said = asyncio.run(all_of_them())"
    )
    assert run(server, code) == str([[[0], [1], [2], [3], None]] * 4)


def test_the_answer_of_a_cancelled_called_model_is_read(server):
    said = run(
        server,
        "it = repeat(-2).exec(decoupled=True)\nnext(it); it.cancel()\n"
        "said = [show(r) for r in it][-2:]",
    )
    assert said == "['CANCELLED: stopped', {}]"


def test_a_request_that_is_cancelled_cancels_its_own_calls_alone(server, tmp_path):
    run(
        server,
        "self.background = repeat(-2).exec(decoupled=True)\n"
        "self.seen = []\n"
        "def read(): self.seen.extend(show(each) for each in self.background)\n"
        "self.reader = threading.Thread(target=read)\n"
        "self.reader.start()",
    )
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    code = PRELUDE + (
        f"open({str(begun)!r}, 'w').close()\n"
        "answers = [show(each) for each in repeat(-2).exec(decoupled=True)]\n"
        f"open({str(ended)!r}, 'w').write(answers[-2])"
    )
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}]}
    with connected(server.http_url) as client:
        client.sendall(inference("caller", json.dumps(body).encode()))
        wait_until(begun.exists, "execute to start", server)
    wait_until(lambda: ended.exists() and ended.read_text(), "its call to be cancelled", server)
    assert ended.read_text() == "CANCELLED: stopped"
    left = run(
        server,
        "before = 'CANCELLED: stopped' in self.seen\n"
        "self.background.cancel()\n"
        "self.reader.join()\n"
        "said = before, 'CANCELLED: stopped' in self.seen\n"
        "del self.background",
    )
    assert left == "(False, True)"


def test_an_iterator_that_is_dropped_ends_the_call(server):
    before = answered(server, "repeat")
    run(server, "self.kept = repeat(-1).exec(decoupled=True)\nnext(self.kept)")
    # The model runs on until the iterator is dropped.
    assert answered(server, "repeat") == before
    run(server, "del self.kept")
    wait_until(lambda: answered(server, "repeat") == before + 1, "the model to stop", server)


def test_a_thread_calls_on_when_its_request_is_long_answered(server):
    """The server has idle memory given back meanwhile, every five seconds."""
    process = run(
        server,
        "more = [tensor('IN', ['time.sleep(7)\\nself.said = 5'], object)]\n"
        "def later():\n"
        "    print('later:', show(call(model='other', inputs=more, outputs=['OUT']).exec()))\n"
        "threading.Thread(target=later).start()\n"
        "said = os.getpid()",
    )
    wait_until(lambda: "later:" in server.log(), "the answer", server)
    assert "later: {'OUT': [b'5']}\n" in server.log()
    assert run(server, "said = os.getpid()") == process, "its process has died"


def in_child(server, code):
    """Run code in a child that a model forks; returns what it put into ``said``."""
    code = (
        "queue = multiprocessing.get_context('fork').SimpleQueue()\n"
        "def work():\n    try:\n"
        + "".join(f"        {line}\n" for line in code.splitlines())
        + "    except BaseException as error: said = repr(error)\n"
        "    queue.put(str(said))\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start()\n"
        "self.said = queue.get()\n"
        "child.join()"
    )
    # Two blanks: what the child says is not said by the model.
    return run(server, "import multiprocessing\n" + code.replace("said = ", "said  = "))


BOTH = """
async def both():
    return await asyncio.gather(call(1).async_exec(), call(2).async_exec())
said = [show(r)['SUM'] for r in asyncio.run(both())]"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        *cases(
            """
said = show(call(2, 3).exec())
    {'SUM': [3.0, 4.0]}
said = [show(call(i).exec()) for i in (1, 2)][1]
    {'SUM': [3.0]}
said = show(call(-1).exec()).splitlines()[0]
    message: ValueError: minus one
said = show(call(-2).exec())
    NOT_FOUND: coded
said = len(show(call(*range(1 << 18)).exec())['SUM'])
    262144
said = [show(r).get('OUT') for r in repeat(3).exec(decoupled=True)]
    [[0], [1], [2], None]
stream = repeat(-2).exec(decoupled=True); first = show(next(stream)); stream.cancel();
said = first, [show(r) for r in stream][-2]
    ({'OUT': [0]}, 'CANCELLED: stopped')
out = request.output('OUT', [3], np.float32); out.as_numpy()[:] = 2;
said = out.as_numpy().tolist(), pb_utils.Tensor.empty('X', [2], np.int8).shape()
    ([2.0, 2.0, 2.0], [2])
text = pb_utils.Tensor('A', np.array(['a'], object));
said = show(call(inputs=[text, tensor('B', [1])]).exec())
    INVALID_ARG
"""
        ),
        (BOTH, "[[2.0], [3.0]]"),
    ],
)
def test_a_forked_child_makes_tensors_and_calls(server, code, said):
    assert said in in_child(server, code)


POOLED = """
import multiprocessing
import numpy as np
import triton_python_backend_utils as pb_utils

def work(value):
    inputs = [pb_utils.Tensor(name, np.array([value], np.float32)) for name in "AB"]
    request = pb_utils.InferenceRequest(
        model_name="add_sub", inputs=inputs, requested_output_names=["SUM"])
    return request.exec().output_tensors()[0].as_numpy()

class TritonPythonModel:
    def initialize(self, args):
        self.early = multiprocessing.get_context("fork").Pool(2)

    def execute(self, requests):
        with multiprocessing.get_context("fork").Pool(2) as late:
            values = requests[0].inputs()[0].as_numpy().tolist()
            sums = self.early.map(work, values) + late.map(work, values)
        out = pb_utils.Tensor("OUT", np.concatenate(sums))
        return [pb_utils.InferenceResponse([out]) for _ in requests]

    def finalize(self):
        self.early.terminate()
"""


def test_pools_call_from_all_their_processes(tmp_path):
    write_models(tmp_path)
    write_model(tmp_path, "pooled", POOLED)
    with running_server(tmp_path, *only("add_sub", "pooled")) as server:
        assert infer(server, "pooled", {"IN": [1.0, 2.0, 3.0]}) == {"OUT": [2.0, 4.0, 6.0] * 2}
