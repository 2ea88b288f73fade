"""Datatypes in all their notations."""

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import datatypes, dtypes
from gpubridge.tensor.packed_numbers import numbers_to_bytes


@pytest.mark.parametrize("name", datatypes.DATATYPES)
def test_every_notation_leads_back_to_the_same_datatype(name):
    dtype = dtypes.DTYPE_OF_DATATYPE.get(name)
    assert (dtype is None) == (name == "BF16")
    if dtype is not None:
        assert dtypes.datatype_from_numpy(dtype) == name
        assert dtypes.numpy_dtype(name) == dtype


def test_numbers_and_config_names_are_tritons():
    numbers = {name: entry.number for name, entry in datatypes.DATATYPES.items()}
    assert " ".join(numbers) == (
        "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"
    )
    assert list(numbers.values()) == list(range(1, 15))
    assert datatypes.config_name("BYTES") == "TYPE_STRING"
    assert datatypes.config_name("FP32") == "TYPE_FP32"


def test_item_sizes():
    for name, dtype in dtypes.DTYPE_OF_DATATYPE.items():
        if name != "BYTES":
            assert datatypes.item_size(name) == dtype.itemsize
    assert datatypes.item_size("BF16") == 2
    assert datatypes.item_size("BYTES") is None


@pytest.mark.parametrize("dtype", ["c8", ">f4", "U3", "M8[s]", "V4", [("a", "i4")]])
def test_dtypes_without_a_counterpart_are_none(dtype):
    assert dtypes.datatype_from_numpy(np.dtype(dtype)) is None


def test_s_dtypes_are_bytes():
    assert dtypes.datatype_from_numpy(np.dtype("S7")) == "BYTES"


def test_platform_aliases_of_integers_are_known():
    assert dtypes.datatype_from_numpy(np.dtype(np.longlong)) == "INT64"
    assert dtypes.datatype_from_numpy(np.dtype(np.intc)) == "INT32"


def test_bfloat16_comes_from_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtypes.numpy_dtype("BF16") == np.dtype(ml_dtypes.bfloat16)
    assert dtypes.datatype_from_numpy(np.dtype(ml_dtypes.bfloat16)) == "BF16"


def test_bfloat16_is_absent_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert dtypes.bfloat16() is None
    assert dtypes.numpy_dtype("BF16") is None


@pytest.mark.parametrize(
    ("shape", "count"), [((), 1), ((3,), 3), ((2, 3), 6), ((4, 0, 9), 0), ([2**40, 2**40], 2**80)]
)
def test_element_count(shape, count):
    assert datatypes.element_count(shape) == count
    assert datatypes.byte_size("FP64", shape) == 8 * count


def test_unknown_names_numbers_and_dimensions_are_invalid_arguments():
    calls = [
        lambda: datatypes.config_name("FP8"),
        lambda: datatypes.element_count((2, -1)),
        lambda: datatypes.byte_size("BYTES", (2,)),
    ]
    for call in calls:
        with pytest.raises(BridgeError, match=r"expected .* got") as caught:
            call()
        assert caught.value.code is ErrorCode.INVALID_ARG


@given(
    st.sampled_from([each for each in dtypes.DTYPE_OF_DATATYPE if each != "BYTES"]).flatmap(
        lambda name: st.tuples(
            st.just(name), arrays(dtypes.DTYPE_OF_DATATYPE[name], st.integers(0, 9))
        )
    )
)
def test_numbers_are_packed_as_numpy_has_them(case):
    name, array = case
    packed = np.frombuffer(numbers_to_bytes("A", name, array.tolist()), array.dtype)
    assert np.array_equal(packed, array, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize("value", [1e6, -1e6, 65520])
def test_numbers_beyond_a_half_are_refused_with_their_place(value):
    with pytest.raises(BridgeError, match=r"^element 1 of input 'A' is .*the range of FP16$"):
        numbers_to_bytes("A", "FP16", [0, value])
    assert numbers_to_bytes("A", "FP16", [65504, float("inf")]) == b"\xff\x7b\x00\x7c"
