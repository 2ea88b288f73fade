"""Calls of a model: what was received of each, who waits for more, and what the model holds of it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Tensor
from gpubridge.transport.channel import ChannelClosed

if TYPE_CHECKING:
    import asyncio

    from gpubridge.pb_utils.host import LoopWaiter

_TAKEN_TOGETHER = 16
"""The server is told of this many taken responses at once; it sends 64 before it is told."""
_TOLD_BYTES = 8192
"""It is told at once of a larger one: it sends 1 MiB before it is told."""
_LEFT_IN_PLACE = 32
"""So many responses to one call wait in the called model's memory; further ones are copied."""
_COPIED_BYTES = 16 << 20
_LEAST_BYTES = 1024
"""Of a response that waits; its objects have about as many."""


class Waiter(Protocol):
    """Waits for an outcome, as `threading.Event` does."""

    def set(self) -> None:
        """Wake it to look again; any thread may, any number of times."""


class Outcome:
    """Something that the server answers, and those who wait for that."""

    __slots__ = ("_failure", "_waiters", "ended")

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._failure: str | None = None
        self.ended = False

    @property
    def ready(self) -> bool:
        """Return whether there is something to take, or there will be nothing more."""
        return self.ended

    def add_waiter(self, waiter: Waiter) -> None:
        """Wake a waiter whenever something comes; it must look at `ready` once more after this."""
        self._waiters.append(waiter)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Wake it no longer."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def fail(self, why: str) -> None:
        """End it without an answer: who takes it gets ChannelClosed with this text."""
        self._failure = why
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for waiter in tuple(self._waiters):
            waiter.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelClosed(self._failure)


class Call(Outcome):
    """One call; the client's table holds it, and so what waits for it, until its outcome.

    - ``inputs``: their memory is passed by reference and must not change until the final response.
    - ``sent``: whether its record has left. ``dropped``: whether the model has let go of it.
    - ``credit``: how many responses have been taken, or copied, since the server was told.
    """

    __slots__ = ("_responses", "credit", "dropped", "inputs", "number", "sent")

    def __init__(self, number: int, inputs: Any, decoupled: bool) -> None:
        # As the base class does, whose call would take longer; there are many calls.
        self._waiters = []
        self._failure = None
        self.ended = False
        self.number = number
        self.inputs = inputs
        self.sent = self.dropped = False
        self.credit = Credit() if decoupled else None
        # Each with whether it is a copy.
        self._responses: deque[tuple[InferenceResponse, bool]] = deque()

    @property
    def ready(self) -> bool:
        """Return whether there is a response, or there will be none."""
        return bool(self._responses) or self.ended

    def take(self) -> InferenceResponse | None:
        """Return the next response of a call that is ready; None when there are no more."""
        if not self._responses:
            self._check()
            return None
        response, is_copy = self._responses.popleft()
        if self.credit is not None and not is_copy:
            self.credit.add(_nbytes(response))
        return response

    def deliver(self, response: InferenceResponse | None, ended: bool) -> None:
        """Add a received response, the end of the call, or both."""
        if response is not None:
            copied = self._copied(response) if self.credit is not None and not ended else None
            self._responses.append((copied or response, copied is not None))
            if self.credit is not None and copied is not None:
                self.credit.add(_nbytes(copied))
        if ended:
            self.inputs = None
            self.ended = True
        if self._waiters:
            self._wake()

    def _copied(self, response: InferenceResponse) -> InferenceResponse | None:
        """Copy a response behind many others that wait, if there is room; else return None.

        The called model then goes on: its instance may be what this model waits for before it takes
        these responses.
        """
        waiting, tensors = len(self._responses), response._tensors
        if waiting < _LEFT_IN_PLACE or any(each._device_bytes is not None for each in tensors):
            return None
        payloads: list[Any] = [each._payload() for each in tensors]
        nbytes = max(_LEAST_BYTES, sum([payload.nbytes for payload in payloads]))
        if waiting * nbytes > _COPIED_BYTES:
            return None
        if response._error is not None:
            return response
        copies = [
            Tensor._received(
                each._name,
                each._datatype,
                each._shape,
                memoryview(bytearray(payload.cast("B") if payload.nbytes else b"")),
            )
            for each, payload in zip(tensors, payloads)
        ]
        return InferenceResponse._received(copies, response._parameters)


class Credit:
    """Counts responses for which the server may send others; any thread may."""

    __slots__ = ("_count", "_due", "_telling", "_told")

    def __init__(self) -> None:
        self._count = itertools.count(1)
        # Counts that the server is to be told, and the one that it was told last.
        self._due: deque[int] = deque()
        self._told = 0
        self._telling = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count one, of so many bytes."""
        count = next(self._count)
        if nbytes > _TOLD_BYTES or count % _TAKEN_TOGETHER == 0:
            self._due.append(count)

    def take(self) -> int:
        """Return how many more the server is to be told of now; mostly 0."""
        more = 0
        # Not waited for: a finalizer or a signal's handler may have interrupted who holds it, and that
        # one looks again.
        while self._due and self._telling.acquire(blocking=False):
            try:
                while self._due:
                    count = max(self._told, self._due.popleft())
                    more, self._told = more + count - self._told, count
            finally:
                self._telling.release()
        return more


class ControlRequest(Outcome):
    """A control request to the server, and its answer.

    - ``answer``: the fields of the answer, once received.
    - ``fds``: the descriptors received with it, which the requester owns.
    """

    __slots__ = ("answer", "fds")

    def __init__(self) -> None:
        super().__init__()
        self.answer: dict[str, Any] = {}
        self.fds: list[int] = []

    def deliver(self, answer: dict[str, Any], fds: list[int]) -> None:
        """Store the received answer."""
        self.answer = answer
        self.fds = fds
        self._end()

    def check(self) -> None:
        """Raise BridgeError if the answer is an error, or there is none."""
        self._check()
        if "error" in self.answer:
            raise BridgeError(self.answer["error"], ErrorCode(self.answer["code"]))


def _nbytes(response: InferenceResponse) -> int:
    return sum([(each._device_bytes or each._payload()).nbytes for each in response._tensors])


class CallClient(Protocol):
    """The client that sends calls and receives responses; see `gpubridge.stub.bls.client`."""

    def wait(self, outcome: Outcome, /) -> None:
        """Wait until an outcome is ready."""

    def read_on(self, loop: asyncio.AbstractEventLoop, /) -> None:
        """Read from a running event loop from now on."""

    def give_credit(self, call: Call, /) -> None:
        """Tell the server how many responses to a call it may send, when it is time."""

    def cancel(self, call: Call, /) -> None:
        """Ask the called model to stop; responses that it still sends are received."""

    def abandon(self, call: Call, /) -> None:
        """Let go of a call: its model is cancelled, and its responses are discarded."""


class CallResponses:
    """The responses to one call, as a model holds them: the call is cancelled when this is dropped.

    One thread or coroutine at a time may take them, any number may wait.
    """

    __slots__ = ("_call", "_client")

    def __init__(self, client: CallClient, call: Call) -> None:
        self._client = client
        self._call = call

    @property
    def ready(self) -> bool:
        """Return whether `next` need not wait: there is a response, or there will be none."""
        return self._call.ended or self._call.ready

    def wait(self) -> None:
        """Wait until it is ready."""
        if not self.ready:
            self._client.wait(self._call)

    def add_waiter(self, waiter: LoopWaiter) -> None:
        """Wake a waiter of the running event loop whenever something comes; that loop reads."""
        self._client.read_on(waiter.get_loop())
        self._call._waiters.append(waiter)

    def remove_waiter(self, waiter: LoopWaiter) -> None:
        """Wake it no longer."""
        waiters = self._call._waiters
        if waiter in waiters:
            waiters.remove(waiter)

    def next(self) -> InferenceResponse | None:
        """Wait for the next response; None when there are no more."""
        call = self._call
        if not (call.ended or call._responses):
            self._client.wait(call)
        response = call.take()
        if call.credit is not None:
            self._client.give_credit(call)
        return response

    def cancel(self) -> None:
        """Ask the called model to stop; responses that it still sends are received as usual."""
        if not self._call.ended:
            self._client.cancel(self._call)

    def abandon(self) -> None:
        """Cancel the call and discard its responses: nobody takes them any more."""
        if not self._call.ended:
            self._client.abandon(self._call)

    __del__ = abandon
