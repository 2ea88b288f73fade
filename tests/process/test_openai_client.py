"""OpenAI's API through the client of OpenAI, unmodified: sync, async, streaming, errors."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.process.openai_models import chat_body, write_openai_models
from tests.process.server import running_server

pytestmark = pytest.mark.extra
openai = pytest.importorskip("openai", reason="needs openai")

README = Path(__file__).parents[2] / "examples" / "openai_chat" / "README.md"


@pytest.fixture(scope="module")
def server(repository):
    write_openai_models(repository)
    with running_server(repository) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"http://{server.http_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def test_chats(client):
    body = chat_body(("text", "Hel"), ("text", "lo"))
    answer = client.chat.completions.create(**body)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "stop")
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["Hel", "lo", None]
    raw = client.chat.completions.with_raw_response.create(**body)
    assert raw.status_code == 200


def test_usage_and_tool_calls(client):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rest = {
        "message": {"tool_calls": [call]},
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    body = chat_body(("json", json.dumps(rest)))
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.tool_calls[0].function.name == "f"
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("tool_calls", 3)
    *chunks, last = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[0].choices[0].delta.tool_calls[0].id == "c"
    assert (last.choices, last.usage.completion_tokens) == ([], 2)


def test_completions_embeddings_and_models(client):
    answer = client.completions.create(model="generating", prompt="once", max_tokens=3)
    assert json.loads(answer.choices[0].text)[0]["max_tokens"] == [3]
    # The client asks for base64 by itself.
    rows = client.embeddings.create(model="vectors", input=["a", "bcd"]).data
    assert [row.embedding for row in rows] == [[1, 0.5, -1], [3, 0.5, -1]]
    assert "chat" in [model.id for model in client.models.list()]
    assert client.models.retrieve("chat").owned_by == "gpubridge"


def test_errors_are_the_clients_classes(client):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="expected one of") as refused:
        create(model="chat", messages=[{"role": "robot", "content": ""}])
    assert (refused.value.param, refused.value.type) == (
        "messages[0].role",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as refused:
        create(**chat_body(model="none"))
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError, match="no luck"):
        create(**chat_body(("error", "no luck")))
    stream = create(**chat_body(("text", "a"), ("error", "no luck")), stream=True)
    assert next(stream).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError, match="no luck"):
        next(stream)


def test_the_asynchronous_client(server):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"http://{server.http_url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(number):
                text = f"answer {number}"
                stream = await client.chat.completions.create(
                    **chat_body(("text", text), ("text", "!")), stream=True
                )
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return "".join(pieces) == text + "!"

            assert all(await asyncio.gather(*(one(number) for number in range(20))))
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("none")

    asyncio.run(run())


def test_the_lines_of_the_example(capfd):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    with running_server(README.parent / "model_repository") as server:
        exec(code.replace("127.0.0.1:8000", server.http_url), {})
    assert capfd.readouterr().out == "hello you"
