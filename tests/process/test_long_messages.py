"""Responses and calls that say so much that a worker of the server reads them: whole, and in order."""

import json

import numpy as np
import pytest

from tests.process.callers import run, write_models as write_callers
from tests.process.controlled import only
from tests.process.ensembles import TEXT as STRING, write_ensemble
from tests.process.server import PURE, running_server, wait_until
from tests.process.streams import Stream, triton, write_models

triton_http = pytest.importorskip("tritonclient.http")

# 1.2 MB: more than a message or a piece of it has.
COUNT = 120_000
TEXT = 'é"\\\n\x01😀' * COUNT
LONG = f"""'é"\\\\\\n\\x01😀' * {COUNT}"""
FINAL_FLAG = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    write_callers(repository)
    kind = {"inputs": "CODE OTHER", "outputs": "OUT REST", "kind": STRING}
    write_ensemble(
        repository, "pair", "one CODE=CODE > OUT=OUT", "one CODE=OTHER > OUT=REST", **kind
    )
    kind = {"inputs": "CODE", "outputs": "OUT", "kind": STRING}
    write_ensemble(repository, "chain", "one CODE=CODE > OUT=OUT", **kind)
    return repository


@pytest.fixture(scope="module")
def server(repository):
    with running_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def pure_server(repository):
    flags = only("caller", "chain", "add_sub")
    with running_server(repository, *flags, environment=PURE) as running:
        yield running


@pytest.fixture(params=["server", "pure_server"])
def each_server(request):
    """A server whose stubs are of the compiled runtime, and one of the Python one."""
    return request.getfixturevalue(request.param)


def coded(code):
    return triton.InferInput("CODE", [1], "BYTES").set_data_from_numpy(np.array([code], object))


def ask(server, code, path="one/infer"):
    tensor = {"name": "CODE", "datatype": "BYTES", "shape": [1], "data": [code]}
    body = {"CODE": code} if "generate" in path else {"inputs": [tensor]}
    status, _, answer = server.request("POST", f"/v2/models/{path}", json.dumps(body))
    return status, answer


@pytest.mark.parametrize(("path", "status"), [("one/infer", 500), ("one/generate", 400)])
def test_a_long_error_is_told_whole_over_http(server, path, status):
    got, answer = ask(server, f"result = failure({LONG})", path)
    assert got == status
    assert json.loads(answer) == {"error": TEXT}


def test_a_long_error_of_a_member_is_told_behind_the_name_of_its_ensemble(server):
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [code]}
        for name, code in (("CODE", f"result = failure({LONG})"), ("OTHER", told()))
    ]
    body = json.dumps({"inputs": inputs})
    status, _, answer = server.request("POST", "/v2/models/pair/infer", body)
    assert status == 500
    assert json.loads(answer) == {"error": f"in ensemble 'pair', {TEXT}"}


def test_very_long_log_lines_are_cut(server):
    code = "pb_utils.Logger.log_info('y' * 3_000_000); result = answer(1)"
    assert ask(server, code)[0] == 200
    wait_until(lambda: "y... (2737856 more characters)" in server.log(), "the line", server)


def test_a_long_error_is_an_event_of_a_generated_stream(server):
    code = f"""
sender = request.get_response_sender()
sender.send(failure({LONG}))
sender.send(answer(1), flags=FINAL)
"""
    _, answer = ask(server, code, "m/generate_stream")
    first, second = (json.loads(event[6:]) for event in answer.strip().split(b"\n\n"))
    assert first == {"error": TEXT}
    assert second["OUT"] == "1"


def test_the_beginning_of_a_long_error_is_the_message_of_a_grpc_status(server):
    client = triton.InferenceServerClient(server.grpc_url)
    with client, pytest.raises(triton.InferenceServerException) as told:
        client.infer("one", [coded("result = failure('x' * 4_000_000)")])
    assert told.value.message() == "x" * 6141 + "..."


def told(**parameters):
    """Return code that answers with response parameters; strings are expressions."""
    text = ", ".join(f"{name!r}: {value}" for name, value in parameters.items())
    return (
        "out = pb_utils.Tensor('OUT', np.array(['x'], object))\n"
        f"result = pb_utils.InferenceResponse([out], parameters={{{text}}})"
    )


def test_long_parameters_are_told_whole(server):
    code = told(long=LONG, short=7)
    status, answer = ask(server, code)
    assert status == 200
    assert json.loads(answer)["parameters"] == {"long": TEXT, "short": 7}
    with triton.InferenceServerClient(server.grpc_url) as client:
        response = client.infer("one", [coded(code)]).get_response()
    assert response.parameters["long"].string_param == TEXT
    assert response.parameters["short"].int64_param == 7


def test_long_parameters_are_members_of_what_is_generated(server):
    code = told(long=LONG, OUT="'not this one'", short=7)
    sent = "\nrequest.get_response_sender().send(result, flags=FINAL)"
    for path, rest in (("one/generate", ""), ("m/generate_stream", sent)):
        status, answer = ask(server, code + rest, path)
        assert status == 200
        document = json.loads(answer.removeprefix(b"data: "))
        wanted = {"model_name": path.partition("/")[0], "model_version": "1", "OUT": "x"}
        assert document == {**wanted, "long": TEXT, "short": 7}


def test_long_parameters_and_outputs_in_the_forms_that_are_asked_for(server):
    code = coded(told(long=LONG))
    with triton_http.InferenceServerClient(server.http_url) as client:
        tensor = triton_http.InferInput("CODE", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([told(long=LONG)], object))
        for binary in (True, False):
            outputs = [triton_http.InferRequestedOutput("OUT", binary_data=binary)]
            result = client.infer("one", [tensor], outputs=outputs)
            assert result.as_numpy("OUT").tolist() in ([b"x"], ["x"])
            assert result.get_response()["parameters"] == {"long": TEXT}
    with Stream(server) as stream:
        stream.client.async_stream_infer("one", [code])
        result, error = stream.answers.get(timeout=150)
        assert error is None
        parameters = result.get_response().parameters
        assert parameters["long"].string_param == TEXT
        assert parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (told(a=LONG, b=1), told(b=2, c=3), {"a": TEXT, "b": 2, "c": 3}),
        (told(b=2, c=3), told(a=LONG, b=1), {"a": TEXT, "b": 1, "c": 3}),
        (told(a=LONG), told(b=LONG, a="'x'"), {"a": "x", "b": TEXT}),
    ],
)
def test_an_ensemble_tells_the_long_parameters_of_its_members(server, first, second, wanted):
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [code]}
        for name, code in (("CODE", first), ("OTHER", second))
    ]
    body = json.dumps({"inputs": inputs})
    status, _, answer = server.request("POST", "/v2/models/pair/infer", body)
    assert status == 200
    assert json.loads(answer)["parameters"] == wanted
    tensors = [coded(first), triton.InferInput("OTHER", [1], "BYTES")]
    tensors[1].set_data_from_numpy(np.array([second], object))
    with triton.InferenceServerClient(server.grpc_url) as client:
        parameters = client.infer("pair", tensors).get_response().parameters
    told_ = {name: value.string_param or value.int64_param for name, value in parameters.items()}
    assert told_ == wanted


def test_long_texts_of_called_models_reach_their_caller_in_order(server):
    called = f"""{told(long=LONG)}
sender = request.get_response_sender()
sender.send(answer("first"))
sender.send(result)
sender.send(answer("second"))
sender.send(failure({LONG}))
sender.send(answer("last"), flags=FINAL)
"""
    code = f"""
import json
got = []
inputs = [tensor("CODE", [{called!r}], object)]
for response in call(model="m", inputs=inputs, outputs=["OUT"]).exec(decoupled=True):
    if response.has_error():
        got.append(response.error().message() == {LONG})
    elif response.parameters() != "{{}}":
        got.append(json.loads(response.parameters()) == {{"long": {LONG}}})
    else:
        got.append(show(response)["OUT"][0].decode())
said = repr(got)
"""
    assert run(server, code) == "['first', True, 'second', True, 'last']"


def test_responses_keep_their_order_around_a_long_one(server):
    code = f"""
sender = request.get_response_sender()
for number in range(3):
    sender.send(answer(number))
    sender.send(failure(str(number) + {LONG}))
sender.send(flags=FINAL)
"""
    with Stream(server) as stream:
        stream.ask(code, "a")
        for number in range(3):
            assert stream.take() == ("a", str(number), False)
            assert stream.take() == str(number) + TEXT
        assert stream.take() == ("a", None, True)


def test_a_long_last_message_of_a_dying_stub_is_reported(server):
    code = f"""
sender = request.get_response_sender()
sender.send(answer("first"))
sender.send(failure({LONG}))
sender.send(answer("last"))
sender.send(failure({LONG}))
os.kill(os.getpid(), 9)
"""
    with Stream(server) as stream:
        stream.ask(code, "a")
        assert stream.take()[1] == "first"
        assert stream.take() == TEXT
        assert stream.take()[1] == "last"
        assert stream.take() == TEXT
        assert stream.take().startswith("Stub process 'm_0' is not healthy.")
        stream.ask(f"request.get_response_sender().send(answer('again'), flags={FINAL_FLAG})", "b")
        assert stream.take() == ("b", "again", True)


def test_a_request_that_is_cancelled_beside_a_long_response_ends(server):
    code = f"""
sender = request.get_response_sender()
while not sender.is_cancelled():
    sender.send(failure({LONG}))
sender.send(flags=FINAL)
"""
    with Stream(server) as stream:
        stream.ask(code, "a")
        assert stream.take() == TEXT
    with Stream(server) as stream:
        stream.ask(f"request.get_response_sender().send(answer('next'), flags={FINAL_FLAG})", "b")
        assert stream.take() == ("b", "next", True)


def test_calls_with_long_parameters_are_made_in_order(server):
    code = """
async def all_of_them():
    calls = [
        call(number, parameters={"text": "y" * length}).async_exec()
        for number, length in enumerate([3_000_000, 1, 2_000_000, 2])
    ]
    return await asyncio.gather(*calls)
answers = asyncio.run(all_of_them())
said = [(show(each)["SUM"][0], each.parameters().count("y")) for each in answers]
"""
    assert run(server, code) == "[(1.0, 3000000), (2.0, 1), (3.0, 2000000), (4.0, 2)]"


def test_long_parameters_of_calls_reach_their_models(each_server):
    """Directly, and through an ensemble."""
    told = f"""
parameters = __import__('json').loads(request.parameters())
result = answer((parameters['long'] == {LONG}, parameters['b']))"""
    code = f"""
got = []
for model, number in (("one", 1), ("chain", 2), ("chain", 3)):
    inputs = [tensor("CODE", [{told!r}], object)]
    parameters = {{"long": {LONG}, "b": number}}
    got.append(show(call(model=model, inputs=inputs, outputs=["OUT"], parameters=parameters).exec()))
said = got
"""
    assert run(each_server, code) == str([{"OUT": [f"(True, {n})".encode()]} for n in (1, 2, 3)])


def test_names_of_many_megabytes_are_refused_in_the_model(each_server):
    process = run(each_server, "said = os.getpid()")
    code = """
got = []
long = "m" * (17 << 20)
for named in (dict(model=long), dict(request_id=long), dict(outputs=[long])):
    got.append(show(call(1, **named).exec())[-72:])
for ask in (pb_utils.is_model_ready, pb_utils.load_model):
    try:
        ask(long)
    except pb_utils.TritonModelException as error:
        got.append(str(error)[-72:])
got.append(show(call(1, parameters={"long": long}).exec()))
said = "; ".join(map(str, got))
"""
    refused = "expected at most 16777216 bytes of names and texts, got 178"
    *told, answer = run(each_server, code).split("; ")
    assert len(told) == 5
    assert all(refused in each for each in told), told
    assert answer == "{'SUM': [2.0]}"
    assert run(each_server, "said = os.getpid()") == process
