"""Requests through proxies to servers, event by event.

A cell is a fleet of its own: its proxies know its servers. A proxy is a queue with some threads; it
sends a request to the server with the fewest open requests *of this proxy*, as it knows no others.
A server is a queue with some instances. Times are in seconds.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_UNKNOWN = 1 << 40
"""Added to the open requests of a server that gets none."""


@dataclass(frozen=True)
class Plan:
    """A fleet, its service times and its load.

    - ``proxy_seconds``: of a proxy's thread for a request; ``service_seconds``: of an instance, with a
      coefficient of variation of ``variation``.
    - ``rate``: requests a second of all cells together; or ``clients``, each of which waits for its
      answer before it asks again.
    - ``detect_seconds``: until all proxies know of a lost server; a request that meets it is sent again
      after ``retry_seconds``.
    """

    servers: int
    cells: int = 1
    proxies: int = 1
    threads: int = 2
    instances: int = 1
    proxy_seconds: float = 40e-6
    service_seconds: float = 5e-3
    variation: float = 0.2
    rate: float = 0.0
    clients: int = 0
    seconds: float = 2.0
    detect_seconds: float = 1.0
    retry_seconds: float = 1.0
    seed: int = 1


@dataclass
class Server:
    """A server's queue; ``up``: it answers."""

    instances: int
    waiting: deque[Request] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    up: bool = True


@dataclass
class Request:
    """A request of a cell, at one of its proxies; ``tries``: the servers that it has met."""

    number: int
    began: float
    cell: int
    proxy: int
    server: int = -1
    tries: int = 0


@dataclass
class Outcome:
    """When requests were answered, how long each took, and how many met a lost server."""

    answered: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    retried: int = 0
    unanswered: int = 0

    def percentile(self, share: float) -> float:
        """Return a percentile of the times, in seconds."""
        ordered = sorted(self.took)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0

    def rate(self, since: float, until: float) -> float:
        """Return the answers a second within a time."""
        return sum(since <= at < until for at in self.answered) / (until - since)


class Simulation:
    """One run of a plan; events are added before `run`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self._random = random.Random(plan.seed)  # noqa: S311  (a simulation)
        self._now = 0.0
        self._count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        per_cell = plan.servers // plan.cells
        self.cells = [[Server(plan.instances) for _ in range(per_cell)] for _ in range(plan.cells)]
        self._proxy_free = [[[0.0] * plan.threads for _ in range(plan.proxies)] for _ in self.cells]
        self._open = [[[0] * per_cell for _ in range(plan.proxies)] for _ in self.cells]
        self._cells_up = [True] * plan.cells
        self._numbers = 0
        self._pending: set[int] = set()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def lose(self, when: float, cell: int, servers: range) -> None:
        """Lose servers, as with their node: what they have is sent again once that is known."""
        lost = [self.cells[cell][index] for index in servers]

        def gone() -> None:
            for server in lost:
                server.up = False

        def detected() -> None:
            for index in servers:
                self._set_known(cell, index, known=False)

        self.at(when, gone)
        self.at(when + self.plan.detect_seconds, detected)

    def lose_cell(self, when: float, cell: int) -> None:
        """Lose a cell; clients use the others once they know."""
        self.lose(when, cell, range(len(self.cells[cell])))

        def detected() -> None:
            self._cells_up[cell] = False

        self.at(when + self.plan.detect_seconds, detected)

    def replace(self, when: float, cell: int, index: int, seconds: float) -> None:
        """Drain a server and have it back after some time."""
        self.at(when, lambda: self._set_known(cell, index, known=False))
        self.at(when + seconds, lambda: self._set_known(cell, index, known=True))

    def run(self) -> Outcome:
        """Run until the plan's time is over."""
        if self.plan.clients:
            for _ in range(self.plan.clients):
                self.at(self._random.random() * 1e-3, self._arrive)
        else:
            self.at(0.0, self._arrive_and_go_on)
        while self._events and self._events[0][0] < self.plan.seconds:
            self._now, _, what = heapq.heappop(self._events)
            what()
        self.outcome.unanswered = len(self._pending)
        return self.outcome

    def _set_known(self, cell: int, index: int, *, known: bool) -> None:
        """Have all proxies of a cell send requests to a server, or not."""
        for counts in self._open[cell]:
            counts[index] += -_UNKNOWN if known else _UNKNOWN

    def _arrive_and_go_on(self) -> None:
        self._arrive()
        self.at(self._now + self._random.expovariate(self.plan.rate), self._arrive_and_go_on)

    def _arrive(self) -> None:
        up = [cell for cell, is_up in enumerate(self._cells_up) if is_up]
        proxy = self._random.randrange(self.plan.proxies)
        request = Request(self._numbers, self._now, self._random.choice(up), proxy)
        self._numbers += 1
        self._pending.add(request.number)
        self._forward(request)

    def _forward(self, request: Request) -> None:
        threads = self._proxy_free[request.cell][request.proxy]
        thread = min(range(len(threads)), key=threads.__getitem__)
        threads[thread] = max(threads[thread], self._now) + self.plan.proxy_seconds
        self.at(threads[thread], lambda: self._choose(request))

    def _choose(self, request: Request) -> None:
        servers = self.cells[request.cell]
        counts = self._open[request.cell][request.proxy]
        least = min(counts)
        if least >= _UNKNOWN:
            up = [cell for cell, is_up in enumerate(self._cells_up) if is_up]
            request.cell = self._random.choice(up)
            self.at(self._now + self.plan.retry_seconds, lambda: self._forward(request))
            return
        # HAProxy goes round among equals.
        start = self._random.randrange(len(counts))
        try:
            request.server = counts.index(least, start)
        except ValueError:
            request.server = counts.index(least)
        counts[request.server] += 1
        self._serve(servers[request.server], request)

    def _serve(self, server: Server, request: Request) -> None:
        if not server.up:
            self._try_again(request)
        elif len(server.running) < server.instances:
            server.running.add(request.number)
            shape = 1 / max(self.plan.variation, 1e-3) ** 2
            seconds = self._random.gammavariate(shape, self.plan.service_seconds / shape)
            self.at(self._now + seconds, lambda: self._finish(server, request))
        else:
            server.waiting.append(request)

    def _finish(self, server: Server, request: Request) -> None:
        server.running.discard(request.number)
        if not server.up:
            self._try_again(request)
        else:
            self._open[request.cell][request.proxy][request.server] -= 1
            self._pending.discard(request.number)
            self.outcome.answered.append(self._now)
            self.outcome.took.append(self._now - request.began)
            if self.plan.clients:
                self._arrive()
        while server.waiting and (not server.up or len(server.running) < server.instances):
            self._serve(server, server.waiting.popleft())

    def _try_again(self, request: Request) -> None:
        self._open[request.cell][request.proxy][request.server] -= 1
        request.tries += 1
        self.outcome.retried += 1
        self.at(self._now + self.plan.retry_seconds, lambda: self._forward(request))
