"""Ensembles whose members answer any number of times, over gRPC streams."""

import queue

import numpy as np
import pytest

from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

triton = pytest.importorskip("tritonclient.grpc")

# Answers as often as IN says: 0, 1, 2, ...; COUNT in its directory tells how often so far.
COUNT = sending(
    """
from pathlib import Path
for i in range(int(value[0])):
    if sender.is_cancelled():
        break
    send(OUT=np.full(WIDTH, i, np.float32))
    Path(SENT + ".new").write_text(str(i + 1))
    Path(SENT + ".new").rename(SENT)
"""
)
ADD = answering(
    """
# Some take longer, so that instances overtake each other.
time.sleep(0.02 if value[0] % 3 == 1 else 0)
if value[0] == 266:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one"))
return respond(OUT=value + 1)
"""
)
# Calls an ensemble of many answers, and wants no more after the first.
STOPS = answering(
    """
wants = pb_utils.InferenceRequest(
    model_name="flow", requested_output_names=["B"], inputs=[pb_utils.Tensor("A", np.float32([100_000]))]
)
answers = wants.exec(decoupled=True)
next(answers)
answers.cancel()
errors = [each.error().message() for each in answers if each.has_error()]
return respond(OUT=np.float32([errors == ["the request was cancelled"]]))
"""
)
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """File with the progress of the source of the wide answers."""
    return tmp_path_factory.mktemp("sent") / "count"


@pytest.fixture(scope="module")
def server(repository, sent):
    for name, width in (("count", "1"), ("wide", "1 << 16")):
        source = COUNT.replace("WIDTH", width).replace("SENT", repr(str(sent)))
        write_model(repository, name, source, config=DECOUPLED)
    three = "instance_group [{ count: 3 kind: KIND_CPU }]"
    write_model(repository, "add", ADD, config=three)
    write_model(repository, "stops", STOPS)
    write_ensemble(repository, "flow", "count IN=A > OUT=t", "add IN=t > OUT=B")
    write_ensemble(
        repository,
        "twice",
        "count IN=A > OUT=t",
        "add IN=t > OUT=u",
        "count IN=u > OUT=B",
    )
    write_ensemble(repository, "within", "flow A=A > B=t", "add IN=t > OUT=B")
    write_ensemble(repository, "wides", "wide IN=A > OUT=t", "add IN=t > OUT=B")
    directory = write_ensemble(repository, "few", "wide IN=A > OUT=t", "add IN=t > OUT=B")
    path = directory / "config.pbtxt"
    text = path.read_text().replace("scheduling {", "scheduling { max_inflight_requests: 1")
    path.write_text(text)
    with running_server(repository) as running:
        yield running


class Stream:
    """A gRPC stream of one client."""

    def __init__(self, server):
        self.answers = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, model, value):
        tensor = triton.InferInput("A", [1], "FP32")
        tensor.set_data_from_numpy(np.array([value], np.float32))
        self.client.async_stream_infer(model, [tensor], enable_empty_final_response=True)

    def take(self):
        """The first element of the next answer or None, and whether it is the last; or its error."""
        result, error = self.answers.get(timeout=150)
        if error is not None:
            return error.message()
        data = result.as_numpy("B")
        final = result.get_response().parameters["triton_final_response"].bool_param
        return None if data is None else float(data[0]), final

    def take_all(self):
        """Every answer of one request, without what is final."""
        values = []
        while True:
            value, final = self.take()
            if value is not None:
                values.append(value)
            if final:
                return values


@pytest.fixture
def stream(server):
    with Stream(server) as stream:
        yield stream


def test_each_answer_flows_on_in_order(stream):
    for count in (0, 1, 2, 20):
        stream.ask("flow", count)
        assert stream.take_all() == [i + 1.0 for i in range(count)]


def test_a_call_that_is_cancelled_ends_its_ensemble(server):
    assert b'"OUT":1' in server.request("POST", "/v2/models/stops/generate", '{"IN": [0]}')[2]


def test_decoupled_after_decoupled(stream):
    stream.ask("twice", 4)
    # In the order in which the last such member answers, which is one after the other.
    assert sorted(stream.take_all()) == sorted(float(i) for n in (1, 2, 3, 4) for i in range(n))


def test_an_ensemble_with_decoupled_members_within_another(stream):
    stream.ask("within", 5)
    assert stream.take_all() == [i + 2.0 for i in range(5)]


def test_an_error_ends_the_request(stream):
    stream.ask("wides", 300)
    said = []
    while not said or not isinstance(said[-1], str):
        said.append(stream.take())
    assert said[-1] == "in ensemble 'wides', not this one"
    # All that was answered before came in order, and nothing follows.
    assert [value for value, _ in said[:-1]] == [i + 1.0 for i in range(len(said) - 1)]
    stream.ask("flow", 1)
    assert stream.take_all() == [1.0]


def test_such_an_ensemble_is_decoupled(server):
    status, _, body = server.request("POST", "/v2/models/flow/infer", b"{}")
    assert status == 501
    assert b"doesn't support models with decoupled transaction policy" in body
    assert b'"decoupled":true' in server.request("GET", "/v2/models/flow/config")[2]


@pytest.mark.parametrize("model", ["wides", "few"])
def test_a_slow_client_holds_up_no_member(server, sent, model):
    sent.unlink(missing_ok=True)
    with triton.InferenceServerClient(server.grpc_url) as client:
        tensor = triton.InferInput("A", [1], "FP32")
        tensor.set_data_from_numpy(np.array([260], np.float32))
        taken = []
        ready = queue.Queue()

        def take(result, error):
            ready.get(timeout=150)
            taken.append(error or float(result.as_numpy("B")[0]))

        client.start_stream(take)
        client.async_stream_infer(model, [tensor])
        wait_until(lambda: sent.exists() and sent.read_text() == "260", "the member to end", server)
        assert not taken
        for _ in range(260):
            ready.put(None)
        wait_until(lambda: len(taken) == 260, "every answer", server)
        client.stop_stream()
    assert taken == [i + 1.0 for i in range(260)]
