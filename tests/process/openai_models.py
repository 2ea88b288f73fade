"""Models for OpenAI's API that do what a request says."""

import json
from pathlib import Path

from tests.process.model_sources import answering
from tests.process.server import write_model
from tests.waits import polling

SCRIPTED = """
import json, threading, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(output, value):
    return pb_utils.InferenceResponse([pb_utils.Tensor(output, np.array([value], object))])


def failure(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


def steps_of(request):
    body = request.inputs()[0].as_numpy().item()
    document = json.loads(body)
    steps = document["messages"][-1]["content"] if "messages" in document else document["prompt"]
    return [("text", body)] if steps == "repeat" else json.loads(steps)


def made(kind, value):
    if kind == "bytes":
        value, kind = bytes(value), "text"
    if kind == "error":
        return failure(value)
    return response("text_output" if kind == "text" else "openai_response", value)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        for kind, value in steps_of(request):
            if kind == "until_cancelled":
                UNTIL_CANCELLED
                Path(value).touch()
            else:
                sender.send(made(kind, value))
        sender.send(flags=FINAL)
""".replace("UNTIL_CANCELLED", polling("sender.is_cancelled()"))
ONE_ANSWER = (
    SCRIPTED.partition("class ")[0]
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [made(*steps_of(request)[0]) for request in requests]
"""
)
GENERATING = answering(
    """
import fcntl
values = {each.name(): each.as_numpy().tolist() for each in request.inputs()}
values = {name: [v.decode() if type(v) is bytes else v for v in value] for name, value in values.items()}
if values["text_input"] == ["slow"]:
    fcntl.flock(open(os.path.dirname(__file__) + "/gate"), fcntl.LOCK_SH)
text = json.dumps([values, json.loads(request.parameters())])
return respond(text_output=np.array([text], object))
"""
)
EMBEDDING = answering(
    """
texts, outputs = value.ravel(), {}
if request.inputs()[0].name() == "openai_request":
    texts = json.loads(texts[0])["input"]
    usage = {"usage": {"prompt_tokens": 7, "total_tokens": 7}}
    outputs = {"openai_response": np.array([json.dumps(usage)], object)}
return respond(embedding=np.array([[len(text), 0.5, -1] for text in texts], np.float32), **outputs)
"""
)
TEXT = "openai_request STRING [1] > text_output STRING [1]; openai_response STRING [1]"
DECOUPLED = "model_transaction_policy { decoupled: true }"


def declared(endpoints: str) -> str:
    """Return the parameter that declares endpoints."""
    return f'parameters {{ key: "OPENAI" value: {{ string_value: "{endpoints}" }} }}\n'


def write_openai_models(repository: Path) -> None:
    """Write models of each kind; see the tests."""
    write_model(
        repository, "chat", SCRIPTED, config=declared("chat,completions") + DECOUPLED, tensors=TEXT
    )
    write_model(
        repository,
        "coupled",
        ONE_ANSWER,
        config=declared("chat") + "max_batch_size: 4",
        tensors=TEXT,
    )
    optional = (
        "max_tokens INT32 [1] optional: true; exclude_input_in_output BOOL [1] optional: true"
    )
    generating = f"text_input STRING [1]; {optional} > text_output STRING [1]"
    write_model(repository, "generating", GENERATING, tensors=generating)
    queue = (
        "dynamic_batching { default_queue_policy { max_queue_size: 1 timeout_action: REJECT %s } }"
    )
    one = "text_input STRING [1] > text_output STRING [1]"
    write_model(repository, "full", GENERATING, config=queue % "", tensors=one)
    late = "default_timeout_microseconds: 1000"
    write_model(repository, "late", GENERATING, config=queue % late, tensors=one)
    embeddings, rows = declared("embeddings"), "text_input STRING [1] > embedding FP32 [3]"
    config = embeddings + "max_batch_size: 4"
    write_model(repository, "vectors", EMBEDDING, tensors=rows, config=config)
    rows = "openai_request STRING [1] > embedding FP32 [-1, 3]; openai_response STRING [1]"
    write_model(repository, "json_vectors", EMBEDDING, tensors=rows, config=embeddings)
    write_model(repository, "other", GENERATING, tensors="> text_output STRING [1]")


def chat_body(*steps, model: str = "chat", **members) -> dict:
    """Return a chat request whose model takes these steps: pairs of a kind and a value."""
    return {"model": model, "messages": [{"role": "user", "content": json.dumps(steps)}], **members}


def events_of(text: str) -> list[str]:
    """Return the data of server-sent events."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def said(chunks: list[dict]) -> str:
    """Return the text of a streamed chat."""
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
