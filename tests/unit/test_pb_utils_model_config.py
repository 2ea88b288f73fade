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


def without(name):
    return {key: value for key, value in entry().items() if key != name}


ADD = {"input": ModelConfig.add_input, "output": ModelConfig.add_output}


def test_max_batch_size_only_grows():
    made = config(max_batch_size=8)
    made.set_max_batch_size(8)
    made.set_max_batch_size(16)
    assert made.as_dict()["max_batch_size"] == 16
    with pytest.raises(ValueError) as caught:
        made.set_max_batch_size(4)
    assert str(caught.value) == (
        "configuration specified max_batch_size 16, but in auto-complete-config function for model "
        "'m' specified max_batch_size 4"
    )


def test_dynamic_batching():
    made = config()
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {}
    made = config(dynamic_batching={"preferred_batch_size": [4]})
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}


@pytest.mark.parametrize("choice", ["sequence_batching", "ensemble_scheduling"])
def test_dynamic_batching_against_another_scheduler(choice):
    with pytest.raises(ValueError) as caught:
        config(**{choice: {}}).set_dynamic_batching()
    assert str(caught.value) == (
        f"Configuration specified scheduling_choice as '{choice}', but auto-complete-config "
        "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
    )


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


@pytest.mark.parametrize("kind", ADD)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (without("name"), "{kind} in {where} is missing 'name' property."),
        (without("data_type"), "{kind} 'a' in {where} is missing 'data_type' property."),
        (without("dims"), "{kind} 'a' in {where} is missing 'dims' property."),
        (entry(extra=1), "{kind} 'a' in {where} contains property other than {allowed}."),
    ],
)
def test_malformed_entries(kind, given, text):
    allowed = {
        "input": "'name', 'data_type', 'dims' and 'optional'",
        "output": "'name', 'data_type' and 'dims'",
    }[kind]
    where = "auto-complete-config function for model 'm'"
    with pytest.raises(ValueError) as caught:
        ADD[kind](config(), given)
    assert str(caught.value) == text.format(kind=kind, where=where, allowed=allowed)


@pytest.mark.parametrize("kind", ADD)
def test_contradicted_data_type(kind):
    with pytest.raises(ValueError) as caught:
        ADD[kind](config(**{kind: [entry(data_type="TYPE_FP16")]}), entry())
    assert str(caught.value) == (
        f"unable to load model 'm', configuration expects datatype TYPE_FP16 for {kind} 'a', model "
        "provides TYPE_FP32"
    )


@pytest.mark.parametrize("kind", ADD)
def test_contradicted_dims(kind):
    made = config(**{kind: [entry(dims=[2])]})
    with pytest.raises(ValueError) as caught:
        ADD[kind](made, entry())
    assert str(caught.value) == (
        "model 'm', tensor 'a': the model expects dims [1] but the model configuration specifies "
        "dims [2]"
    )
    assert made.as_dict()[kind] == [entry(dims=[2])]


def test_optional():
    made = config(input=[entry()])
    made.add_input(entry(optional=True))
    assert made.as_dict()["input"] == [entry(optional=True)]
    made.add_input(entry())
    assert made.as_dict()["input"] == [entry(optional=True)]
    with pytest.raises(ValueError) as caught:
        made.add_input(entry(optional=False))
    assert str(caught.value) == (
        "model 'm', tensor 'a': the model expects optional False but the model configuration "
        "specifies optional True"
    )


def test_transaction_policy():
    made = config()
    made.set_model_transaction_policy({"decoupled": True})
    made.set_model_transaction_policy({"decoupled": True})
    assert made.as_dict()["model_transaction_policy"] == {"decoupled": True}
    with pytest.raises(ValueError) as caught:
        made.set_model_transaction_policy({"decoupled": False})
    assert str(caught.value) == (
        "trying to change decoupled property in auto-complete-config for model 'm', which is "
        "already set to 'True'."
    )
    with pytest.raises(ValueError) as caught:
        made.set_model_transaction_policy({"decoupled": True, "other": 1})
    assert str(caught.value) == (
        "model transaction property in auto-complete-config function for model 'm' contains "
        "property other than 'decoupled'."
    )
