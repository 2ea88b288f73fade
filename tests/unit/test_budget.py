"""The budget of requests: shares, what is kept for small ones, and which requests are refused."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.timeouts import MinimumRate
from gpubridge.host_shm import LARGE_BYTES, Account, Body, Budget, PrivateBytes
from gpubridge.host_shm.budget import piece_bytes

LIMIT = 1000 << 10
SHARE = LIMIT // 8
LARGE_LIMIT = LIMIT - LIMIT // 10


class Client:
    """A connection with bodies that arrive, and requests that they have become."""

    def __init__(self, budget):
        self.budget = budget
        self.unread = 0
        self.account = Account(lambda: self.unread)
        self.bodies = []
        self.refused = []

    def open(self):
        body = Body(self.budget, self.account, lambda error: self.lose(body, error))
        self.bodies.append(body)
        return body

    def lose(self, body, error):
        self.refused.append(error)
        self.drop(body)

    def drop(self, body):
        self.bodies.remove(body)
        self.budget.give_back(body.held)
        body.release()

    def take(self, body, nbytes):
        """So many more bytes of a body come; returns whether there was room."""
        held = body.held
        body.charge(held + nbytes)
        try:
            self.budget.take(nbytes, large=True, body=body)
        except BridgeError:
            body.charge(held)
            return False
        return True


def test_one_client_may_have_almost_all_while_nobody_else_wants_it():
    budget = Budget(LIMIT)
    client = Client(budget)
    body = client.open()
    assert client.take(body, LARGE_LIMIT)
    assert not client.take(client.open(), 1)
    body.complete()
    # The rest is for small requests.
    budget.take(LIMIT // 10, large=False)
    with pytest.raises(BridgeError, match="arena is full") as caught:
        budget.take(1, large=False)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_requests_above_their_share_are_refused_newest_first():
    budget = Budget(LIMIT)
    greedy, other = Client(budget), Client(budget)
    first, second = greedy.open(), greedy.open()
    assert greedy.take(first, 400 << 10)
    assert greedy.take(second, 400 << 10)
    body = other.open()
    assert other.take(body, SHARE)
    # The newest of all is the other's, which holds no more than its share.
    assert (greedy.bodies, len(greedy.refused)) == ([first], 1)
    assert "send fewer or smaller requests" in greedy.refused[0].message
    # With that it had enough: its first body goes on.
    assert greedy.take(first, 100 << 10)


def test_a_body_that_has_arrived_is_not_refused():
    budget = Budget(LIMIT)
    greedy, other = Client(budget), Client(budget)
    whole = greedy.open()
    assert greedy.take(whole, LARGE_LIMIT)
    whole.complete()
    assert not other.take(other.open(), 1)
    assert greedy.refused == []
    # It counts until its memory goes back.
    assert greedy.account.total == LARGE_LIMIT
    greedy.drop(whole)
    assert other.take(other.open(), SHARE)


def test_unread_answers_count():
    budget = Budget(LIMIT)
    lazy, honest = Client(budget), Client(budget)
    ours, theirs = honest.open(), lazy.open()
    assert honest.take(ours, LARGE_LIMIT - 2 * SHARE)
    assert lazy.take(theirs, SHARE)
    # It holds as much as it may, and has not read what it was answered.
    lazy.unread = SHARE
    assert honest.take(ours, 2 * SHARE)
    assert lazy.refused
    assert honest.refused == []


def test_a_message_that_can_never_fit_is_refused_with_both_numbers():
    budget = Budget(LIMIT)
    with pytest.raises(BridgeError, match=f"{LIMIT} bytes is too large: .*{LARGE_LIMIT} of the"):
        budget.check(LIMIT)
    budget.check(LARGE_LIMIT)
    Budget(LARGE_BYTES).check(LARGE_BYTES - 1)


def test_a_client_that_promises_much_and_sends_little_holds_little():
    left, pieces = 60 << 20, []
    while left:
        pieces.append(piece_bytes((60 << 20) - left, left))
        left -= pieces[-1]
    assert pieces[:3] == [1 << 19, 3 << 19, 12 << 19]
    assert len(pieces) == 5
    assert piece_bytes(0, 100) == 100


def test_the_rate_to_keep_grows_with_what_is_held():
    # 60 seconds at 600 bytes a second: enough for who holds little, not for who holds 100 MB.
    for held, slow in ((1 << 18, False), (100 << 20, True)):
        rate, message = MinimumRate(30.0), object()
        looks = [rate.too_slow(now, message, held + 600 * now, held) for now in range(0, 61, 5)]
        assert any(looks) is slow


@pytest.mark.parametrize("newer_first", [False, True])
def test_a_request_that_is_charged_in_parts_is_refused_with_all_of_them(newer_first):
    budget = Budget(LIMIT)
    account = Account(lambda: 0)
    refused = []

    def refuse(error):
        refused.append(error)
        for part in parts:
            part.close()

    first = Body(budget, account, refuse)
    parts = [PrivateBytes(first), PrivateBytes(first.beside())]
    for part in parts[::-1] if newer_first else parts:
        part.count(400 << 10)
    # The second part is the newest of all: its memory goes to nobody.
    with pytest.raises(BridgeError, match="arena is full"):
        parts[0].count(600 << 10)
    assert len(refused) == 1
    assert budget.used == account.held == 0
    assert not budget.arriving


def test_bytes_that_are_counted_again_while_room_is_made_count_once():
    budget = Budget(LIMIT)
    account = Account(lambda: 0)
    kept = PrivateBytes(Body(budget, account, lambda error: None))

    def refuse(error):
        victim.close()
        kept.count(300 << 10)

    victim = PrivateBytes(Body(budget, account, refuse))
    kept.count(200 << 10)
    victim.count(600 << 10)
    kept.count(500 << 10)
    assert budget.used == account.held == 500 << 10
    kept.close()
    assert budget.used == account.held == 0


class BudgetMachine(RuleBasedStateMachine):
    """Clients of all kinds, in an order of their own."""

    def __init__(self):
        super().__init__()
        self.budget = Budget(LIMIT)
        self.clients = [Client(self.budget) for _ in range(4)]
        self.small = 0

    @rule(who=st.integers(0, 3))
    def open(self, who):
        self.clients[who].open()

    @rule(who=st.integers(0, 3), which=st.integers(0, 9), nbytes=st.integers(1, 300 << 10))
    def more(self, who, which, nbytes):
        client = self.clients[who]
        arriving = [body for body in client.bodies if body in self.budget.arriving]
        if not arriving:
            return
        body = arriving[which % len(arriving)]
        before = {other: len(other.refused) for other in self.clients}
        held = {other: other.account.total for other in self.clients}
        room = client.take(body, nbytes)
        for other in self.clients:
            if len(other.refused) > before[other] and other is not client:
                assert held[other] > SHARE
        if not room:
            # Not even without all that is held above a share, except what is newer and its own.
            assert self.budget.used + nbytes > LARGE_LIMIT

    @rule(who=st.integers(0, 3), which=st.integers(0, 9), whole=st.booleans())
    def end(self, who, which, whole):
        client = self.clients[who]
        if client.bodies:
            body = client.bodies[which % len(client.bodies)]
            if whole:
                body.complete()
            else:
                client.drop(body)

    @rule(who=st.integers(0, 3), nbytes=st.integers(0, 2 * SHARE))
    def leave_unread(self, who, nbytes):
        self.clients[who].unread = nbytes

    @precondition(lambda self: self.small < LIMIT // 10)
    @rule()
    def a_small_request_finds_room(self):
        nbytes = min(4096, LIMIT // 10 - self.small)
        self.budget.take(nbytes, large=False)
        self.small += nbytes

    @invariant()
    def the_books_are_right(self):
        for client in self.clients:
            assert client.account.held == sum(body.held for body in client.bodies)
        held = sum(client.account.held for client in self.clients)
        assert self.budget.used == held + self.small <= LIMIT


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(stateful_step_count=40)
