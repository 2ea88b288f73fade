"""Implicit state: what a request of a sequence leaves to the next, and to no other."""

import json

import numpy as np
import pytest

from tests.process.controlled import refusal
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_model

# What it does with its state is up to the value: 50 keeps silent about it, 60 leaves one of a wrong
# shape, 70 raises after it has changed its copy in place, -1 kills the process.
SUM = answering(
    """
given = state = pb_utils.get_input_tensor_by_name(request, "S_IN").as_numpy()
if value.item() == -1:
    os.kill(os.getpid(), 9)
if value.item() == 70:
    state += 1000
    raise ValueError("seventy")
if state.dtype == object:
    state = state + str(int(value.item())).encode()
    out = np.array(len(state.reshape(-1)[0]), np.float32).reshape(value.shape)
else:
    state = (state + value.reshape(-1)[0]).astype(state.dtype)
    out = np.array(state.sum(), np.float32).reshape(value.shape)
left = {} if value.item() == 50 else {"S_OUT": state}
if value.item() == 60:
    left = {"S_OUT": np.zeros((1, 7), state.dtype)}
response = respond(OUT=out, **left)
given[...] = b"?" if given.dtype == object else 999
return response
"""
)

# Counts in place, and answers with what it got.
IN_PLACE = answering("""
state = pb_utils.get_input_tensor_by_name(request, "S_IN").as_numpy()
state += value
left = {} if value.item() == 50 else {"S_OUT": state}
return respond(OUT=state.copy(), **left)
""")

ONE = "IN FP32 [1] > OUT FP32 [1]"
STATE = 'state [{{ input_name: "S_IN" output_name: "S_OUT" data_type: TYPE_{} dims: [{}] {} }}]'


def batching(state, size=2, strategy="direct { }"):
    return (
        f"max_batch_size: {size}\nsequence_batching {{ max_sequence_idle_microseconds: 60000000\n"
        f"{strategy}\n{state} }}"
    )


def initial(datatype, dims, data):
    return f'initial_state {{ name: "i" data_type: TYPE_{datatype} dims: [{dims}] {data} }}'


@pytest.fixture(scope="module")
def server(repository):
    fp32 = STATE.format("FP32", 1, "")
    write_model(repository, "direct", SUM, config=batching(fp32), tensors=ONE)
    oldest = "oldest { max_candidate_sequences: 4 }"
    write_model(repository, "oldest", SUM, config=batching(fp32, 4, oldest), tensors=ONE)
    write_model(repository, "plain", SUM, config=batching(fp32, 0), tensors=ONE)
    write_model(
        repository, "text", SUM, config=batching(STATE.format("STRING", 1, "")), tensors=ONE
    )
    zeros = initial("INT64", 3, "zero_data: true")
    write_model(
        repository, "wide", SUM, config=batching(STATE.format("INT64", -1, zeros)), tensors=ONE
    )
    given = initial("FP64", 2, 'data_file: "start"')
    directory = write_model(
        repository, "given", SUM, config=batching(STATE.format("FP64", 2, given)), tensors=ONE
    )
    (directory / "initial_state").mkdir()
    (directory / "initial_state" / "start").write_bytes(np.array([100.0, 200.0]).tobytes())
    write_model(repository, "shown", SUM, config=batching(fp32), tensors=f"{ONE}; S_OUT FP32 [1]")
    shared = STATE.format("FP32", 1, "use_same_buffer_for_input_output: true")
    write_model(repository, "in_place", IN_PLACE, config=batching(shared, 1), tensors=ONE)
    with running_server(repository) as running:
        yield running


def ask(server, model, value, number, flags="", shape=(1, 1), outputs=None):
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": shape, "data": [value]}],
        "parameters": {
            "sequence_id": number,
            "sequence_start": "s" in flags,
            "sequence_end": "e" in flags,
        },
    }
    if outputs is not None:
        body["outputs"] = [{"name": name} for name in outputs]
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    answer = json.loads(answer)
    if status != 200:
        return answer["error"]
    values = {output["name"]: output["data"][0] for output in answer["outputs"]}
    return values["OUT"] if list(values) == ["OUT"] else values


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_each_sequence_has_a_state_of_its_own(server, model):
    asked = [
        (1, 5, "s"), (10, 6, "s"), (2, 5, ""), (20, 6, ""), (3, 5, "e"), (4, 5, "s"),
        (30, 6, "e"), (40, 6, "s"), (5, 5, "s"), (1, 5, "e"), (1, 6, "e"),
    ]  # fmt: skip
    answers = [ask(server, model, value, number, flags) for value, number, flags in asked]
    assert answers == [1, 10, 3, 30, 6, 4, 60, 40, 5, 6, 41]


def test_states_of_models_without_batch_dimension(server):
    answers = [ask(server, "plain", v, 5, f, shape=(1,)) for v, f in [(1, "s"), (2, ""), (3, "e")]]
    assert answers == [1, 3, 6]


def test_states_of_strings(server):
    assert [ask(server, "text", 12, 5, f) for f in ("s", "", "e", "s", "e")] == [2, 4, 6, 2, 4]


def test_initial_states(server):
    assert [ask(server, "wide", 2, 5, f) for f in ("s", "", "e", "se")] == [6, 12, 18, 6]
    assert [ask(server, "given", 1, 5, f) for f in ("s", "", "e", "se")] == [302, 304, 306, 302]


def test_a_response_without_a_state_leaves_it_as_it_was(server):
    answers = [ask(server, "direct", v, 5, f) for v, f in [(1, "s"), (50, ""), (2, ""), (1, "e")]]
    assert answers == [1, 51, 3, 4]


def test_a_failed_request_leaves_no_state(server):
    assert ask(server, "direct", 1, 5, "s") == 1
    assert ask(server, "direct", 60, 5) == (
        "state 'S_OUT': expected FP32 of shape [1, 1], got FP32 of shape [1, 7]; return it as the "
        "configuration has it"
    )
    assert "ValueError: seventy" in ask(server, "direct", 70, 5)
    assert ask(server, "direct", 2, 5, "e") == 3


def test_clients_see_states_only_where_they_are_outputs(server):
    assert ask(server, "shown", 1, 5, "s") == {"OUT": 1, "S_OUT": 1}
    assert ask(server, "shown", 2, 5, "", outputs=["OUT"]) == 3
    assert ask(server, "shown", 3, 5, "e", outputs=["S_OUT"]) == {"S_OUT": 6}
    refusal = ask(server, "direct", 1, 7, "se", outputs=["S_OUT"])
    assert (
        refusal == "unexpected inference output 'S_OUT' for model 'direct': its outputs are 'OUT'"
    )


def test_one_buffer_for_input_and_output_is_changed_in_place(server):
    steps = [(1, "s"), (2, ""), (50, ""), (3, "e"), (4, "se")]
    assert [ask(server, "in_place", v, 5, f) for v, f in steps] == [1, 3, 53, 56, 4]


def test_the_states_of_a_dead_stub_are_gone(server):
    assert ask(server, "direct", 5, 5, "s") == 5
    assert ask(server, "direct", 6, 6, "s") == 6
    assert "is not healthy" in ask(server, "direct", -1, 5)
    wait_until(lambda: server.is_ready("direct"), "the model to be ready again", server)
    assert "must specify the START flag" in ask(server, "direct", 1, 6)
    assert ask(server, "direct", 1, 6, "s") == 1
    assert ask(server, "direct", 1, 6, "e") == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "cannot read '"),
        (b"1234567", "expected 8 bytes (FP32 of shape [1, 2]), got 7 in '"),
    ],
)
def test_an_initial_state_that_is_not_there_fails_the_load(server, given, text):
    state = STATE.format("FP32", 2, initial("FP32", 2, 'data_file: "start"'))
    config = batching(state)
    directory = write_model(server.repositories[0], "refused", SUM, config=config, tensors=ONE)
    if given is not None:
        (directory / "initial_state").mkdir()
        (directory / "initial_state" / "start").write_bytes(given)
    assert "initial state of 'S_IN': " + text in refusal(server, "refused")
