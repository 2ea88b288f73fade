"""An instance takes requests however many are open; one that has no ticket left has them refused."""

from types import SimpleNamespace

import pytest

from gpubridge.request import MemoryRange
from tests.unit.model_configs import model_config
from tests.unit.virtual_model import VirtualModel

SEGMENT = SimpleNamespace(region=7)
DIRECT = "max_batch_size: 3\nsequence_batching { direct {} }"
KINDS = {
    "default": "",
    "dynamic": "max_batch_size: 3\ndynamic_batching { preferred_batch_size: [3] }",
    "oldest": "max_batch_size: 3\nsequence_batching { oldest { preferred_batch_size: [3] } }",
    "direct": DIRECT,
}
FEW = 8


def full_model(config):
    """Return a model whose only instance's stub borrows under all its tickets, and these."""
    model = VirtualModel(model_config("IN FP32 [-1]", more=config), 1, window=64, tickets=FEW)
    (instance,) = model.instances
    instance.come_up()
    kept = [instance.requests.lend([MemoryRange(SEGMENT, 0, 8, None)]) for _ in range(FEW)]
    assert sorted(kept) == list(range(FEW))
    return model, instance, kept


def submit(model, kind, number):
    of_sequence = kind in ("oldest", "direct")
    return model.submit(number=number if of_sequence else 0, start=of_sequence, end=of_sequence)


def let_go(instance, kept, count):
    """Have the stub let go of memory."""
    for _ in range(count):
        instance.control.lent[kept.pop()] = 0


def land_all(model, instance):
    while instance.batches:
        instance.land()
        model.dispatcher.dispatch()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_refused_at_once_while_no_instance_has_a_ticket(kind):
    model, instance, kept = full_model(KINDS[kind])
    clients = [submit(model, kind, number) for number in (1, 2, 3)]
    assert [client.outcomes[0].message for client in clients] == [f"limit of {FEW}"] * 3
    assert instance.warned_full
    assert not instance.batches
    assert model.dispatcher.pending == 0
    let_go(instance, kept, 3)
    client = submit(model, kind, 4)
    land_all(model, instance)
    assert len(client.executions) == 1
    assert model.dispatcher.pending == 0
    model.close()


def test_sequences_in_slots_beyond_the_free_tickets_are_refused_at_once():
    model, instance, kept = full_model(DIRECT)
    let_go(instance, kept, 2)
    clients = [submit(model, "direct", number) for number in (1, 2, 3)]
    land_all(model, instance)
    assert [len(client.executions) for client in clients] == [1, 1, 0]
    assert clients[2].outcomes[0].message == f"limit of {FEW}"
    assert model.dispatcher.pending == 0
    model.close()


@pytest.mark.parametrize("kind", ["oldest", "direct"])
def test_sequences_at_a_full_stub_are_refused_at_once_though_another_has_tickets(kind):
    model = VirtualModel(model_config("IN FP32 [-1]", more=KINDS[kind]), instances=2, tickets=FEW)
    for instance in model.instances:
        instance.come_up()
    numbers = (1, 2, 3, 4)
    for end in (False, True):
        clients = [model.submit(number=number, start=not end, end=end) for number in numbers]
        for instance in model.instances:
            land_all(model, instance)
        first = model.instances[0]
        while not end and first.requests.lend([MemoryRange(SEGMENT, 0, 8, None)]) is not None:
            pass
    told = [[getattr(each, "message", "") for each in client.outcomes] for client in clients]
    assert sorted(told) == [[""], [""], [f"limit of {FEW}"], [f"limit of {FEW}"]]
    assert first.warned_full
    assert model.dispatcher.pending == 0
    model.close()


def test_other_instances_take_what_a_full_stub_cannot():
    model = VirtualModel(model_config("IN FP32 [-1]"), instances=2, tickets=FEW)
    first, second = model.instances
    first.come_up()
    second.come_up()
    for _ in range(FEW):
        first.requests.lend([MemoryRange(SEGMENT, 0, 8, None)])
    model.submit()
    assert (len(first.batches), len(second.batches)) == (0, 1)
    assert not first.warned_full
    model.close()


def test_a_request_reaches_a_model_however_many_it_has_open():
    more = "max_batch_size: 64\ndynamic_batching {}\nmodel_transaction_policy { decoupled: true }"
    model = VirtualModel(model_config("IN FP32 [-1]", more=more), 1)
    (instance,) = model.instances
    instance.come_up()
    clients = []
    while len(instance.open) <= 5000:
        clients += [model.submit() for _ in range(64)]
        while instance.batches:
            instance.land(going_on=range(64))
    clients.append(model.submit())
    instance.land()
    assert len(clients[-1].outcomes) == 1
    for client in clients[:2000]:
        model.cancel(client)
    for request in list(instance.open):
        instance.close_open(request)
    assert all(client.cancelled or client.outcomes for client in clients)
    assert model.dispatcher.pending == 0
    model.close()


def test_requests_without_inputs_use_up_no_tickets():
    model = VirtualModel(model_config("IN FP32 [-1] optional: true"), 1, window=64, tickets=FEW)
    (instance,) = model.instances
    instance.come_up()
    for _ in range(FEW + 1):
        client = model.submit(places=())
        land_all(model, instance)
        assert len(client.executions) == 1
    assert instance.requests.free_tickets == FEW
    model.close()
