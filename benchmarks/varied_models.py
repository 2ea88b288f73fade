"""The models of the varied rows, written when they are needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpubridge.engine.repository.one_file import OneFileModels

__all__ = ["MODELS", "SHAPE_DIMS", "Model", "copies", "write_repository"]

#: How many dims the tensors of ``add_sub_any`` have.
SHAPE_DIMS = 6

_SERVED = Path(__file__).resolve().parent / "models" / "served"
_ENVIRONMENT = "environment"
_CPU = "instance_group [ { count: %d kind: KIND_CPU } ]"
_OPENING = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's configuration and code; an ensemble has no code.

    With ``own_environment`` it runs in the Python environment that the repository is written for.
    """

    name: str
    config: str
    code: str = ""
    own_environment: bool = False


def _tensors(kind: str, datatype: str, dims: Sequence[int], names: Sequence[str]) -> str:
    rows = [f'{{ name: "{name}" data_type: TYPE_{datatype} dims: {list(dims)} }}' for name in names]
    return f"{kind} [ {', '.join(rows)} ]"


def _config(name: str, *parts: str, instances: int = 1) -> str:
    lines = [f'name: "{name}"', 'backend: "python"', *parts, _CPU % instances]
    return "\n".join(lines) + "\n"


def _execute(body: str) -> str:
    """Return a model's code: ``body`` makes ``outputs`` of a ``request``."""
    indented = "".join(f"            {line}\n" for line in body.strip().splitlines())
    return (
        f"{_OPENING}class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        responses = []\n"
        "        for request in requests:\n"
        f"{indented}"
        "            responses.append(pb_utils.InferenceResponse(outputs))\n"
        "        return responses\n"
    )


_SUM_CODE = _execute(
    """
left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
"""
)


def _add_sub(name: str, dims: Sequence[int] = (16,), instances: int = 1) -> Model:
    inputs = _tensors("input", "FP32", dims, ["INPUT0", "INPUT1"])
    outputs = _tensors("output", "FP32", dims, ["OUTPUT0", "OUTPUT1"])
    return Model(name, _config(name, inputs, outputs, instances=instances), _SUM_CODE)


def _cached_add_sub() -> Model:
    model = _add_sub("add_sub_cached")
    return replace(model, config=f"{model.config}response_cache {{ enable: true }}\n")


def _add_sub_in_environment() -> Model:
    model = _add_sub("add_sub_environment")
    path = f"$$TRITON_MODEL_DIRECTORY/{_ENVIRONMENT}"
    setting = f'key: "EXECUTION_ENV_PATH" value: {{ string_value: "{path}" }}'
    config = f"{model.config}parameters {{ {setting} }}\n"
    return replace(model, config=config, own_environment=True)


def _calls_in_a_row(name: str, count: int) -> Model:
    """Return a model that calls add_sub again and again, each time with the outputs of the last call."""
    config = _add_sub(name).config
    code = _execute(
        f"""
inputs = request.inputs()
for _ in range({count}):
    call = pb_utils.InferenceRequest(
        model_name="add_sub", requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=inputs
    )
    answer = call.exec()
    if answer.has_error():
        raise pb_utils.TritonModelException(answer.error().message())
    outputs = answer.output_tensors()
    inputs = [pb_utils.Tensor("IN" + each.name()[3:], each.as_numpy()) for each in outputs]
"""
    )
    return Model(name, config, code)


def _count_bytes() -> Model:
    inputs = _tensors("input", "STRING", [-1], ["IN"])
    outputs = _tensors("output", "INT32", [1], ["COUNT"])
    code = _execute(
        """
strings = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
count = np.array([sum(len(each) for each in strings)], np.int32)
outputs = [pb_utils.Tensor("COUNT", count)]
"""
    )
    return Model("count_bytes", _config("count_bytes", inputs, outputs), code)


def _many(count: int) -> Model:
    name = f"many_{count}"
    inputs = _tensors("input", "FP32", [16], [f"IN{index}" for index in range(count)])
    outputs = _tensors("output", "FP32", [16], [f"OUT{index}" for index in range(count)])
    code = _execute(
        """
outputs = [
    pb_utils.Tensor("OUT" + tensor.name()[2:], tensor.as_numpy()) for tensor in request.inputs()
]
"""
    )
    return Model(name, _config(name, inputs, outputs), code)


def _summed(count: int) -> Model:
    """Return a model of many inputs that looks at each by ``as_numpy`` and has one output."""
    name = f"summed_{count}"
    inputs = _tensors("input", "FP32", [16], [f"IN{index}" for index in range(count)])
    code = _execute(
        """
total = np.zeros(16, np.float32)
for tensor in request.inputs():
    total += tensor.as_numpy()
outputs = [pb_utils.Tensor("SUM", total)]
"""
    )
    return Model(name, _config(name, inputs, _tensors("output", "FP32", [16], ["SUM"])), code)


def _sequence(strategy: str) -> Model:
    name = f"sequence_{strategy}"
    chosen = "direct { }" if strategy == "direct" else "oldest { max_candidate_sequences: 32 }"
    controls = (
        '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }, '
        '{ name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }'
    )
    batching = (
        "max_batch_size: 32\n"
        # Short: what a client leaves unfinished keeps its slot for so long.
        f"sequence_batching {{ max_sequence_idle_microseconds: 1000000 {chosen} "
        f"control_input [ {controls} ] }}"
    )
    inputs, outputs = (
        _tensors(kind, "FP32", [1], [name_])
        for kind, name_ in (("input", "INPUT"), ("output", "OUTPUT"))
    )
    code = _execute(
        """
value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0]
sequence = int(pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy().ravel()[0])
self.sums = getattr(self, "sums", {})
if len(self.sums) > 10_000:
    self.sums.clear()
self.sums[sequence] = value if start else self.sums.get(sequence, 0) + value
outputs = [pb_utils.Tensor("OUTPUT", self.sums[sequence].astype(np.float32))]
"""
    )
    return Model(name, _config(name, batching, inputs, outputs), code)


def _plus_one(name: str) -> Model:
    inputs = _tensors("input", "FP32", [16], ["IN"])
    outputs = _tensors("output", "FP32", [16], ["OUT"])
    code = _execute(
        """
value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
outputs = [pb_utils.Tensor("OUT", value + np.float32(1))]
"""
    )
    return Model(name, _config(name, inputs, outputs), code)


def _chain() -> Model:
    names = ["IN", "FIRST", "SECOND", "OUT"]
    steps = ", ".join(
        f'{{ model_name: "plus_{index}" model_version: -1 '
        f'input_map {{ key: "IN" value: "{names[index]}" }} '
        f'output_map {{ key: "OUT" value: "{names[index + 1]}" }} }}'
        for index in range(3)
    )
    inputs = _tensors("input", "FP32", [16], ["IN"])
    outputs = _tensors("output", "FP32", [16], ["OUT"])
    return Model(
        "chain",
        f'name: "chain"\nplatform: "ensemble"\n{inputs}\n{outputs}\n'
        f"ensemble_scheduling {{ step [ {steps} ] }}\n",
    )


def _text() -> Model:
    inputs = _tensors("input", "STRING", [1], ["text_input"])
    outputs = _tensors("output", "STRING", [1], ["text_output"])
    code = _execute(
        """
text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
outputs = [pb_utils.Tensor("text_output", np.array([text.ravel()[0][::-1]], np.object_))]
"""
    )
    return Model("text", _config("text", inputs, outputs), code)


def _stream(name: str, responses: int, datatype: str, given: str, answered: str) -> Model:
    inputs = _tensors("input", datatype, [1], [given])
    outputs = _tensors("output", datatype, [1], [answered])
    code = (
        f"{_OPENING}class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        for request in requests:\n"
        "            sender = request.get_response_sender()\n"
        f'            value = pb_utils.get_input_tensor_by_name(request, "{given}").as_numpy()\n'
        f"            for _ in range({responses}):\n"
        f'                output = pb_utils.Tensor("{answered}", value)\n'
        "                sender.send(pb_utils.InferenceResponse([output]))\n"
        "            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
    )
    decoupled = "model_transaction_policy { decoupled: true }"
    return Model(name, _config(name, inputs, outputs, decoupled), code)


def _chat(name: str, pieces: int | None) -> Model:
    """Return a chat model that turns the last message round; so many times as a stream, or once."""
    inputs = _tensors("input", "STRING", [1], ["openai_request"])
    outputs = _tensors("output", "STRING", [1], ["text_output"])
    openai = 'parameters { key: "OPENAI" value: { string_value: "chat" } }'
    body = """
asked = json.loads(pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0])
text = asked["messages"][-1]["content"][::-1].encode()
outputs = [pb_utils.Tensor("text_output", np.array([text], np.object_))]
"""
    if pieces is None:
        return Model(name, _config(name, inputs, outputs, openai), f"import json\n{_execute(body)}")
    decoupled = "model_transaction_policy { decoupled: true }"
    sends = f"""
sender = request.get_response_sender()
for _ in range({pieces}):
    sender.send(pb_utils.InferenceResponse(outputs))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    indented = "".join(f"            {line}\n" for line in (body.strip() + sends).splitlines())
    code = (
        f"import json\n{_OPENING}class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        for request in requests:\n"
        f"{indented}"
    )
    return Model(name, _config(name, inputs, outputs, openai, decoupled), code)


_SOFTMAX = """
def softmax(rows):
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
"""


def _softmax(name: str, *, arrays: bool) -> Model:
    """Return a model of batches, which loops over the requests or takes them as one array."""
    body = """
rows = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
outputs = [pb_utils.Tensor("OUT", softmax(rows))]
"""
    of_batch = (
        f"{_OPENING}class TritonPythonModel:\n"
        "    def execute_batch(self, batch):\n"
        '        return {"OUT": softmax(batch["IN"])}\n'
    )
    tensors = (
        _tensors(kind, "FP32", [256], [named])
        for kind, named in (("input", "IN"), ("output", "OUT"))
    )
    config = _config(name, "max_batch_size: 64", "dynamic_batching { }", *tensors)
    return Model(name, config, (of_batch if arrays else _execute(body)) + _SOFTMAX)


def _one_file(name: str) -> Model:
    """Return the model of a Python file as the server makes it."""
    files = OneFileModels()
    try:
        (made,) = files.directories(str(_SERVED.parent / "softmax_app.py"))
        config, code = ((made / each).read_text() for each in ("config.pbtxt", "1/model.py"))
    finally:
        files.close()
    return Model(name, f'name: "{name}"\n{config}', code)


def _served(name: str) -> Model:
    folder = _SERVED / name
    return Model(
        name, (folder / "config.pbtxt").read_text(), (folder / "1" / "model.py").read_text()
    )


MODELS: dict[str, Callable[[], Model]] = {
    "add_sub": lambda: _served("add_sub"),
    "add_sub_any": lambda: _add_sub("add_sub_any", [-1] * SHAPE_DIMS),
    "add_sub_cached": _cached_add_sub,
    "add_sub_environment": _add_sub_in_environment,
    "add_sub_1000": lambda: _add_sub("add_sub_1000", [1000]),
    "identity_fp32": lambda: _served("identity_fp32"),
    "bls_add_sub": lambda: _served("bls_add_sub"),
    "bls_64_add_sub": lambda: _served("bls_64_add_sub"),
    "bls_10_in_a_row": lambda: _calls_in_a_row("bls_10_in_a_row", 10),
    "chat": lambda: _chat("chat", None),
    "chat_stream": lambda: _chat("chat_stream", 10),
    "count_bytes": _count_bytes,
    "many_48": lambda: _many(48),
    "many_500": lambda: _many(500),
    "summed_500": lambda: _summed(500),
    "sequence_direct": lambda: _sequence("direct"),
    "sequence_oldest": lambda: _sequence("oldest"),
    "softmax_loop": partial(_softmax, "softmax_loop", arrays=False),
    "softmax_file": partial(_one_file, "softmax_file"),
    "softmax_arrays": partial(_softmax, "softmax_arrays", arrays=True),
    "chain": _chain,
    "text": _text,
    "stream_10": lambda: _stream("stream_10", 10, "STRING", "text_input", "text_output"),
    "stream_5000": lambda: _stream("stream_5000", 5000, "FP32", "IN", "OUT"),
    **{f"plus_{index}": partial(_plus_one, f"plus_{index}") for index in range(3)},
    **{f"busy_{index}": partial(_add_sub, f"busy_{index}", instances=4) for index in range(4)},
}
"""Each model that a row may name."""


def copies(count: int) -> list[Model]:
    """Return so many small models that differ by name only."""
    return [_add_sub(f"model_{index}") for index in range(count)]


def write_repository(
    models: Sequence[Model], repository: Path, environment: Path | None = None
) -> Path:
    """Write models to a folder of their own, some for a Python environment; returns the folder."""
    shutil.rmtree(repository, ignore_errors=True)
    for model in models:
        folder = repository / model.name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(model.config)
        if model.code:
            (folder / "1" / "model.py").write_text(model.code)
        if model.own_environment and environment is not None:
            (folder / _ENVIRONMENT).symlink_to(environment)
    return repository
