"""Requests wait in the queue while a stub has no ticket left for them."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.request import MemoryRange
from gpubridge.transport.control import TICKETS
from tests.unit.model_configs import model_config
from tests.unit.virtual_model import VirtualModel

SEGMENT = SimpleNamespace(region=7)
KINDS = {
    "default": "",
    "dynamic": "max_batch_size: 3\ndynamic_batching { preferred_batch_size: [3] }",
    "oldest": "max_batch_size: 3\nsequence_batching { oldest { preferred_batch_size: [3] } }",
    "direct": "max_batch_size: 3\nsequence_batching { direct {} }",
}


def full_model(config):
    """Return a model whose only instance's stub borrows under all its tickets, and these."""
    model = VirtualModel(model_config("IN FP32 [-1]", more=config), instances=1, window=64)
    (instance,) = model.instances
    instance.come_up()
    kept = [instance.requests.lend([MemoryRange(SEGMENT, 0, 8, None)]) for _ in range(TICKETS)]
    assert sorted(kept) == list(range(TICKETS))
    return model, instance, kept


async def let_go(instance, kept, count):
    """Have the stub let go of memory, and the server look again."""
    for _ in range(count):
        instance.control.lent[kept.pop()] = 0
    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    # A batch of sequences in their slots waits until it can be sent whole.
    ("kind", "sent_first"),
    [("default", 1), ("dynamic", 2), ("oldest", 2), ("direct", 0)],
)
async def test_requests_wait_until_the_stub_lets_go_of_memory(kind, sent_first):
    model, instance, kept = full_model(KINDS[kind])
    sequences = kind in ("oldest", "direct")
    clients = [
        model.submit(number=number if sequences else 0, start=sequences, end=sequences)
        for number in (1, 2, 3)
    ]
    assert not instance.batches
    assert instance.warned_full
    await let_go(instance, kept, 2)
    assert sum(len(batch.requests) for batch in instance.batches) == sent_first
    await let_go(instance, kept, 1)
    while instance.batches:
        instance.land()
        model.dispatcher.dispatch()
    assert all(len(client.executions) == 1 for client in clients)
    assert all(client.slot_freed for client in clients)
    assert model.dispatcher.pending == 0
    model.close()


async def test_the_limits_of_the_queue_hold_while_the_stub_is_full():
    policy = "default_queue_policy { default_timeout_microseconds: 1000 max_queue_size: 2 }"
    model, instance, kept = full_model(f"max_batch_size: 3\ndynamic_batching {{ {policy} }}")
    late = [model.submit(), model.submit()]
    too_many = model.submit()
    model.advance(2_000_000)
    assert [client.outcomes[0].message for client in late] == ["Request timeout expired"] * 2
    assert too_many.outcomes[0].message.endswith("Exceeds maximum queue size")
    gone = model.submit()
    model.cancel(gone)
    await let_go(instance, kept, 8)
    assert not instance.batches
    assert model.dispatcher.pending == 0
    model.close()


async def test_other_instances_take_what_a_full_stub_cannot():
    model = VirtualModel(model_config("IN FP32 [-1]"), instances=2)
    first, second = model.instances
    first.come_up()
    second.come_up()
    for _ in range(TICKETS):
        first.requests.lend([MemoryRange(SEGMENT, 0, 8, None)])
    model.submit()
    assert (len(first.batches), len(second.batches)) == (0, 1)
    assert not first.warned_full
    model.close()
