"""Number of requests that a stub is sent ahead."""

import pytest

from gpubridge.config import InstanceGroup
from gpubridge.engine.supervisor.instance_settings import _least_window
from gpubridge.request import InferRequest
from gpubridge.transport.messages import Kind, encode_frame, encode_result_batch
from tests.fuzz.fake_stub import NOW, record

MILLISECOND = 1_000_000


def window(fake_stub, execute_ns):
    """Return the window after a request that was executed for so long."""
    request = InferRequest(b"", None, 0, (), lambda outcome: None)
    fake_stub.feed.submit([request])
    fake_stub.sent += 1
    made = encode_result_batch(fake_stub.sent, (1, 1, 1 + execute_ns), 0, [record(request.ticket)])
    fake_stub.in_flight.take(encode_frame(Kind.RESULTS, [made]), NOW)
    return fake_stub.feed.window


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
def test_slow_models_are_fed_as_few_as_they_may_be(fake_stub, least, execute_ns, size):
    fake_stub.feed.open(least)
    assert window(fake_stub, execute_ns) == size


def test_a_model_is_fed_more_while_it_gets_faster(fake_stub):
    fake_stub.feed.open(1)
    windows = [
        window(fake_stub, execute_ns) for execute_ns in (MILLISECOND, *[MILLISECOND // 20] * 40)
    ]
    assert windows == sorted(windows)
    assert windows[0] == 1
    assert windows[-1] > 10


def test_another_stub_begins_anew(fake_stub):
    fake_stub.feed.open(1)
    assert window(fake_stub, MILLISECOND // 10) == 9
    fake_stub.feed.close()
    assert fake_stub.feed.window == 0
    fake_stub.feed.connect(fake_stub.in_flight)
    fake_stub.feed.open(1)
    assert fake_stub.feed.window == 1


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
def test_a_stub_that_uploads_alone_on_a_gpu_is_fed_ahead(kind, count, placement, least):
    assert _least_window(InstanceGroup("group", count, kind, (0,)), placement) == least
