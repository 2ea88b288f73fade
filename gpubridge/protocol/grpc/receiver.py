"""Receives a large ModelInferRequest: its raw contents straight into an arena's slot."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Body, PrivateMemory, Slot
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.protocol.body import ALIGNMENT
from gpubridge.protocol.grpc.fields import FieldScanner, RequestHead, read_request
from gpubridge.protocol.grpc.infer_request import (
    FormCache,
    MadeRequest,
    aligned_end,
    infer_request,
    pack_inputs,
)
from gpubridge.request import Outcome


def whole_request(
    message: bytes, forms: FormCache, on_done: Callable[[Outcome], None]
) -> MadeRequest:
    """Make the request of a message that came as a whole, a small one: its inputs are copied.

    It returns:

    - ``known``: the model, and the form that the answer depends on.
    - ``request``: to be submitted to that model, which then owns its slot.
    - ``regions``: where its inputs and outputs lie in the client's memory, if any do.

    Raises BridgeError when it is no valid request; nothing is held then.
    """
    made = forms.templates.take_message(message, on_done)
    if made is not None:
        return made
    head = read_request(message)
    known = forms.read(head)
    form, arena = known.form, known.arena
    slot = pack_inputs(form, head, message, arena)
    copied = sum(nbytes for _, nbytes in form.places) if form.packed else form.binary_bytes
    try:
        return infer_request(known, head, slot, on_done, copied)
    except BridgeError:
        arena.free(slot)
        raise


class RequestReceiver:
    """Takes one message in pieces; owns the memory of its raw contents until the request is made.

    That is a slot of the arena of the model that the message has named by then. Where it has named
    none yet, or one that there is not, it is memory of this process alone.

    Feed it whatever comes. When `target` is some memory, the next bytes of the message may be
    received there instead, then `filled` says so; they may be fed as well.

    ``nbytes``: bytes of the message. No more than that, and some alignment, is ever allocated.

    Its attributes:

    - ``target``: where the rest of the raw content that has begun belongs; None between raw
      contents.
    - ``copied``: bytes of raw contents that were copied: those that were fed, and what the owner
      adds.
    """

    def __init__(
        self, nbytes: int, arena_of: Callable[[str], RequestArena | None], body: Body
    ) -> None:
        self.target: memoryview | None = None
        self.copied = 0
        self._arena_of = arena_of
        # None when the request has it.
        self._body: Body | None = body
        # Of the slot, which is in the arena; there is neither where the memory is private.
        self._arena: RequestArena | None = None
        self._nbytes = nbytes
        self._scanner = FieldScanner(nbytes)
        self._slot: Slot | None = None
        self._private: PrivateMemory | None = None
        self._started = False
        # Where the memory ends that the target is part of.
        self._piece_end = 0
        self._end = 0
        self._sizes: list[int] = []
        self._offsets: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether the whole message has come."""
        return self._scanner.left == 0

    def left(self, missing: int) -> int:
        """Return how many bytes of the message are not there.

        ``missing``: how many of the target; only who received there knows.
        """
        left = self._scanner.left
        if self.target is None:
            return left
        return left - (self._scanner.raw or 0) + self._end - self._piece_end + missing

    def arrived(self, missing: int) -> int:
        """Return how many bytes of the message are there; ``missing`` as that of `left`."""
        return self._nbytes - self.left(missing)

    def feed(self, data: memoryview) -> None:
        """Take the next bytes of the message.

        Raises BridgeError: ``INTERNAL`` as soon as it can be no message, ``UNAVAILABLE`` without
        room for it.
        """
        while True:
            if self.target is not None:
                taken = min(len(data), len(self.target))
                self.target[:taken] = data[:taken]
                self.copied += taken
                if taken == len(self.target):
                    self.filled()
                else:
                    self.target = self.target[taken:]
            else:
                taken = self._scanner.feed(data)
                if self._scanner.raw is not None:
                    self._begin_raw(self._scanner.raw)
            data = data[taken:]
            if not data:
                break

    def filled(self) -> None:
        """The target has been filled: the next one is more of the same raw content, if there is more.

        Raises BridgeError: ``UNAVAILABLE`` without room for it.
        """
        if self._piece_end < self._end:
            self._aim(self._piece_end)
        else:
            self.target = None
            self._scanner.pass_raw()

    def request(self, forms: FormCache, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Make the request of the complete message, as `whole_request`; the slot goes with it.

        Raises BridgeError when it is no valid request; the slot is freed by `close`.
        """
        scanner = self._scanner
        head = RequestHead(scanner.form(), scanner.identifier(), tuple(self._sizes), self._offsets)
        if self._slot is not None:
            made = forms.templates.take_fields(
                self._slot,
                head.form,
                head.identifier,
                head.sizes,
                head.offsets,
                on_done,
                self.copied,
            )
            if made is not None and made[0].arena is self._arena:
                return self._given_away(made)
        known = forms.read(head)
        form, arena = known.form, known.arena
        in_place = self._arena is arena and all(
            there == at for there, (at, _) in zip(self._offsets, form.places, strict=False)
        )
        if not in_place:
            # The inputs came as typed fields, behind the raw contents or before the model's name:
            # they were not expected there.
            slot = pack_inputs(form, head, self._received(), arena)
            self.copied += sum(nbytes for _, nbytes in form.places)
            self.close()
            slot.charge(self._body)
            self._slot, self._arena = slot, arena
        assert self._slot is not None
        return self._given_away(infer_request(known, head, self._slot, on_done, self.copied))

    def _given_away(self, made: MadeRequest) -> MadeRequest:
        """Leave the slot, and what it is charged to, to the request."""
        if self._slot is not None and self._arena is not None:
            self._arena.complete(self._slot)
        self._slot = self._body = None
        return made

    def close(self) -> None:
        """Give the memory back, if it was not given away with the request."""
        slot, self._slot = self._slot, None
        private, self._private = self._private, None
        self.target = None
        if slot is not None:
            assert self._arena is not None
            self._arena.free(slot)
        if private is not None:
            private.close()
        if self._body is not None:
            self._body.release()

    def _begin_raw(self, nbytes: int) -> None:
        """Find a place for a raw content: aligned, as inputs are in the form."""
        left = self._scanner.left
        if not self._started:
            self._started = True
            self._reserve(max(left, 1) + ALIGNMENT * self._scanner.inputs)
        at = aligned_end(self._end)
        if at + left > len(self._received()):
            at = self._end
        self._sizes.append(nbytes)
        self._offsets.append(at)
        self._end = at + nbytes
        if nbytes:
            self._aim(at)
        else:
            self._scanner.pass_raw()

    def _aim(self, at: int) -> None:
        """Have the raw content go on at an offset: to memory that is there by now."""
        if self._slot is not None:
            assert self._arena is not None
            self._piece_end = self._arena.grow(self._slot, at, self._end)
        else:
            assert self._private is not None
            self._piece_end = self._private.grow(at, self._end)
        self.target = self._received()[at : self._piece_end]

    def _reserve(self, nbytes: int) -> None:
        """Find memory for all raw contents: of the model that the message names, if it can be."""
        assert self._body is not None
        name = self._scanner.model_name()
        self._arena = None if name is None else self._arena_of(name)
        if self._arena is None:
            self._private = PrivateMemory(nbytes, self._body)
        else:
            self._slot = self._arena.reserve(nbytes, self._body)

    def _received(self) -> memoryview:
        """Return the memory of all raw contents."""
        if self._slot is not None:
            return self._slot.memory
        return memoryview(b"") if self._private is None else self._private.memory
