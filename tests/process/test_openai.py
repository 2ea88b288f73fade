"""OpenAI's API over plain HTTP: answers, streams, errors, limits, clients that leave."""

import http.client
import json
import socket
import struct
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from gpubridge.protocol.curl_line import curl_line
from tests.commands import run_command
from tests.process.controlled import only, refusal
from tests.process.flag_sets import AGED
from tests.process.gates import Gate
from tests.process.model_sources import answering
from tests.process.openai_models import (
    chat_body,
    declared,
    events_of,
    said,
    write_openai_models,
)
from tests.process.server import running_server, wait_until, write_model
from tests.unit.model_configs import model_config

LIMIT = 3_000_000


@pytest.fixture(scope="module")
def server(repository):
    write_openai_models(repository)
    with running_server(repository, f"--http-max-input-size={LIMIT}") as running:
        yield running


def ask(server, path, body, **headers):
    """Return the status and the JSON document of an answer."""
    body = body if isinstance(body, bytes) else json.dumps(body)
    status, fields, answer = server.request("POST", f"/v1/{path}", body, headers)
    assert fields["Content-Type"] == "application/json"
    return status, json.loads(answer)


def chat(server, *steps, **members):
    return ask(server, "chat/completions", chat_body(*steps, **members))


def stream(server, *steps, **members):
    """Return the chunks of a chat, and the last event."""
    body = json.dumps(chat_body(*steps, stream=True, **members))
    status, fields, answer = server.request("POST", "/v1/chat/completions", body)
    assert (status, fields["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, last = events_of(answer.decode())
    return [json.loads(chunk) for chunk in chunks], last


def test_pieces_of_a_decoupled_model_are_one_message(server):
    status, answer = chat(server, ("text", "Hel"), ("text", "lo"))
    assert status == 200
    # Its responses need not have all outputs.
    assert "has no output" not in server.log()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    message = {"role": "assistant", "content": "Hello"}
    assert answer == {
        "object": "chat.completion",
        "model": "chat",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": None,
    }


def test_a_stream_has_a_chunk_for_each_piece(server):
    chunks, last = stream(server, ("text", "Hel"), ("text", "lo"))
    assert last == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_and_finish_reason_are_the_models(server):
    rest = {"finish_reason": "length", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    steps = ("text", "Hi"), ("json", json.dumps(rest))
    _, answer = chat(server, *steps)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]) == ("length", usage)
    chunks, last = stream(server, *steps, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None, None, usage]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 0]
    assert chunks[1]["choices"][0]["finish_reason"] == "length"
    assert last == "[DONE]"


def test_tool_calls_are_merged_as_their_pieces_come(server):
    call = {"index": 0, "id": "c1", "type": "function"}
    pieces = [
        {"message": {"tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a"'}}]}},
        {"message": {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}},
    ]
    steps = [("json", json.dumps(piece)) for piece in pieces]
    _, answer = chat(server, *steps)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        ],
    }
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    chunks, _ = stream(server, *steps)
    assert [c["choices"][0]["delta"].get("tool_calls") for c in chunks] == [
        *(piece["message"]["tool_calls"] for piece in pieces),
        None,
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_character_may_be_cut_between_pieces(server):
    cut = "ü".encode()
    steps = ("bytes", [cut[0]]), ("bytes", [cut[1]]), ("bytes", [0xFF])
    assert chat(server, *steps)[1]["choices"][0]["message"]["content"] == "ü\ufffd"
    assert said(stream(server, *steps)[0]) == "ü\ufffd"
    unfinished = ("bytes", [cut[0]])
    assert chat(server, unfinished)[1]["choices"][0]["message"]["content"] == "\ufffd"
    assert said(stream(server, unfinished)[0]) == "\ufffd"


def test_the_model_gets_the_body_as_it_was_sent(server):
    body = b'{ "messages":[{"role":"user","content":"repeat"}],\n "model" : "chat", "top_k": 5}'
    status, answer = ask(server, "chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"].encode()) == (200, body)


def test_a_long_body_and_a_long_answer_are_handled_beside_the_event_loop(server):
    padding = "x" * 2_000_000
    body = chat_body(user=padding)
    body["messages"][0]["content"] = "repeat"
    status, answer = ask(server, "chat/completions", body)
    assert status == 200
    assert json.loads(answer["choices"][0]["message"]["content"])["user"] == padding
    body["stream"] = True
    _, _, events = server.request("POST", "/v1/chat/completions", json.dumps(body))
    chunks = [json.loads(event) for event in events_of(events.decode())[:-1]]
    assert json.loads(said(chunks))["user"] == padding
    assert ask(server, "chat/completions", {**body, "model": "no"})[0] == 404


def test_a_model_that_is_not_decoupled_streams_one_piece(server):
    status, answer = chat(server, ("text", "all"), model="coupled")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "all")
    chunks, last = stream(server, ("text", "all"), model="coupled")
    assert ([c["choices"][0]["delta"].get("content") for c in chunks], last) == (
        ["all", None],
        "[DONE]",
    )


@pytest.mark.parametrize("steps", [[], [("text", "")]])
def test_a_model_may_say_nothing(server, steps):
    assert chat(server, *steps)[1]["choices"][0]["message"]["content"] == ""
    chunks, last = stream(server, *steps)
    assert (said(chunks), last) == ("", "[DONE]")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_completions_of_a_model_that_reads_json(server):
    body = {"model": "chat", "prompt": json.dumps([("text", "a"), ("text", "b")])}
    status, answer = ask(server, "completions", body)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    ]
    _, _, events = server.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
    *chunks, last = events_of(events.decode())
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert last == "[DONE]"


def test_a_generate_model_serves_completions_as_it_is(server):
    body = {
        "model": "generating",
        "prompt": ["once"],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["x"],
    }
    status, answer = ask(server, "completions", body)
    assert status == 200
    values, parameters = json.loads(answer["choices"][0]["text"])
    assert values == {"text_input": ["once"], "max_tokens": [3], "exclude_input_in_output": [True]}
    assert parameters == {"temperature": 0.5}
    status, answer = ask(server, "chat/completions", chat_body(model="generating"))
    assert (status, answer["error"]["message"]) == (
        404,
        "The model 'generating' does not serve chat",
    )


@pytest.mark.parametrize("model", ["vectors", "json_vectors"])
def test_embeddings_have_a_row_for_each_text(server, model):
    body = {"model": model, "input": ["a", "bcd"]}
    status, answer = ask(server, "embeddings", body)
    assert status == 200
    count = 7 if model == "json_vectors" else 0
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1, 0.5, -1]},
            {"object": "embedding", "index": 1, "embedding": [3, 0.5, -1]},
        ],
        "model": model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def test_an_embedding_in_base64(server):
    import base64

    body = {"model": "vectors", "input": "four", "encoding_format": "base64"}
    _, answer = ask(server, "embeddings", body)
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<3f", data) == (4, 0.5, -1)


def test_wrong_inputs_of_embeddings_are_refused(server):
    for given, status, text in (
        (["x"] * 5, 400, "inference request batch-size must be <= 4"),
        ([1, 2], 400, "strings, which this model takes"),
        ([], 400, "a non-empty array"),
        ({"a": 1}, 400, "a non-empty array"),
    ):
        answer = ask(server, "embeddings", {"model": "vectors", "input": given})
        assert answer[0] == status
        assert text in answer[1]["error"]["message"]
    # Two texts in one string: the model embeds each of its letters.
    status, answer = ask(server, "embeddings", {"model": "json_vectors", "input": "ab"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "expected 1 rows in 'embedding', got 2" in answer["error"]["message"]


def test_models_that_serve_the_api_are_listed(server):
    status, _, body = server.request("GET", "/v1/models")
    models = json.loads(body)["data"]
    assert status == 200
    names = ["chat", "coupled", "full", "generating", "json_vectors", "late", "vectors"]
    assert [model["id"] for model in models] == names
    status, _, body = server.request("GET", "/v1/models/chat")
    assert (status, json.loads(body)) == (200, models[0])
    assert models[0]["object"] == "model"
    for name in ("other", "none"):
        status, _, body = server.request("GET", f"/v1/models/{name}")
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


USER = {"role": "user", "content": "x"}
CHAT = {"model": "chat", "messages": [USER]}


def saying(*messages):
    return {**CHAT, "messages": messages}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        (b"{", None, "expected a JSON body"),
        (b"", None, "expected a JSON body"),
        (b"[]", None, "expected a JSON object"),
        ({"messages": [USER]}, "model", "Missing required parameter: 'model'"),
        ({"model": "chat"}, "messages", "Missing required parameter: 'messages'"),
        ({"model": "chat", "messages": None}, "messages", "Missing required parameter"),
        ({**CHAT, "model": 5}, "model", "expected a string"),
        ({**CHAT, "messages": []}, "messages", "a non-empty array"),
        ({**CHAT, "messages": {"a": 1}}, "messages", "an array"),
        ({**CHAT, "messages": ["x"]}, "messages[0]", "expected an object"),
        (saying(USER, {**USER, "role": "robot"}), "messages[1].role", "expected one of"),
        (saying({**USER, "role": [1]}), "messages[0].role", "expected one of"),
        (saying({"role": "user"}), "messages[0].content", "expected a string"),
        (saying({**USER, "content": 1}), "messages[0].content", "expected a string"),
        (saying({**USER, "content": [{}]}), "messages[0].content", "with a type"),
        ({**CHAT, "n": 2}, "n", "expected 1"),
        ({**CHAT, "n": True}, "n", "expected an integer"),
        ({**CHAT, "temperature": "hot"}, "temperature", "expected a number"),
        ({**CHAT, "max_tokens": 1.5}, "max_tokens", "an integer"),
        ({**CHAT, "max_tokens": -1}, "max_tokens", "0 or more"),
        ({**CHAT, "max_completion_tokens": -1}, "max_completion_tokens", "0 or more"),
        ({**CHAT, "stream": "yes"}, "stream", "true or false"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
        ({**CHAT, "tools": {}}, "tools", "an array"),
    ],
)
def test_wrong_requests_are_refused_in_the_apis_form(server, body, param, text):
    status, answer = ask(server, "chat/completions", body)
    assert status == 400
    error = answer["error"]
    assert text in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)


def test_members_of_another_endpoint_are_not_checked(server):
    body = {"model": "chat", "prompt": json.dumps([("text", "a")]), "max_completion_tokens": "x"}
    assert ask(server, "completions", body)[0] == 200


def test_a_wrong_prompt_is_refused(server):
    for prompt in (5, [], ["a", 5], [["a"]], {"a": 1}):
        body = {"model": "chat", "prompt": prompt, "messages": 5}
        status, answer = ask(server, "completions", body)
        assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer = ask(server, "completions", {"model": "generating", "prompt": ["a", "b"]})
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("model", ["none", "other"])
def test_an_unknown_model_is_not_found(server, model):
    for body in ({**CHAT, "model": model}, {**CHAT, "model": model, "stream": True}):
        status, answer = ask(server, "chat/completions", body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_paths_and_methods_are_refused_in_the_apis_form(server):
    for method, path, expected in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/images/generations", 404),
    ):
        status, _, body = server.request(method, path)
        assert status == expected
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert isinstance(json.loads(server.request("GET", "/v2/none")[2])["error"], str)


def test_a_body_that_is_too_long_is_refused_in_the_apis_form(server):
    status, answer = ask(server, "chat/completions", b"x" * (LIMIT + 1))
    assert status == 413
    assert "--http-max-input-size" in answer["error"]["message"]


def test_an_error_of_the_model_has_its_status(server):
    for members in ({}, {"stream": True}):
        status, answer = chat(server, ("error", "no luck"), **members)
        assert status == 500
        assert answer["error"] == {
            "message": "no luck",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    assert chat(server, ("text", "a"), ("error", "no luck"))[0] == 500


def test_an_error_within_a_stream_is_its_last_event(server):
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    body = chat_body(("text", "a"), ("error", "no luck"), ("text", "b"), stream=True)
    for _ in range(2):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        first, last = events_of(connection.getresponse().read().decode())
        assert said([json.loads(first)]) == "a"
        assert json.loads(last)["error"]["message"] == "no luck"
    # The connection is as good as before.
    connection.request("POST", "/v1/chat/completions", json.dumps(chat_body(("text", "a"))))
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("[]", "expected a JSON object"),
        ("{", "expected a JSON object"),
        ('{"finish": "stop"}', "got 'finish' of str"),
        ('{"message": {"content": 5}}', "expected a string as content"),
        ('{"message": {"tool_calls": [5]}}', "objects as tool_calls"),
        ('{"usage": 5}', "got 'usage' of int"),
    ],
)
def test_a_response_that_breaks_the_convention_is_an_error_of_the_model(server, fields, text):
    status, answer = chat(server, ("text", "a"), ("json", fields))
    assert status == 500
    assert "model 'chat'" in answer["error"]["message"]
    assert text in answer["error"]["message"]


@pytest.mark.parametrize(
    ("model", "status", "kind"), [("full", 429, "rate_limit_error"), ("late", 503, "server_error")]
)
def test_a_full_queue_and_a_request_that_is_late(server, model, status, kind):
    body = {"model": model, "prompt": "slow"}
    gate = Gate(server.repositories[0] / model / "1" / "gate")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server, "completions", body) for _ in range(4)]
        # One is at the model.
        wait(asked, return_when=FIRST_COMPLETED)
        gate.open()
    answers = [each.result() for each in asked]
    refused = [answer["error"]["type"] for code, answer in answers if code == status]
    assert set(refused) == {kind}
    assert {code for code, _ in answers} >= {200, status}


def test_a_client_that_leaves_cancels_its_request(server, tmp_path):
    mark = tmp_path / "cancelled"
    body = json.dumps(chat_body(("text", "a"), ("until_cancelled", str(mark)), stream=True))
    host, _, port = server.http_url.partition(":")
    with socket.create_connection((host, int(port)), timeout=150) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall((head + body).encode())
        received = b""
        while b"data: " not in received:
            received += sock.recv(65_536)
    wait_until(mark.exists, "the model to see that its client left", server)
    assert chat(server, ("text", "a"))[0] == 200


def test_the_model_is_told_when_its_own_error_ends_the_answer(server, tmp_path):
    mark = tmp_path / "cancelled"
    steps = ("text", "a"), ("json", "{"), ("until_cancelled", str(mark))
    assert chat(server, *steps)[0] == 500
    wait_until(mark.exists, "the model to see that its answer has ended", server)


def test_a_key_is_asked_for_as_openais(tmp_path):
    write_openai_models(tmp_path)
    told = answering("return respond(text_output=np.array([request.parameters()], np.object_))")
    tensors = "openai_request STRING [1] > text_output STRING [1]"
    write_model(tmp_path, "told", told, tensors=tensors, config=declared("chat"))
    # The key of inference is not asked for, too.
    with running_server(tmp_path, *AGED, *only("chat", "told")) as server:
        for headers, expected in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            body = json.dumps(chat_body(("text", "a")))
            answers = [
                server.request("GET", "/v1/models", None, headers),
                server.request("GET", "/v1/models/chat", None, headers),
                server.request("POST", "/v1/chat/completions", body, headers),
            ]
            assert [answer[0] for answer in answers] == [expected] * 3
            if expected == 401:
                codes = {json.loads(answer[2])["error"]["code"] for answer in answers}
                assert codes == {"invalid_api_key"}
        assert server.request("GET", "/v2/models/chat")[0] == 200
        # Models see headers, but not the key.
        for key in (
            {"Authorization": "Bearer secret"},
            {"Api-Key": "secret", "authorization": "b"},
        ):
            _, answer = ask(
                server, "chat/completions", chat_body(model="told"), **key, **{"X-A": "1"}
            )
            assert json.loads(answer["choices"][0]["message"]["content"]) == {"X-A": "1"}


@pytest.mark.parametrize(
    ("endpoints", "text"),
    [
        ("speech", "Incorrect value for OPENAI: 'speech'"),
        ("chat", "declares OPENAI 'chat': expected an input openai_request of datatype BYTES"),
        (
            "embeddings",
            "declares OPENAI 'embeddings': expected an output embedding of datatype FP32",
        ),
    ],
)
def test_a_model_without_the_tensors_is_not_loaded(server, endpoints, text):
    write_model(
        server.repositories[0],
        "refused",
        "class TritonPythonModel: pass",
        tensors="text_input STRING [1]",
        config=declared(endpoints),
    )
    assert text in refusal(server, "refused")


@pytest.mark.parametrize(
    ("name", "endpoint", "told"),
    [
        ("vectors", "embeddings", '"object":"embedding"'),
        # The scripted model takes a script, not a text.
        ("chat", "chat", "the model dropped this request"),
        ("chat", "completions", "the model dropped this request"),
    ],
)
def test_the_command_of_a_model_asks_its_endpoint(server, name, endpoint, told):
    config = model_config(
        "openai_request STRING [1]",
        "text_output STRING [1]; embedding FP32 [3]",
        declared(endpoint),
    )
    line = curl_line(replace(config, name=name), f"http://{server.http_url}", {})
    assert told in run_command(["bash", "-c", line.replace("curl", "curl -sS")]).stdout
