"""Location of an output in its request's memory, found by addresses, compiled or not."""

import numpy as np
import pytest

from gpubridge.stub.memory import output_aliasing
from gpubridge.tensor.native import native


def _ways():
    compiled = native()
    return [
        pytest.param(output_aliasing._offset_within, id="python"),
        pytest.param(
            compiled and compiled.offset_within,
            id="native",
            marks=pytest.mark.skipif(compiled is None, reason="there is no compiled module here"),
        ),
    ]


@pytest.mark.parametrize("offset_within", _ways())
def test_a_buffer_is_within_memory_only_if_all_of_it_is(
    offset_within,
):
    whole = np.arange(64, dtype=np.float32)
    memory = memoryview(whole[8:56]).cast("B")
    assert offset_within(memory, whole[8:56]) == 0
    assert offset_within(memory, whole[10:20]) == 8
    assert offset_within(memory, whole[55:56]) == 188
    for outside in (whole[7:10], whole[50:57], whole, whole[:4], whole[60:], np.ones(4)):
        assert offset_within(memory, outside) == -1


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(1, 0, 10, 3), (1, 10, 10, 3)], False),
        ([(1, 10, 10, 3), (1, 0, 11, 3)], True),
        ([(1, 0, 10, 3), (2, 5, 10, 3)], False),
    ],
)
def test_places_overlap_that_share_a_byte(places, expected):
    assert output_aliasing._overlap(places) is expected
