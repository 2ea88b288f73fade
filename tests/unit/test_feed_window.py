"""How many requests a stub is fed ahead."""

from __future__ import annotations

import pytest

from gpubridge.config import InstanceGroup
from gpubridge.engine.devices.placing import _least_window
from gpubridge.engine.feed_window import FeedWindow

MILLISECOND = 1_000_000


def window(least, execute_ns):
    found = FeedWindow()
    found.forget(least)
    found.observe(1, execute_ns)
    return found.size


@pytest.mark.parametrize(
    ("least", "execute_ns", "size"),
    [
        (1, 10 * MILLISECOND, 1),
        (1, MILLISECOND // 10, 9),
        (1, 1, 64),
        (3, 10 * MILLISECOND, 3),
        (3, MILLISECOND // 10, 9),
    ],
)
def test_slow_models_are_fed_as_few_as_they_may_be(least, execute_ns, size):
    assert window(least, execute_ns) == size


@pytest.mark.parametrize(
    ("kind", "count", "placement", "least"),
    [
        ("KIND_GPU", 1, "device", 3),
        # One copies while another executes, and whichever is free first takes the next.
        ("KIND_GPU", 2, "device", 1),
        ("KIND_GPU", 1, "source", 1),
        ("KIND_GPU", 1, "host", 1),
        ("KIND_CPU", 1, "device", 1),
    ],
)
def test_who_uploads_alone_on_a_gpu_has_the_next_requests_there(kind, count, placement, least):
    assert _least_window(InstanceGroup("group", count, kind, (0,)), placement) == least
