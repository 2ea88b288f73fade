"""The response cache: what is answered from it, and what is executed."""

import http.client
import json
import queue
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, shared_memory

from tests.process.controlled import refusal
from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_model

SIZE = 9_000_000
LONG = 500_000
COUNTING = """
self.count += 1
if value.size and value.flat[0] == -1:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("bad"))
if value.size and value.flat[0] == -2:
    time.sleep(0.3)
count = np.full((len(value), 1) if BATCHED else (1,), self.count, np.int32)
outputs = {"OUT": value * 2, "COUNT": count}
asked = request.requested_output_names()
return respond(PARAMETERS, **{name: outputs[name] for name in outputs if name in asked})
"""
STRINGS = answering(
    """
self.count += 1
return respond(OUT=np.append(value, str(self.count).encode()))
""",
    "self.count = 0",
)
CALLING = answering("""
outputs = []
for _ in range(2):
    call = pb_utils.InferenceRequest(
        model_name="m", requested_output_names=["OUT", "COUNT"], inputs=request.inputs()
    )
    answer = call.exec()
    values = {each.name(): each.as_numpy() for each in answer.output_tensors()}
    outputs.append(values["COUNT"].item())
    # What a caller does to its answer stays with it.
    values["OUT"][:] = 0
count = pb_utils.Tensor("COUNT", np.array([outputs[0] * 1000 + outputs[1]], np.int32))
call = pb_utils.InferenceRequest(
    model_name="m", requested_output_names=["OUT"], inputs=request.inputs()
)
return pb_utils.InferenceResponse([*call.exec().output_tensors(), count])
""")
CACHED = "response_cache { enable: true }"
TENSORS = "IN FP32 [-1] > OUT FP32 [-1]; COUNT INT32 [1]"


def source(*, batched=False, parameters="{}"):
    counting = COUNTING.replace("BATCHED", str(batched)).replace("PARAMETERS", parameters)
    return answering(counting, "self.count = 0")


def write_models(repository):
    write_model(repository, "m", source(), config=CACHED, tensors=TENSORS)
    write_model(repository, "plain", source(), tensors=TENSORS)
    batching = "max_batch_size: 4\ndynamic_batching {}\n" + CACHED
    write_model(repository, "batched", source(batched=True), config=batching, tensors=TENSORS)
    write_model(
        repository, "saying", source(parameters="{'p': 'v'}"), config=CACHED, tensors=TENSORS
    )
    strings = "IN STRING [-1] > OUT STRING [-1]"
    write_model(repository, "strings", STRINGS, tensors=strings, config=CACHED)
    write_model(repository, "caller", CALLING, tensors=TENSORS)
    step = "{} IN=IN > OUT=OUT COUNT=COUNT".format
    write_ensemble(repository, "over_cached", step("m"), tensors=TENSORS)
    write_ensemble(repository, "cached_over_plain", step("plain"), tensors=TENSORS, config=CACHED)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("cached") / "models"
    write_models(repository)
    flags = [
        f"--cache-config=local,size={SIZE}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--trace-config=rate=1",
        f"--trace-config=triton,file={repository.parent / 'trace'}",
    ]
    with running_server(repository, *flags) as running:
        running.repository = repository
        yield running


@pytest.fixture
def client(server):
    with over_http.InferenceServerClient(server.http_url) as client:
        yield client


_numbers = iter(range(1000, 1_000_000))


def fresh(count=2):
    """Return values that no test has sent before."""
    return np.full(count, next(_numbers), np.float32)


def ask(client, model, values, outputs=("OUT", "COUNT"), kind=over_http, **options):
    """Return the outputs by name."""
    tensor = kind.InferInput("IN", list(values.shape), "FP32").set_data_from_numpy(values)
    wanted = [kind.InferRequestedOutput(name) for name in outputs]
    answer = client.infer(model, [tensor], outputs=wanted, **options)
    return {name: answer.as_numpy(name) for name in outputs}


def count(client, model, values, **options):
    """Return the model's number of the execution that the answer is from."""
    return ask(client, model, values, **options)["COUNT"].item()


def statistics(client, model):
    entry = client.get_inference_statistics(model)["model_stats"][0]
    return {
        **{name: each["count"] for name, each in entry["inference_stats"].items()},
        "executions": entry["execution_count"],
        "inferences": entry["inference_count"],
    }


def test_an_equal_request_gets_the_same_answer(client):
    values = fresh()
    first = ask(client, "m", values)
    second = ask(client, "m", values.copy(), request_id="other", priority=1, timeout=10**6)
    assert first["COUNT"] == second["COUNT"]
    np.testing.assert_array_equal(second["OUT"], values * 2)


@pytest.mark.parametrize("binary", [True, False])
def test_the_form_of_a_request_does_not_matter(server, client, binary):
    values = fresh()
    first = count(client, "m", values)
    body = {
        "id": "é",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": values.tolist()}],
        "outputs": [
            {"name": name, "parameters": {"binary_data": binary}} for name in ("OUT", "COUNT")
        ],
    }
    status, _, answer = server.request("POST", "/v2/models/m/infer", json.dumps(body))
    assert status == 200
    if not binary:
        document = json.loads(answer)
        assert [each["data"] for each in document["outputs"]] == [(values * 2).tolist(), [first]]
        assert document["id"] == "é"
    with over_grpc.InferenceServerClient(server.grpc_url) as other:
        assert count(other, "m", values, kind=over_grpc) == first
    generated = {"IN": values.tolist(), "text": "x"}
    for _ in range(2):
        status, _, answer = server.request("POST", "/v2/models/m/generate", json.dumps(generated))
        assert (status, json.loads(answer)["OUT"]) == (200, (values * 2).tolist())


def test_a_request_of_a_stream_and_strings(server):
    def value(text):
        tensor = over_grpc.InferInput("IN", [2], "BYTES")
        tensor.set_data_from_numpy(np.array([text, "ü"], object))
        answers = queue.Queue()
        with over_grpc.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put(error or result))
            client.async_stream_infer("strings", [tensor])
            result = answers.get(timeout=150)
        return [each.decode() for each in result.as_numpy("OUT")]

    text = f"x{next(_numbers)}"
    first = value(text)
    assert first[:2] == [text, "ü"]
    assert value(text) == first
    assert value(text + "y") != first
    # The same bytes, cut otherwise.
    assert value(text[:-1]) != first


def test_what_differs_is_executed(client):
    values = fresh()
    first = count(client, "m", values)
    for other in (values + 1, values[:1], np.append(values, np.float32(1)), np.float32([-0.0, 0])):
        assert count(client, "m", other) > first
    assert count(client, "m", np.float32([0, 0])) > count(client, "m", np.float32([-0.0, 0]))
    # Parameters reach the model, and the outputs that were asked for, too.
    assert count(client, "m", values, parameters={"k": 1}) > first
    assert count(client, "m", values, outputs=["COUNT"]) > first
    assert count(client, "m", values) == first


def test_a_request_with_a_sequence_is_executed(client):
    values = fresh()
    assert count(client, "m", values, sequence_id=5) < count(client, "m", values, sequence_id=5)


def test_versions_and_models_have_answers_of_their_own(client):
    values = fresh()
    np.testing.assert_array_equal(ask(client, "saying", values)["OUT"], values * 2)
    before = statistics(client, "m")["cache_miss"]
    count(client, "m", values)
    assert statistics(client, "m")["cache_miss"] == before + 1


def test_response_parameters_are_a_part_of_the_answer(server):
    values = fresh().tolist()
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": values}]}
    answers = [
        json.loads(server.request("POST", "/v2/models/saying/infer", json.dumps(body))[2])
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0]["parameters"] == {"p": "v"}


def test_errors_are_not_stored(client):
    before = statistics(client, "m")
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="bad"):
            ask(client, "m", np.float32([-1, 5]))
    after = statistics(client, "m")
    assert after["fail"] == before["fail"] + 2
    assert after["cache_hit"] == before["cache_hit"]


def test_batches_are_stored_for_each_request(client):
    values = np.stack([fresh(), fresh()])
    first = ask(client, "batched", values)["COUNT"]
    np.testing.assert_array_equal(ask(client, "batched", values)["COUNT"], first)
    assert count(client, "batched", values[:1]) > first[0]
    assert first.tolist() == [[first[0, 0]]] * 2


def test_models_that_call_a_cached_model_get_copies(client):
    values = fresh()
    answer = ask(client, "caller", values)
    first, second = divmod(answer["COUNT"].item(), 1000)
    assert first == second
    np.testing.assert_array_equal(answer["OUT"], values * 2)
    assert count(client, "m", values) == first
    again = ask(client, "caller", values)
    np.testing.assert_array_equal(again["OUT"], values * 2)


def test_members_of_ensembles_and_ensembles_are_cached(client):
    values = fresh()
    first = count(client, "m", values)
    assert count(client, "over_cached", values) == first
    np.testing.assert_array_equal(ask(client, "over_cached", values)["OUT"], values * 2)
    assert statistics(client, "over_cached")["cache_hit"] == 0
    first = count(client, "cached_over_plain", values)
    assert count(client, "cached_over_plain", values) == first
    assert count(client, "plain", values) == first + 1
    assert statistics(client, "cached_over_plain")["cache_hit"] == 1


def test_tensors_in_the_clients_memory_are_not_looked_up(client):
    values = fresh()
    key = f"/gpubridge-cache-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region("c", key, 64)
    try:
        client.register_system_shared_memory("c", key, 64)
        first = count(client, "m", values)
        before = statistics(client, "m")
        shared_memory.set_shared_memory_region(region, [values])
        tensor = over_http.InferInput("IN", [2], "FP32")
        tensor.set_shared_memory("c", 8)
        assert client.infer("m", [tensor]).as_numpy("COUNT").item() > first
        wanted = over_http.InferRequestedOutput("OUT")
        wanted.set_shared_memory("c", 8, offset=16)
        tensor.set_data_from_numpy(values)
        client.infer("m", [tensor], outputs=[wanted])
        written = shared_memory.get_contents_as_numpy(region, np.float32, [2], offset=16)
        np.testing.assert_array_equal(written, values * 2)
        after = statistics(client, "m")
        assert (after["cache_hit"], after["cache_miss"]) == (
            before["cache_hit"],
            before["cache_miss"],
        )
    finally:
        client.unregister_system_shared_memory("c")
        shared_memory.destroy_shared_memory_region(region)


def test_the_least_recently_used_make_room(client):
    kept, first = fresh(), fresh()
    kept_count, first_count = count(client, "m", kept), count(client, "m", first)
    for _ in range(6):
        # Of these, four fill the cache.
        count(client, "m", fresh(LONG))
        assert count(client, "m", kept) == kept_count
    assert count(client, "m", first) > first_count
    # One that is larger than all of it is answered, and others stay.
    large = fresh(SIZE // 4)
    assert count(client, "m", large) < count(client, "m", large)
    assert count(client, "m", kept) == kept_count


def long_requests(url):
    with over_http.InferenceServerClient(url) as client:
        values = [fresh(LONG) for _ in range(10)]
        return [bool((ask(client, "m", each)["OUT"] == each * 2).all()) for each in values]


def test_long_tensors_are_looked_up_beside_the_event_loop(server, client):
    values = fresh(LONG)
    first = ask(client, "m", values)
    hits = statistics(client, "m")["cache_hit"]
    second = ask(client, "m", values)
    assert first["COUNT"] == second["COUNT"]
    np.testing.assert_array_equal(second["OUT"], values * 2)
    values[-1] += 1
    assert count(client, "m", values) > first["COUNT"].item()
    assert statistics(client, "m")["cache_hit"] == hits + 1
    # Requests that are being looked up when the model is replaced are answered.
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(long_requests, server.http_url)
        for _ in range(2):
            (server.repository / "m" / "1" / "model.py").touch()
            client.load_model("m")
        assert asked.result() == [True] * 10


def test_equal_requests_at_once_are_all_answered(server):
    values = np.float32([-2, next(_numbers)])

    def one(_):
        with over_http.InferenceServerClient(server.http_url) as own:
            return ask(own, "m", values)["OUT"].tolist()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(8))) == [(values * 2).tolist()] * 8


def test_a_client_that_leaves_costs_nobody_else(server, client):
    values = np.float32([-2, next(_numbers)])
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": values.tolist()}]}
    connection.request("POST", "/v2/models/m/infer", json.dumps(body))
    connection.close()
    np.testing.assert_array_equal(ask(client, "m", values)["OUT"], values * 2)


def test_a_reload_forgets_answers_also_those_of_ensembles(server, client):
    values = fresh()
    for name in ("m", "plain", "cached_over_plain"):
        count(client, name, values)
    for name in ("m", "plain"):
        file = server.repository / name / "1" / "model.py"
        file.write_text(file.read_text().replace("value * 2", "value * 3"))
        client.load_model(name)
    np.testing.assert_array_equal(ask(client, "m", values)["OUT"], values * 3)
    np.testing.assert_array_equal(ask(client, "cached_over_plain", values)["OUT"], values * 3)
    assert statistics(client, "m")["cache_hit"] == 0
    for name in ("m", "plain"):
        write_model(
            server.repository, name, source(), config=CACHED * (name == "m"), tensors=TENSORS
        )
        client.load_model(name)
    np.testing.assert_array_equal(ask(client, "m", values)["OUT"], values * 2)


def test_traces_of_hits_are_whole(server, client):
    values = fresh()
    levels = '{"trace_level": ["TIMESTAMPS"]}', '{"trace_level": null}'
    first = count(client, "saying", values)
    for level in levels:
        path = "/v2/models/saying/trace/setting"
        assert server.request("POST", path, level)[0] == 200
        for asked in (values, values + 1) if level == levels[0] else (values,):
            assert (count(client, "saying", asked) == first) == (asked is values)
    trace = server.repository.parent / "trace"

    def spans():
        found = {}
        for entry in json.loads(trace.read_text()) if trace.exists() else ():
            for stamp in entry.get("timestamps", ()):
                found.setdefault(entry["id"], []).append(stamp["name"])
        return found.values()

    def complete():
        ends = {"REQUEST_START", "REQUEST_END", "HTTP_SEND_END"}
        return [names for names in spans() if ends <= set(names)]

    wait_until(lambda: len(complete()) == 2, "both traces", server)
    assert len(spans()) == 2
    assert ["COMPUTE_START" in names for names in complete()] == [False, True]


def test_without_a_cache_the_log_says_so(tmp_path):
    write_model(tmp_path, "m", source(), config=CACHED, tensors=TENSORS)
    with (
        running_server(tmp_path) as server,
        over_http.InferenceServerClient(server.http_url) as client,
    ):
        values = fresh()
        assert count(client, "m", values) < count(client, "m", values)
        assert "model 'm': the field 'response_cache' has no effect: there is no" in server.log()
        assert not any("nv_cache" in name for name in server.metrics())


def test_a_model_with_sequences_is_refused_as_by_triton(server):
    config = "max_batch_size: 4 sequence_batching {} " + CACHED
    write_model(server.repository, "refused", source(), config=config, tensors=TENSORS)
    text = (
        "Response Cache does not currently support model refused with sequence batching scheduler. "
        "Please disable the response cache."
    )
    assert text in refusal(server, "refused")
