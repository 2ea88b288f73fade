"""ModelInferRequests, whole or in pieces, as requests for the engine."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.dataplane import MessageReceiver
from gpubridge.errors import BridgeError
from gpubridge.protocol.grpc.fields import RequestHead, read_request
from gpubridge.protocol.grpc.infer_request import (
    FormCache,
    KnownRequest,
    MadeRequest,
    ReadRequest,
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


class RequestReceiver(MessageReceiver):
    """Takes one message in pieces; owns the memory of its raw contents until the request is made.

    That is a slot of the arena of the model that the message has named by then. Where it has named
    none yet, or one that there is not, it is memory of this process alone.
    """

    def request(self, forms: FormCache, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Make the request of the complete message, as `whole_request`; the slot goes with it.

        Raises BridgeError when it is no valid request; the slot is freed by `close`.
        """
        made = self.take(forms.templates, on_done)
        if made is not None:
            return made
        return self.make(forms.read(self._head()), on_done)

    def read(self, forms: FormCache) -> ReadRequest:
        """Return what a complete message says whose form is long; any thread may; raises BridgeError."""
        return forms.read_once(self._head())

    def _head(self) -> RequestHead:
        return RequestHead(self.form, self.identifier, self.sizes, self.offsets)

    def make(self, known: KnownRequest, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Make the request of a complete message that says so; as `request`."""
        head = RequestHead(b"", self.identifier, self.sizes, self.offsets)
        form, arena = known.form, known.arena
        in_place = self.arena is arena and all(
            there == at for there, (at, _) in zip(head.offsets, form.places, strict=False)
        )
        if not in_place:
            # The inputs came as typed fields, behind the raw contents or before the model's name:
            # they were not expected there.
            slot = pack_inputs(form, head, self.memory or b"", arena)
            self.copied += sum(nbytes for _, nbytes in form.places)
            self.close()
            slot.charge(self.body)
            self.slot, self.arena = slot, arena
        made = infer_request(known, head, self.slot, on_done, self.copied)
        self.give_away()
        return made
