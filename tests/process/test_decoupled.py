"""Models that answer by themselves: what their response senders do, and what clients get."""

import json
import shutil

import numpy as np
import pytest

from tests.process.server import running_server, wait_until
from tests.process.streams import Stream, write_models

grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.grpc import service_pb2_grpc  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    for name in ("counted", "called"):
        shutil.copytree(repository / "m", repository / name)
    with running_server(repository) as running:
        yield running


@pytest.fixture
def stream(server):
    with Stream(server) as stream:
        yield stream


def test_any_number_of_responses_during_execute(stream):
    for count in (0, 1, 3, 200):
        stream.ask(
            f"s = request.get_response_sender()\nfor i in range({count}): s.send(answer(i))\n"
            "s.send(flags=FINAL)",
            "r",
        )
        assert [stream.take() for _ in range(count)] == [("r", str(i), False) for i in range(count)]
        assert stream.take() == ("r", None, True)


def test_the_last_response_may_carry_the_final_flag(stream):
    stream.ask("s = request.get_response_sender()\ns.send(answer(1))\ns.send(answer(2), FINAL)")
    assert [stream.take(), stream.take()] == [("", "1", False), ("", "2", True)]
    # Nothing follows: the next answer is that of the next request.
    stream.ask("request.get_response_sender().send(answer(3), FINAL)", "next")
    assert stream.take() == ("next", "3", True)


def test_an_empty_final_response_is_sent_only_to_who_asks(stream):
    stream.ask("request.get_response_sender().send(flags=FINAL)", "quiet", final=False)
    stream.ask("request.get_response_sender().send(flags=FINAL)", "told")
    assert stream.take() == ("told", None, True)


def test_responses_after_execute_in_any_order_between_requests(stream):
    for name in ("first", "second"):
        stream.ask(
            "kept.append(request.get_response_sender()); kept[-1].send(answer('soon'))", name
        )
        assert stream.take() == (name, "soon", False)
    stream.ask(
        "def late():\n"
        "    second, first = kept.pop(), kept.pop()\n"
        "    second.send(answer(2), FINAL); first.send(answer(1), FINAL)\n"
        "threading.Thread(target=late).start()\n"
        "request.get_response_sender().send(flags=FINAL)",
        "third",
        final=False,
    )
    assert stream.take() == ("second", "2", True)
    assert stream.take() == ("first", "1", True)


KEEP = "kept.append(request.get_response_sender())"
LET_GO = "[each.send(answer(1), FINAL) for each in kept]; kept.clear()"
CALLS = f"""
def asked(code):
    inputs = [pb_utils.Tensor("CODE", np.array([code], object))]
    return pb_utils.InferenceRequest(
        model_name="called", requested_output_names=["OUT"], inputs=inputs
    ).async_exec(decoupled=True)

async def all_of_them():
    codes = [{KEEP!r}] * 4200 + [{f"{KEEP}; {LET_GO}"!r}]
    calls = await asyncio.gather(*map(asked, codes))
    return sum([len([each async for each in call]) for call in calls])

request.get_response_sender().send(answer(asyncio.run(all_of_them())), FINAL)
"""


def test_thousands_of_requests_and_calls_are_answered_by_the_last(stream):
    for number in range(5000):
        stream.ask(f"{KEEP}; {LET_GO}" if number == 4999 else KEEP, str(number))
    assert [stream.take() for _ in range(5000)] == [(str(n), "1", True) for n in range(5000)]
    stream.ask(CALLS, "calls")
    assert stream.take() == ("calls", "4201", True)


def test_threads_send_at_once_and_nothing_is_lost(stream):
    stream.ask(
        "s = request.get_response_sender()\n"
        "def some(k):\n"
        "    for i in range(100): s.send(answer(k * 100 + i))\n"
        "def all_of_them():\n"
        "    threads = [threading.Thread(target=some, args=(k,)) for k in range(4)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]; s.send(flags=FINAL)\n"
        "threading.Thread(target=all_of_them).start()"
    )
    texts = [int(stream.take()[1]) for _ in range(400)]
    assert sorted(texts) == list(range(400))
    for k in range(4):
        mine = [text for text in texts if text // 100 == k]
        assert mine == sorted(mine)
    assert stream.take() == ("", None, True)


def test_an_error_is_one_of_the_responses(stream):
    stream.ask(
        "s = request.get_response_sender()\ns.send(answer(1)); s.send(failure('boom'))\n"
        "s.send(answer(2)); s.send(flags=FINAL)"
    )
    assert [stream.take() for _ in range(4)] == [
        ("", "1", False),
        "boom",
        ("", "2", False),
        ("", None, True),
    ]


@pytest.mark.parametrize(
    ("code", "model", "expected"),
    [
        ("request.get_response_sender().send(failure('boom'), FINAL)", "m", [("boom", True)]),
        ("raise ValueError('no')", "m", [("ValueError: no", True)]),
        (
            "s = request.get_response_sender(); s.send(failure('boom')); s.send(flags=FINAL)",
            "m",
            [("boom", False), ("", True)],
        ),
        ("result = failure('boom')", "one", [("boom", True)]),
    ],
)
def test_an_error_says_whether_it_is_the_last_response(server, code, model, expected):
    answers = responses_to(server, code, model)
    assert [answer.infer_response.model_name for answer in answers] == [model] * len(expected)
    assert [answer.infer_response.id for answer in answers] == ["name"] * len(expected)
    for answer, (text, final) in zip(answers, expected, strict=True):
        assert text in answer.error_message
        told = answer.infer_response.parameters["triton_final_response"]
        assert (told.WhichOneof("parameter_choice"), told.bool_param) == ("bool_param", final)


def test_the_error_of_a_request_that_no_model_got_is_no_response(server):
    (answer,) = responses_to(server, "pass", "nowhere")
    assert "Request for unknown model: 'nowhere' is not found" in answer.error_message
    assert answer.infer_response.id == "name"
    assert not answer.infer_response.parameters


def coded(code):
    """Return the input of a model that runs code."""
    return triton.InferInput("CODE", [1], "BYTES").set_data_from_numpy(np.array([code], object))


def responses_to(server, code, model):
    """All messages that answer one request of a stream, with errors as they are sent."""
    message = triton._utils._get_inference_request(
        model, [coded(code)], "", "name", None, 0, False, False, 0, None, None
    )
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return list(stub.ModelStreamInfer(iter([message]), timeout=150))


def test_execute_that_raises_ends_its_requests_and_closes_their_senders(stream):
    stream.ask("kept.append(request.get_response_sender()); raise ValueError('no')")
    assert (
        "Failed to process the request(s) for model 'm_0', message: ValueError: no" in stream.take()
    )
    stream.ask(
        "request.get_response_sender().send(refused(lambda: kept.pop().send(answer(1))), FINAL)"
    )
    closed = "Unable to send response. Response sender has been closed."
    assert stream.take() == ("", closed, True)


def test_execute_that_raises_after_the_last_response_changes_nothing(stream):
    stream.ask("request.get_response_sender().send(answer(1), FINAL); raise ValueError('no')")
    stream.ask("request.get_response_sender().send(answer(2), FINAL)")
    assert [stream.take(), stream.take()] == [("", "1", True), ("", "2", True)]


def test_a_sender_that_is_dropped_ends_its_request(stream):
    stream.ask("request.get_response_sender().send(answer(1))", "some")
    assert [stream.take(), stream.take()] == [("some", "1", False), ("some", None, True)]
    stream.ask("request.get_response_sender()", "none")
    assert "dropped this request without sending a response" in stream.take()
    stream.ask("pass", "not even taken")
    assert "dropped this request without sending a response" in stream.take()


def test_coroutines_of_a_decoupled_model_run_beside_each_other(stream):
    stream.ask("wait", "waits", model="coroutines")
    stream.ask("go", "goes", model="coroutines")
    answers = [stream.take() for _ in range(4)]
    assert [a for a in answers if a[0] == "waits"] == [
        ("waits", "wait", False),
        ("waits", None, True),
    ]
    assert [a for a in answers if a[0] == "goes"] == [("goes", "go", False), ("goes", None, True)]
    stream.ask("fail", model="coroutines")
    assert "ValueError: no such luck" in stream.take()


ONE_ONLY = "Unable to send response. Non-decoupled model cannot send more than one response."
SENDER = "s = request.get_response_sender()"
EARLY = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."


@pytest.mark.parametrize(
    ("model", "code", "text"),
    [
        ("one", "s.send(answer(1), FINAL)", "1"),
        ("one", "s.send(answer(1)); s.send(flags=FINAL)", "1"),
        ("one", "s.send(answer(1))", "1"),
        ("one", "s.send(answer(1), FINAL); result = answer(2)", "1"),
        ("one", "result = answer(2)", "2"),
        ("one", "s.send(refused(lambda: s.send(flags=FINAL)), FINAL)", EARLY),
        ("one", "threading.Timer(0.05, lambda s=s: s.send(answer(3), FINAL)).start()", "3"),
        ("one", "", "without sending a response"),
        ("one", None, "Expected an 'InferenceResponse' object"),
        # Its `execute` returns None.
        ("silent", "s.send(answer(1), FINAL)", "1"),
        ("silent", "threading.Timer(0.05, lambda s=s: s.send(answer(3), FINAL)).start()", "3"),
        ("silent", "", "without sending a response"),
        ("silent", "raise StopIteration", "StopIteration"),
        ("silent", None, "Expected a list in the execute return"),
    ],
)
def test_other_models_may_send_their_one_response(server, model, code, text):
    said = told(server, model, "pass" if code is None else f"{SENDER}\n{code}")
    assert said == text if text in ("1", "2", "3") else text in said


@pytest.mark.parametrize("model", ["one", "silent"])
def test_other_models_may_not_send_a_second_response(server, model):
    code = f"{SENDER}\ns.send(answer(1)); kept.append(refused(lambda: s.send(answer(2))))"
    assert told(server, model, code) == "1"
    assert told(server, model, f"{SENDER}\ns.send(kept.pop(), FINAL)") == ONE_ONLY


def told(server, model, code):
    """Return what a request of a model is answered, or its error."""
    with triton.InferenceServerClient(server.grpc_url) as client:
        try:
            return client.infer(model, [coded(code)]).as_numpy("OUT").item().decode()
        except InferenceServerException as error:
            return error.message()


def test_calls_for_one_response_refuse_decoupled_models(server):
    body = json.dumps(
        {"inputs": [{"name": "CODE", "datatype": "BYTES", "shape": [1], "data": [""]}]}
    )
    status, _, answer = server.request("POST", "/v2/models/m/infer", body)
    assert status == 501
    assert b"HTTP end point doesn't support models with decoupled" in answer
    refused = pytest.raises(InferenceServerException, match="ModelInfer RPC doesn't support")
    with triton.InferenceServerClient(server.grpc_url) as client, refused:
        client.infer("m", [coded("")])


def test_a_death_ends_the_requests_that_were_open(server, stream):
    stream.ask("kept.append(request.get_response_sender()); kept[-1].send(answer(1))", "open")
    assert stream.take() == ("open", "1", False)
    stream.ask("os._exit(3)")
    errors = [stream.take(), stream.take()]
    assert all("Stub process 'm_0' is not healthy. It exited with code 3" in e for e in errors)
    wait_until(server.is_ready, "the stub to be back", server)
    stream.ask("request.get_response_sender().send(answer(len(kept)), FINAL)")
    assert stream.take() == ("", "0", True)


def test_statistics_count_a_request_when_it_is_over(server, stream):
    def counts():
        stats = server.statistics("counted")
        inference = stats["inference_stats"]
        return (
            stats["inference_count"],
            stats["execution_count"],
            inference["success"]["count"],
            inference["fail"]["count"],
            inference["compute_infer"]["count"],
        )

    def ask(code):
        stream.ask(code, model="counted")

    ask("kept.append(request.get_response_sender()); kept[0].send(answer(1))")
    stream.take()
    ask("request.get_response_sender().send(answer(1), FINAL)")
    stream.take()
    wait_until(lambda: counts()[1] == 2, "both executions to be counted", server)
    assert counts() == (1, 2, 1, 0, 1)
    ask("kept.pop().send(flags=FINAL); raise ValueError")
    wait_until(lambda: counts()[3] == 1, "the failure to be counted", server)
    assert counts() == (2, 3, 2, 1, 2)
