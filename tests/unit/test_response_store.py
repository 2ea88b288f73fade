"""Responses that wait for slow readers: who gets which, who is charged, and who has to go."""

import re
from collections import deque
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpubridge.engine.memory.response_store import ResponseStore, StoredResponses
from gpubridge.host_shm import Account
from gpubridge.request import InferRequest, InferResponse
from gpubridge.stub.bls.calls import Credit
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.signatures import Signature
from tests.fuzz.fake_stub import FakeStub, record

LIMIT = 3 << 20
WINDOW = 64
WINDOW_BYTES = 1 << 20
OVERHEAD = 512
SENT = st.sampled_from(
    [[0] * 70, [100] * 3, [200_000] * 8, [450_000] * 4, [700_000], [1_200_000], [1_200_000] * 2]
)
SIGNATURE = Signature((), ())


class Memory(bytearray):
    """A part of a stub's memory, which counts what is in use."""

    def __init__(self, stub, nbytes):
        super().__init__(nbytes)
        self.stub = stub
        stub.in_use += nbytes

    def __del__(self):
        self.stub.in_use -= len(self)


class Workers:
    """Work that is done when the test wants it."""

    def __init__(self):
        self.due = deque()

    def run(self, work, done):
        self.due.append(lambda: done(work()))


class Stub(FakeStub):
    """A stub of a decoupled model, whose responses are those of the test."""

    def __init__(self, store, workers):
        self.coming = deque()
        model = store.of_model(f"m{id(self)}")
        super().__init__(store=partial(StoredResponses, store, model, workers, self.arena_of))
        self.charge = model
        self.in_use = 0

    def decode(self, record, request):
        return self.coming.popleft(), None

    def arena_of(self, name):
        raise AssertionError(name)


class Asked:
    """A request and its reader: what was sent, what the reader got, and how much it has read."""

    def __init__(self, stub, account):
        self.stub = stub
        self.sent, self.got, self.ends = [], [], []
        self.read = 0
        self.done = self.gone = False
        request = self.request = InferRequest(b"", None, 0, (), self.ends.append)
        request.on_partial = self.got.append
        request.account = self.account = account
        request.cancelled = stub.in_flight.cancel
        stub.sent += 1
        stub.feed.submit([request])
        self.ticket = request.ticket
        stub.complete((stub.sent, [record(self.ticket, ResponseFlag.OPEN)]))

    @property
    def held(self):
        """What should be charged."""
        return 0 if self.ends else sum(self.sent[len(self.got) :]) + OVERHEAD * self.waiting

    @property
    def waiting(self):
        return len(self.sent) - len(self.got)

    def respond(self, nbytes):
        self.sent.append(nbytes)
        self.stub.coming.append(
            InferResponse(SIGNATURE, [(nbytes,)], [memoryview(Memory(self.stub, nbytes))])
        )
        self.stub.respond(record(self.ticket, ResponseFlag.OPEN | ResponseFlag.ERROR))

    def end(self):
        self.done = True
        self.stub.respond(record(self.ticket, ResponseFlag.EMPTY))

    def pass_on(self, count):
        self.read += count
        self.request.passed_on(count)

    def cancel(self):
        self.gone = True
        self.request.cancel()


def sizes(outcomes):
    return [len(outcome.buffers[0]) for outcome in outcomes]


class SlowReaders(RuleBasedStateMachine):
    """Random readers of two models over two connections, against what must happen."""

    def __init__(self):
        super().__init__()
        self.store = ResponseStore(LIMIT)
        self.workers = Workers()
        self.stubs = [Stub(self.store, self.workers) for _ in range(2)]
        self.accounts = [Account(int) for _ in range(2)]
        self.asked = [Asked(stub, account) for stub in self.stubs for account in self.accounts]
        # When a reader took something that was stored, or something was stored first.
        self.clock = 0
        self.taken = {}

    def tick(self, asked):
        self.clock += 1
        self.taken[asked] = self.clock

    def open(self):
        return [each for each in self.asked if not (each.ends or each.gone)]

    @rule(stub=st.integers(0, 1), account=st.integers(0, 1))
    def ask(self, stub, account):
        if len(self.open()) < 6:
            self.asked.append(Asked(self.stubs[stub], self.accounts[account]))

    @rule(data=st.data(), sent=SENT)
    def respond(self, data, sent):
        senders = [each for each in self.open() if not each.done]
        sender = data.draw(st.sampled_from(senders)) if senders else None
        for nbytes in sent if sender is not None else ():
            if not sender.ends:
                self.send(sender, nbytes)

    def send(self, sender, nbytes):
        others = {each: each.held for each in self.open()}
        in_hand = sum(sender.sent[sender.read : len(sender.got)])
        is_open = len(sender.got) - sender.read < WINDOW and in_hand < WINDOW_BYTES
        stored = sender.waiting or not is_open
        if stored and not sender.waiting:
            self.tick(sender)
        sender.respond(nbytes)
        # The model may send another one, whatever its reader does.
        received = sender.stub.control.received[sender.ticket]
        assert received == len(sender.sent)
        others[sender] = others[sender] + (nbytes + OVERHEAD if stored else 0)
        self.check_refusals(sender, others)

    def check_refusals(self, sender, held):
        """Check who has to go, where so much was stored before anybody went."""
        refused = [each for each in held if each.ends]
        while True:
            bounds = [
                ([each for each in held if each is sender], LIMIT // 2),
                ([each for each in held if each.account is sender.account], LIMIT // 2),
                ([each for each in held if each.stub is sender.stub], LIMIT * 3 // 4),
                (list(held), LIMIT),
            ]
            exceeded = [
                (holders, most)
                for holders, most in bounds
                if sum(held[each] for each in holders) > most
            ]
            if not exceeded:
                break
            holders = [each for each in exceeded[0][0] if held[each]]
            average = sum(held[each] for each in holders) / len(holders)
            slowest = min((h for h in holders if held[h] >= average), key=self.taken.get)
            assert slowest in refused
            refused.remove(slowest)
            (error,) = slowest.ends
            numbers = [int(number) for number in re.findall(r"\d+", error.message)]
            assert (numbers[0], numbers[-1]) == (held.pop(slowest), exceeded[0][1])
            assert numbers[-2] > numbers[-1]
            # Its model is told, unless it has ended.
            assert slowest.done or slowest.stub.control.cancelled[slowest.ticket]
        assert not refused

    @rule(data=st.data())
    def end(self, data):
        senders = [each for each in self.open() if not each.done]
        if senders:
            data.draw(st.sampled_from(senders)).end()

    @rule(data=st.data(), count=st.integers(1, 70))
    def read(self, data, count):
        readers = [each for each in self.open() if each.read < len(each.got)]
        if readers:
            self.take(data.draw(st.sampled_from(readers)), count)

    def take(self, reader, count):
        waiting = reader.waiting
        reader.pass_on(min(count, len(reader.got) - reader.read))
        if reader.waiting < waiting:
            self.tick(reader)

    @rule(data=st.data())
    def leave(self, data):
        if self.open():
            data.draw(st.sampled_from(self.open())).cancel()

    @rule()
    def work(self):
        while self.workers.due:
            self.workers.due.popleft()()

    @invariant()
    def all_is_charged(self):
        held = {each: each.held for each in self.open()}
        assert self.store.used == sum(held.values())
        for stub in self.stubs:
            assert stub.charge.held == sum(h for each, h in held.items() if each.stub is stub)
        for account in self.accounts:
            assert account.stored == sum(h for each, h in held.items() if each.account is account)

    @invariant()
    def readers_get_few_in_order(self):
        for each in self.asked:
            assert sizes(each.got) == each.sent[: len(each.got)]
            in_hand = each.sent[each.read : len(each.got)]
            assert len(in_hand) <= WINDOW
            assert sum(in_hand[:-1]) < WINDOW_BYTES
            if each in self.open():
                is_open = len(in_hand) < WINDOW and sum(in_hand) < WINDOW_BYTES
                assert not (is_open and (each.waiting or each.done))

    def teardown(self):
        self.work()
        # Nobody's memory is used for what waits.
        in_hand = sum(sum(sizes(each.got)) for each in self.asked)
        assert sum(stub.in_use for stub in self.stubs) <= in_hand
        for each in self.open():
            if not each.done:
                each.end()
            while each.read < len(each.got):
                self.take(each, 1)
            assert each.ends == [None]
            assert sizes(each.got) == each.sent
        assert self.store.used == 0
        for stub in self.stubs:
            stub.close()


SlowReaders.TestCase.settings = settings(stateful_step_count=40)
TestSlowReaders = SlowReaders.TestCase


@pytest.fixture
def stubs():
    store = ResponseStore(LIMIT)
    made = [Stub(store, Workers()) for _ in range(2)]
    yield made
    for stub in made:
        stub.close()


def stored(stub, *sizes):
    """Return a request whose reader has not taken responses of such sizes, nor the one before."""
    asked = Asked(stub, Account(int))
    for nbytes in (WINDOW_BYTES, *sizes):
        asked.respond(nbytes)
    return asked


def test_whoever_has_read_longest_ago_has_to_go(stubs):
    first = stored(stubs[0], 550_000, 550_000)
    second = stored(stubs[0], 550_000, 550_000)
    first.pass_on(1)
    for _ in range(2):
        first.respond(550_000)
    third = stored(stubs[1], 475_000, 475_000)
    assert first.ends == third.ends == []
    (error,) = second.ends
    assert f"of this server, which may have {LIMIT}" in error.message


def test_a_model_has_a_bound_of_its_own(stubs):
    asked = [stored(stubs[0], 800_000) for _ in range(3)]
    assert [bool(each.ends) for each in asked] == [True, False, False]
    assert f"of this model, which may have {LIMIT * 3 // 4}" in asked[0].ends[0].message


@given(st.lists(st.tuples(st.sampled_from([0, 8192, 8193, 1 << 20]), st.booleans()), max_size=100))
def test_the_server_is_told_what_a_model_has_taken_before_its_window_closes(taken):
    credit, sizes, told = Credit(), [], 0
    for nbytes, looks in taken:
        sizes.append(nbytes)
        credit.add(nbytes)
        told += credit.take() if looks else 0
    told += credit.take()
    untold = sizes[told:]
    assert len(untold) < WINDOW
    assert sum(untold) < WINDOW_BYTES
