"""Models that call other models: whose memory it is, who waits for whom, who dies."""

import json
import shutil

import pytest

from tests.process.callers import PRELUDE, answered, run, write_models
from tests.process.controlled import control, only
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_code_model, write_model


@pytest.fixture(scope="module")
def server(repository):
    """A server with some models of :mod:`callers`; others are loaded by their tests."""
    write_models(repository)
    with running_server(repository, *only("add_sub", "caller", "other")) as running:
        yield running


@pytest.fixture
def load(server):
    """Load models, which are gone after the test."""
    loaded = []

    def load(*names):
        loaded.extend(names)
        for name in names:
            assert control(server, "load", name) == (200, "")

    yield load
    for name in reversed(loaded):
        control(server, "unload", name)


@pytest.mark.parametrize(("sharing", "first"), [("", 6), ("copy", 6), ("share", 2)])
def test_an_input_and_an_answer_are_handed_on_without_a_copy(
    server, repository, load, sharing, first
):
    called, caller = f"add_sub_{sharing}", f"chain_{sharing}"
    shutil.copytree(repository / "add_sub", repository / called)
    if sharing:
        with (repository / called / "config.pbtxt").open("a") as config:
            config.write(
                f'parameters {{ key: "INPUT_SHARING" value {{ string_value: "{sharing}" }} }}'
            )
    chain = (
        PRELUDE.replace('"add_sub"', f'"{called}"')
        + """
a = request.inputs()[0]
same = pb_utils.Tensor._received("B", "FP32", a._shape, a._source, a._place)
a = pb_utils.Tensor._received("A", "FP32", a._shape, a._source, a._place)
first = call(inputs=[a, same]).exec().output_tensors()[0]
again = pb_utils.Tensor._received("A", "FP32", first._shape, first._source, first._place)
last = call(inputs=[again, same]).exec().output_tensors()[0]
return respond(OUT=last.as_numpy())
"""
    )
    write_model(repository, caller, answering(chain))
    load(called, caller)
    values = [float(i) for i in range(25_000)]
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [25_000], "data": values}]}
    copies = []
    for _ in range(6):
        before = server.copied(called), server.copied(caller)
        _, _, answer = server.request("POST", f"/v2/models/{caller}/infer", json.dumps(body))
        assert json.loads(answer)["outputs"][0]["data"] == [3 * value for value in values]
        copies.append((server.copied(called) - before[0]) / 100_000)
        assert server.copied(caller) - before[1] == 2 * 100_000
    # Each answer is copied once, into its model's output memory: SUM only was asked for. The
    # called model looks at two inputs each time: as its own, until it is clear that it only reads.
    last = 6 if sharing == "copy" else 2
    assert copies == [first] * 4 + [last] * 2


WRITES_LATER = """
if value[0] < 0:
    value *= 2
return respond(OUT=value)
"""
ASKS = """
call = pb_utils.InferenceRequest(
    model_name="later", requested_output_names=["OUT"], inputs=request.inputs()
)
answer = call.exec()
seen = pb_utils.Tensor("SEEN", request.inputs()[0].as_numpy())
return pb_utils.InferenceResponse([seen, *answer.output_tensors()], answer.error())
"""


@pytest.fixture
def ask(server, repository, load, request):
    # Of the test's own: what is known of the models' ways, and counted, stays with their names.
    later, asks = f"later_{request.node.name}", f"asks_{request.node.name}"
    write_model(repository, later, answering(WRITES_LATER))
    tensors = "> OUT FP32 [-1]; SEEN FP32 [-1]"
    write_model(repository, asks, answering(ASKS.replace('"later"', f'"{later}"')), tensors=tensors)
    load(later, asks)

    def ask(value):
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}]}
        answer = json.loads(server.request("POST", f"/v2/models/{asks}/infer", json.dumps(body))[2])
        if "error" in answer:
            return answer["error"]
        return {each["name"]: each["data"][0] for each in answer["outputs"]}

    name = (
        f'gpubridge_fallbacks_total{{model="{later}",reason="shared_inputs_written",version="1"}}'
    )
    ask.fallbacks = lambda: server.metrics().get(name, 0)
    return ask


def test_a_model_that_writes_to_shared_inputs_may(ask):
    assert ask(-1) == {"SEEN": -1, "OUT": -2}
    for _ in range(20):
        assert ask(1) == {"SEEN": 1, "OUT": 1}
    assert ask(-1) == {"SEEN": -1, "OUT": -2}
    assert not ask.fallbacks()


def test_an_error_without_a_text_is_only_its_own(server, repository, load):
    odd = "class Odd(ValueError):\n    def __str__(self): raise RuntimeError('no text')\n"
    source = answering(odd + WRITES_LATER.replace("value *= 2", "raise Odd"))
    write_model(repository, "odd", source)
    load("odd")
    stubs = server.stubs()
    for value, status in [(-1, 500), *[(1, 200)] * 20, (-1, 500), (1, 200)]:
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}]}
        answer = server.request("POST", "/v2/models/odd/infer", json.dumps(body))
        assert answer[0] == status, answer
    # Those of models that were unloaded may still end.
    assert set(server.stubs()) <= set(stubs)


def test_a_model_that_writes_to_shared_inputs_after_long_gets_copies_at_once(ask):
    for _ in range(20):
        assert ask(1) == {"SEEN": 1, "OUT": 1}
    # The batch is executed again.
    assert ask(-1) == {"SEEN": -1, "OUT": -2}
    assert ask.fallbacks() == 1
    for value in (-1, 1, -1):
        assert ask(value) == {"SEEN": value, "OUT": min(value, 2 * value)}
    assert ask.fallbacks() == 1


@pytest.mark.parametrize("count", [2, 100_000])
def test_a_called_model_may_write_to_its_inputs_and_its_caller_does_not_see_it(server, count):
    # Sent is an array of the caller's, then what came as an answer, which is handed on.
    said = run(
        server,
        f"mine = np.full({count}, -4, np.float32)\n"
        f"one = pb_utils.Tensor('B', np.ones({count}, np.float32))\n"
        "def ask(a):\n"
        "    answer = call(inputs=[a, one]).exec()\n"
        "    return answer.error() or {float(x) for x in answer.output_tensors()[0].as_numpy()}\n"
        "a = pb_utils.Tensor('A', mine)\n"
        f"b = call(inputs=[a, pb_utils.Tensor('B', -np.full({count}, 11, np.float32))]).exec()\n"
        "b = b.output_tensors()[0]\n"
        "b = pb_utils.Tensor._received('A', 'FP32', b._shape, b._source, b._place)\n"
        "said = ask(a), ask(a), set(mine.tolist()), ask(b), ask(b), set(b.as_numpy().tolist())",
    )
    assert said == "({8.0}, {8.0}, {-4.0}, {8.0}, {8.0}, {-4.0})"


def test_answers_that_are_kept_stay_what_they_are(server):
    said = run(
        server,
        "kept = [call(i).exec().output_tensors()[0].as_numpy() for i in range(300)]\n"
        "said = [float(k[0]) for k in kept] == [i + 1.0 for i in range(300)]",
    )
    assert said == "True"


def test_a_circle_is_refused_by_name(server):
    inner = "said = show(call(model='caller', inputs=[tensor('IN', ['pass'], object)], outputs=[]).exec())"
    said = run(server, inner)
    assert said.startswith(
        "UNAVAILABLE: Model caller - Error when running inference: this call would"
    )
    assert "caller waits for caller" in said
    code = (
        f"inner = PRELUDE + {inner.replace('said =', 'self.said =')!r}\n"
        "said = show(call(model='other', inputs=[tensor('IN', [inner], object)], outputs=[]).exec())"
    )
    said = run(server, f"PRELUDE = {PRELUDE!r}\n{code}")
    assert "caller waits for other waits for caller" in said


ITSELF = "own = lambda: call(model='caller', inputs=[tensor('IN', ['self.said = 5'], object)], outputs=[])\n"
THREAD = """
sent = threading.Event()
def work():
    it = own().exec(decoupled=True)
    sent.set()
    self.late = show(next(it))
self.thread = threading.Thread(target=work)
self.thread.start()
sent.wait()
"""


@pytest.mark.parametrize(
    "wait",
    [
        "show(next(own().exec(decoupled=True)))",
        "show(asyncio.run(one()))",
        "show(asyncio.run(several())[1])",
    ],
)
def test_a_circle_is_refused_once_execute_waits_for_its_call(server, wait):
    said = run(
        server,
        f"{ITSELF}async def one():\n    return await own().async_exec()\n"
        "async def several():\n    return await asyncio.gather(one(), one())\n"
        f"said = {wait}",
    )
    assert "caller waits for caller" in said


@pytest.mark.parametrize(
    ("begin", "later"),
    [
        ("self.it = own().exec(decoupled=True)", "said = show(next(self.it))"),
        (THREAD, "self.thread.join()\nsaid = self.late"),
    ],
)
def test_a_call_that_execute_does_not_wait_for_is_no_circle(server, begin, later):
    assert run(server, f"{ITSELF}{begin}\nsaid = 1") == "1"
    assert run(server, later) == "{'OUT': [b'5']}"


def test_no_circle_where_another_instance_can_answer(server, repository, load):
    write_code_model(repository, "twins", config="instance_group [{ count: 2 }]")
    load("twins")
    code = "said = show(call(model='twins', inputs=[tensor('IN', ['self.said = 5'], object)], outputs=[]).exec())"
    assert run(server, code, "twins") == "{'OUT': [b'5']}"


def test_a_called_model_that_dies_fails_only_the_calls_it_had(server):
    said = run(server, "said = show(call(-3).exec()), show(call(1).exec())")
    assert "UNAVAILABLE: Stub process 'add_sub_0' is not healthy. It exited with code 3" in said
    assert "{'SUM': [2.0]}" in said


def test_a_caller_that_dies_leaves_nothing(tmp_path):
    write_models(tmp_path)
    with running_server(tmp_path, *only("add_sub", "caller", "repeat")) as server:
        body = PRELUDE + "it = repeat(-1).exec(decoupled=True)\nnext(it); os._exit(4)"
        document = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [body]}]}
        status, _, _ = server.request("POST", "/v2/models/caller/infer", json.dumps(document))
        assert status == 503
        wait_until(server.is_ready, "the stub to be back", server)
        wait_until(lambda: answered(server, "repeat") == 1, "the called model to stop", server)
        assert run(server, "said = show(call(1).exec())") == "{'SUM': [2.0]}"
