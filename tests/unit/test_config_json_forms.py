"""Configurations in JSON: the forms that Triton 2.51 takes, and those that it refuses."""

import json
from typing import Any

import pytest

from gpubridge.config.load import parse_config_override
from gpubridge.errors import BridgeError


def first_input(**members: Any) -> Any:
    return parse_config_override(json.dumps({"input": [{"name": "A", **members}]})).input[0]


@pytest.mark.parametrize(
    ("dims", "read"),
    [(2, [2]), ("2", [2]), ([2.0], [2]), ([[2], [3]], [2, 3]), ([None], []), (None, [])],
)
def test_lists(dims: Any, read: list[int]) -> None:
    assert list(first_input(dims=dims).dims) == read


@pytest.mark.parametrize("dims", [2.5, "2.0", "2e0", "", " 2", "8_0", True, {}])
def test_lists_that_are_refused(dims: Any) -> None:
    with pytest.raises(BridgeError, match="Invalid config override: "):
        first_input(dims=dims)


@pytest.mark.parametrize("word", ["true", "True", "t", "yes", "y", "1", True])
def test_true(word: Any) -> None:
    assert first_input(optional=word).optional is True


@pytest.mark.parametrize("word", ["false", "F", "no", "0", None, False])
def test_false(word: Any) -> None:
    assert first_input(optional=word).optional is False


@pytest.mark.parametrize("word", ["x", "", 1, 0, 1.0])
def test_neither_true_nor_false(word: Any) -> None:
    with pytest.raises(BridgeError, match="Invalid config override: "):
        first_input(optional=word)


@pytest.mark.parametrize("name", ["TYPE_INT32", "type_int32", "TYPE-INT32", 8, "8"])
def test_names_of_enumerations(name: Any) -> None:
    assert first_input(data_type=name).data_type == 8


def test_null_is_no_value() -> None:
    assert first_input(data_type=None, format=None, dims=[2]) == first_input(dims=[2])


@pytest.mark.parametrize("name", ["NOPE", "99", "-1", True, ""])
def test_names_of_enumerations_that_are_refused(name: Any) -> None:
    with pytest.raises(BridgeError, match="data_type: expected a name of DataType"):
        first_input(data_type=name)


def test_one_object_for_a_list_and_null_in_a_map() -> None:
    control = {"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}
    values = {
        "input": {"name": "A"},
        "instanceGroup": [None],
        "parameters": {"a": None},
        "metricTags": {"a": None},
        "sequence_batching": {"control_input": {"name": "C", "control": control}},
    }
    read = parse_config_override(json.dumps(values))
    assert [tensor.name for tensor in read.input] == ["A"]
    assert not read.instance_group
    assert read.parameters["a"].string_value == ""
    assert len(read.sequence_batching.control_input[0].control) == 1


@pytest.mark.parametrize(
    "text", ["", "  ", "null", "[]", "3", "{", '{"nonsense":1}', '{"backend":3}']
)
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(BridgeError, match="Invalid config override: "):
        parse_config_override(text)
