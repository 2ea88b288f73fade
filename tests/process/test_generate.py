"""The generate routes, and clients that read slowly or leave."""

import http.client
import json
import socket

import pytest

from tests.process.server import running_server, wait_until
from tests.process.streams import Stream, write_models


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    with running_server(repository) as running:
        yield running


@pytest.fixture
def stream(server):
    with Stream(server) as stream:
        yield stream


def generate(server, code, path="generate", **members):
    body = json.dumps({"CODE": code, **members})
    status, headers, answer = server.request("POST", f"/v2/models/m/{path}", body)
    return status, headers["Content-Type"], answer.decode()


def test_generate_gives_the_one_response(server):
    status, kind, answer = generate(
        server,
        "request.get_response_sender().send(answer(request.parameters()), FINAL)",
        id="i",
        k=1,
    )
    assert (status, kind) == (200, "application/json")
    assert json.loads(answer) == {
        "OUT": '{"id":"i","k":1}',
        "id": "i",
        "model_name": "m",
        "model_version": "1",
    }


@pytest.mark.parametrize("count", [0, 2, 500])
def test_generate_wants_exactly_one_response(server, count):
    code = f"s = request.get_response_sender()\nfor i in range({count}): s.send(answer(i))\n"
    status, _, answer = generate(server, code + "s.send(flags=FINAL)")
    assert status == 400
    assert "generate expects model to produce exactly 1 response" in answer


def test_generate_stream_gives_an_event_for_each_response(server):
    code = "s = request.get_response_sender()\ns.send(answer(1)); s.send(failure('x'))\ns.send(answer(2), FINAL)"
    status, kind, answer = generate(server, code, "generate_stream")
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line]
    assert [event.get("OUT", event.get("error")) for event in events] == ["1", "x", "2"]


def test_a_first_event_that_is_an_error_gives_the_status(server):
    code = "request.get_response_sender().send(failure('x'), FINAL)"
    assert generate(server, code, "generate_stream")[::2] == (400, 'data: {"error":"x"}\n\n')
    assert generate(server, code)[::2] == (400, '{"error":"x"}')


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            '{"CODE": "pass", "CODE": "pass"}',
            "[request id: <id_unknown>] input 'CODE' already exists",
        ),
        ('{"CODE": "pass", "k": 1, "k": 1}', "member 'k' of the request: expected it once"),
        ('{"CODE": "pass", "k": 1, "\\u006b": 1}', "member 'k' of the request: expected it once"),
        ('{"id": "1", "CODE": "pass", "id": "2"}', "member 'id' of the request: expected it once"),
        ('{"CODE": "", "parameters": {"k": 1, "k": 2}}', "member 'k' of the request"),
        ('{"CODE": "", "parameters": {"k": 1}, "parameters": {}}', "member 'parameters' of the"),
    ],
)
def test_a_member_that_is_there_twice_is_refused(server, body, text):
    status, _, answer = server.request("POST", "/v2/models/m/generate", body)
    assert status == 400
    assert text in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"CODE": 1}', "expected a string for element 0 of input 'CODE' (BYTES), got 1"),
        ("CODE=x", 'a JSON object of inputs and parameters, such as {"CODE": "text"}'),
        (
            "[]",
            'got an array. Expected a JSON object of inputs and parameters, such as {"CODE": "text"}',
        ),
    ],
)
def test_what_was_expected_is_told(server, body, text):
    status, _, answer = server.request("POST", "/v2/models/m/generate", body)
    assert status == 400
    assert json.loads(answer)["error"].endswith(text)


def test_members_that_may_be_misspelt_inputs_are_named(server):
    status, _, answer = server.request("POST", "/v2/models/m/generate", '{"CODEE": "", "k": 1}')
    assert status == 400
    error = json.loads(answer)["error"]
    assert error.endswith(
        "required input(s) ['CODE']. Please provide all required input(s). Taken "
        "as parameters: 'CODEE', 'k'."
    )


def test_values_may_look_like_names(server):
    code = 'request.get_response_sender().send(answer(request.parameters()), FINAL) # "k" "k" "id"'
    _, _, answer = generate(server, code, k="CODE", id="\u00e9")
    assert json.loads(json.loads(answer)["OUT"]) == {"k": "CODE", "id": "\u00e9"}


def test_generate_over_http_1_0_ends_with_the_connection(server):
    body = json.dumps(
        {"CODE": "s = request.get_response_sender()\ns.send(answer(1), FINAL)"}
    ).encode()
    host, _, port = server.http_url.partition(":")
    with socket.create_connection((host, int(port)), timeout=150) as sock:
        head = f"POST /v2/models/m/generate_stream HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert rest == b'data: {"OUT":"1","model_name":"m","model_version":"1"}\n\n'


def test_keep_alive_goes_on_after_a_stream(server):
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    for _ in range(3):
        body = json.dumps({"CODE": "request.get_response_sender().send(answer(1), FINAL)"})
        connection.request("POST", "/v2/models/m/generate_stream", body)
        assert connection.getresponse().read().startswith(b"data: ")
    connection.close()


FLOOD = """
s = request.get_response_sender()
def flood():
    sent = 0
    while sent < {most} and not s.is_cancelled():
        s.send(answer("x" * {size}), wait={wait})
        sent += 1
        Path({path!r}).write_text(str(sent))
    s.send(flags=FINAL)
    Path({path!r}).write_text(f"{{sent}} cancelled" if s.is_cancelled() else f"{{sent}} done")
threading.Thread(target=flood).start()
"""


def progress(path):
    return path.read_text() if path.exists() else ""


def standing(path, stream):
    """Return the text that a model has written once it writes no more while it answers others."""
    while True:
        before = progress(path)
        for _ in range(30):
            stream.ask("request.get_response_sender().send(answer('quick'), FINAL)")
            assert stream.take() == ("", "quick", True)
        # While it is written, the file is empty for a moment.
        if before and progress(path) == before:
            return before


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("size", "most"), [(20_000, 400), (1 << 20, 60)])
def test_a_client_that_does_not_read_holds_up_a_model_that_wants_to_wait(
    server, stream, tmp_path, size, most, waits
):
    path = tmp_path / "sent"
    code = FLOOD.format(most=most, size=size, path=str(path), wait=waits)
    body = json.dumps({"CODE": code}).encode()
    host, _, port = server.http_url.partition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(150)
        sock.connect((host, int(port)))
        head = (
            "POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        )
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(path.exists, "the model to send", server)
        if waits:
            # Others do not wait.
            assert int(standing(path, stream)) < most
        else:
            wait_until(lambda: progress(path) == f"{most} done", "the model to end", server)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b"".join(iter(lambda: sock.recv(1 << 20), b""))
    assert received.count(b"data: ") == most
    wait_until(lambda: progress(path) == f"{most} done", "the model's last word", server)


def test_a_client_that_leaves_is_told_to_the_model(server, tmp_path):
    path = tmp_path / "sent"
    body = json.dumps({"CODE": FLOOD.format(most=10**9, size=10, path=str(path), wait=False)})
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    connection.request("POST", "/v2/models/m/generate_stream", body)
    connection.getresponse().read(100)
    connection.close()
    wait_until(lambda: "cancelled" in progress(path), "the model to see it", server)


def test_a_grpc_stream_that_is_cancelled_is_told_to_the_model(server, tmp_path):
    path = tmp_path / "sent"
    with Stream(server) as stream:
        stream.ask(FLOOD.format(most=10**9, size=10, path=str(path), wait=False))
        stream.take()
    wait_until(lambda: "cancelled" in progress(path), "the model to see it", server)
