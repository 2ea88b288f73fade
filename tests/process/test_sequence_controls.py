"""Control inputs of sequences, in every data type that they may have, as the model sees them."""

import json

import pytest

from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

TELLER = answering("""
said = []
for name in ("START", "READY", "END", "CORRID"):
    value = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    said.append(f"{value.dtype} {value.reshape(-1).tolist()[0]} {value.shape}")
return respond(OUT=np.full((1, 1), "; ".join(said).encode(), dtype=object))
""")

IDS = ("UINT64", "INT64", "UINT32", "INT32", "STRING")
FLAGS = {
    "int32": ("int32_false_true: [-3, 9]", ("int32 -3", "int32 9")),
    "fp32": ("fp32_false_true: [0.5, 1.5]", ("float32 0.5", "float32 1.5")),
    "bool": ("bool_false_true: [true, false]", ("bool True", "bool False")),
}


def control(name, kind, what):
    return (
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {what} }} }}\n'
    )


def batching(flags, datatype):
    controls = "".join(control(name, name, flags) for name in ("START", "READY", "END"))
    controls += control("CORRID", "CORRID", f"data_type: TYPE_{datatype}")
    return (
        "max_batch_size: 2\nsequence_batching { max_sequence_idle_microseconds: 60000000\n"
        f"{controls} }}"
    )


@pytest.fixture(scope="module")
def server(repository):
    tensors = "IN FP32 [1] > OUT STRING [1]"
    for datatype in IDS:
        config = batching(FLAGS["fp32"][0], datatype)
        write_model(repository, datatype, TELLER, config=config, tensors=tensors)
    for name, (flags, _) in FLAGS.items():
        write_model(repository, name, TELLER, config=batching(flags, "UINT64"), tensors=tensors)
    with running_server(repository) as running:
        yield running


def ask(server, model, number, start=False, end=False):
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
        "parameters": {"sequence_id": number, "sequence_start": start, "sequence_end": end},
    }
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    answer = json.loads(answer)
    if status != 200:
        return status, answer["error"]
    return answer["outputs"][0]["data"][0].split("; ")


@pytest.mark.parametrize("name", list(FLAGS))
def test_flags(server, name):
    no, yes = (f"{value} (1, 1)" for value in FLAGS[name][1])
    assert ask(server, name, 5, start=True)[:3] == [yes, yes, no]
    assert ask(server, name, 5)[:3] == [no, yes, no]
    assert ask(server, name, 5, end=True)[:3] == [no, yes, yes]


@pytest.mark.parametrize(
    ("datatype", "number", "seen"),
    [
        ("UINT64", 2**64 - 1, f"uint64 {2**64 - 1}"),
        ("INT64", 2**64 - 1, "int64 -1"),
        ("INT64", 2**31, f"int64 {2**31}"),
        ("UINT32", 2**32 + 5, "uint32 5"),
        ("INT32", 2**31, f"int32 {-(2**31)}"),
        ("INT32", 2**32 + 5, "int32 5"),
        ("STRING", 17, "object b'17'"),
        ("STRING", "träger", f"object {'träger'.encode()}"),
        ("STRING", "x" * 128, f"object {b'x' * 128}"),
    ],
)
def test_correlation_ids(server, datatype, number, seen):
    assert ask(server, datatype, number, True, True)[3] == f"{seen} (1, 1)"


def test_ids_that_cannot_be(server):
    status, text = ask(server, "INT32", "abc", True)
    assert status == 400
    assert "must specify an integer correlation ID" in text
    too_long = (501, "string correlation ID cannot be longer than 128 characters")
    assert ask(server, "STRING", "x" * 129, True) == too_long
