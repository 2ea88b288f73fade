"""ModelConfig: completing is allowed, contradicting is not, and the texts are Triton's."""

import json

import pytest

from gpubridge.pb_utils import ModelConfig


def config(**fields):
    return ModelConfig(
        json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields})
    )


def entry(**fields):
    return {"name": "a", "data_type": "TYPE_FP32", "dims": [1], **fields}


ADD = {"input": ModelConfig.add_input, "output": ModelConfig.add_output}


def test_max_batch_size_only_grows():
    made = config(max_batch_size=8)
    made.set_max_batch_size(8)
    made.set_max_batch_size(16)
    assert made.as_dict()["max_batch_size"] == 16


def test_dynamic_batching():
    made = config()
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {}
    made = config(dynamic_batching={"preferred_batch_size": [4]})
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}


@pytest.mark.parametrize("kind", ADD)
def test_an_entry_is_added(kind):
    made = config()
    given = entry()
    ADD[kind](made, given)
    given["dims"] = None
    assert made.as_dict()[kind] == [entry()]


@pytest.mark.parametrize("kind", ADD)
def test_an_entry_is_completed(kind):
    made = config(**{kind: [entry(data_type="TYPE_INVALID", dims=[]), entry(name="b")]})
    ADD[kind](made, entry())
    assert made.as_dict()[kind] == [entry(), entry(name="b")]


def test_optional():
    made = config(input=[entry()])
    made.add_input(entry(optional=True))
    assert made.as_dict()["input"] == [entry(optional=True)]
    made.add_input(entry())
    assert made.as_dict()["input"] == [entry(optional=True)]


def test_transaction_policy():
    made = config()
    made.set_model_transaction_policy({"decoupled": True})
    made.set_model_transaction_policy({"decoupled": True})
    assert made.as_dict()["model_transaction_policy"] == {"decoupled": True}
