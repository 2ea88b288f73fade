"""Store of responses whose readers are slow: bounded in bytes, charged to whom they wait for.

The server hands a reader (a client, a calling model, an ensemble) a few responses of a request; see
``csrc/ipc/response_window.h``. Later ones wait here, so that no model waits for the reader. Where there is
no room, a request whose reader is slow ends with an error, and no other request notices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from gpubridge.engine.memory.placed_response import (
    PlacedResponse,
    is_in_host_memory,
    placed_response,
    private_response,
)
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, unavailable
from gpubridge.host_shm import Account
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.request import InferRequest, InferResponse, LongParameters, Outcome

_OVERHEAD = 512
"""Bytes of the objects of a stored response."""


class ModelCharge:
    """Bytes that are stored of the responses of one model: ``held``."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class Charge(ABC):
    """Bytes that one request has stored: ``held``.

    - ``model``: the called model's.
    - ``account``: of the reader's connection; None for a reader without one.
    """

    __slots__ = ("_store", "account", "held", "model")

    def __init__(self, store: ResponseStore, model: ModelCharge, account: Account | None) -> None:
        self._store = store
        self.model = model
        self.account = account
        self.held = 0

    def charge(self, nbytes: int) -> None:
        """Charge more bytes; at a bound this or other requests are refused."""
        self._count(nbytes)
        self._store.make_room(self)

    def discharge(self, nbytes: int) -> None:
        """Uncharge bytes that the reader gets: it has read later than all others."""
        self._count(-nbytes)

    def close(self) -> None:
        """Uncharge all; idempotent."""
        self._count(-self.held)

    @abstractmethod
    def refuse(self, error: BridgeError) -> None:
        """End the request with an error, and close this."""

    def _count(self, nbytes: int) -> None:
        self.held += nbytes
        self.model.held += nbytes
        if self.account is not None:
            self.account.stored += nbytes
        self._store.counted(self, nbytes)


class _Bound(NamedTuple):
    """A bound that is exceeded: of what, by how many bytes that who holds, and how many it may hold."""

    what: str
    held: int
    most: int
    counts: Callable[[Charge], bool]


class ResponseStore:
    """Bounds of the responses that wait for slow readers, of all models.

    - ``limit``: bytes of all of them together. A request may have half of it, a connection half, and a
      model three quarters.

    Attribute ``used``: bytes that are stored.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._half, self._most_of_model = limit // 2, limit * 3 // 4
        self._models: dict[str, ModelCharge] = {}
        # Those who hold bytes: first the one whose reader has taken nothing for the longest time.
        self._charges: dict[Charge, None] = {}

    def of_model(self, name: str) -> ModelCharge:
        """Return the charge of a model, of all its versions and instances."""
        return self._models.setdefault(name, ModelCharge())

    def counted(self, charge: Charge, nbytes: int) -> None:
        """Count bytes that a charge has gained, or lost since its reader has taken them."""
        self.used += nbytes
        if nbytes < 0:
            self._charges.pop(charge, None)
        if charge.held:
            self._charges.setdefault(charge)

    def make_room(self, charge: Charge) -> None:
        """Refuse requests until all bounds hold that a charge counts towards."""
        while (bound := self._exceeded(charge)) is not None:
            slowest = self._slowest(bound)
            slowest.refuse(self._full(bound, slowest.held))

    def _exceeded(self, charge: Charge) -> _Bound | None:
        account, model = charge.account, charge.model
        if charge.held > self._half:
            return _Bound("request", charge.held, self._half, lambda each: each is charge)
        if account is not None and account.stored > self._half:
            return _Bound(
                "connection", account.stored, self._half, lambda each: each.account is account
            )
        if model.held > self._most_of_model:
            return _Bound(
                "model", model.held, self._most_of_model, lambda each: each.model is model
            )
        if self.used > self.limit:
            return _Bound("server", self.used, self.limit, lambda _: True)
        return None

    def _slowest(self, bound: _Bound) -> Charge:
        """Return who has read longest ago, of those with at least the average."""
        holders = [each for each in self._charges if bound.counts(each)]
        return next(each for each in holders if each.held * len(holders) >= bound.held)

    def _full(self, bound: _Bound, held: int) -> BridgeError:
        beside = "" if bound.what == "request" else f", and {bound.held} of this {bound.what}"
        return unavailable(
            f"too many responses wait for their reader: {held} bytes of this request{beside}, which "
            f"may have {bound.most} "
            "(--response-store-limit); read faster, ask for less at once, or raise the limit"
        )


class _Entry:
    """A stored response.

    - ``nbytes``: of its outputs; ``charged``: of all of it.
    - ``private``: whether it is a copy, in no memory that a stub maps.
    """

    __slots__ = ("charged", "nbytes", "outcome", "private")

    def __init__(self, outcome: Outcome, nbytes: int) -> None:
        self.outcome = outcome
        self.nbytes = nbytes
        self.charged = nbytes + _OVERHEAD + _text_bytes(outcome)
        self.private = False

    def replace(self, copy: InferResponse | BridgeError) -> None:
        """Keep a copy instead, if it could be made."""
        if isinstance(copy, InferResponse):
            self.outcome, self.private = copy, True


class StoredResponses(Charge):
    """The responses of one request that wait for its reader, in order; used on the event loop.

    They are copied to private memory, so that the model has its own back; a worker copies large ones, and
    those on a device stay there.

    - ``arena_of``: returns the memory of requests to a model, by its name.
    """

    __slots__ = ("_arena_of", "_ended", "_entries", "_last", "_request", "_workers")

    def __init__(
        self,
        store: ResponseStore,
        model: ModelCharge,
        workers: Workers,
        arena_of: Callable[[str], RequestArena],
        request: InferRequest,
    ) -> None:
        super().__init__(store, model, request.account)
        self._workers = workers
        self._arena_of = arena_of
        self._request = request
        self._entries: deque[_Entry] = deque()
        self._ended = False
        self._last: Outcome | None = None

    def add(self, outcome: Outcome, nbytes: int) -> None:
        """Store a response; where there is no room, this or another request ends with an error."""
        entry = _Entry(outcome, nbytes)
        self._entries.append(entry)
        self.charge(entry.charged)
        if not (
            isinstance(outcome, InferResponse) and self._entries and is_in_host_memory(outcome)
        ):
            return
        if nbytes > HEAVY_BYTES:
            self._workers.run(partial(private_response, outcome), entry.replace)
            return
        # Where there is no memory for a copy, it stays where it is.
        with suppress(MemoryError, OSError):
            entry.replace(private_response(outcome))

    def end(self, outcome: Outcome | None) -> None:
        """Note how the request has ended, which its reader learns after what is stored."""
        self._ended, self._last = True, outcome

    def take(self) -> tuple[Outcome | None, int, bool] | None:
        """Return the next response, its bytes, and whether it is the last; None if there is none now."""
        if not self._entries:
            return (self._last, 0, True) if self._ended else None
        entry = self._entries.popleft()
        self.discharge(entry.charged)
        outcome, reader = entry.outcome, self._request.context.outputs_for
        if reader and entry.private:
            assert isinstance(outcome, PlacedResponse)
            try:
                outcome = placed_response(outcome, self._arena_of(reader))
            except BridgeError as error:
                self.refuse(error)
                return None
        return outcome, entry.nbytes, False

    def close(self) -> None:
        """Drop everything: the reader is gone."""
        self._entries.clear()
        super().close()

    def refuse(self, error: BridgeError) -> None:
        """End the request with an error in place of what is stored; its model is told to stop."""
        self.close()
        request = self._request
        request.stored = None
        request.finish(error)
        request.cancel()


def _text_bytes(outcome: Outcome) -> int:
    """Return the bytes of an outcome beside its outputs."""
    if isinstance(outcome, BridgeError):
        return len(outcome.message)
    if not isinstance(outcome.parameters, LongParameters):
        return 0
    encoded = [part for part in outcome.parameters.parts if not isinstance(part, dict)]
    return sum(len(part.members) + len(part.fields) for part in encoded)
