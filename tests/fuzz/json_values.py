"""JSON as clients send it: values of any kind, and parameters of requests and answers."""

import json

import hypothesis.strategies as st

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 1 << 63, (1 << 64) - 1, 1e400, "", "a", "\ud800", "\0"]),
)
VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "parameters", "data"]), inner, max_size=2),
    ),
    max_leaves=8,
)
SIZES = st.sampled_from([0, 1, 2, 4, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
_KEYS = """
    binary_data_size binary_data binary_data_output classification shared_memory_region
    shared_memory_byte_size shared_memory_offset sequence_id sequence_start timeout priority
    triton_x any
"""
PARAMETERS = st.dictionaries(st.sampled_from(_KEYS.split()), st.one_of(SIZES, VALUES), max_size=3)


def json_bytes(document):
    # With what is no JSON but comes all the same: NaN, lone surrogates, large numbers.
    return json.dumps(document).encode()
