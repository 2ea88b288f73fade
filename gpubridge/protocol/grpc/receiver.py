"""ModelInferRequests, whole or in pieces, as requests for the engine."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.dataplane import MessageReceiver
from gpubridge.errors import BridgeError
from gpubridge.protocol.body import LONG_STRINGS, InputCopy
from gpubridge.protocol.grpc.fields import RequestHead, read_request
from gpubridge.protocol.grpc.infer_request import (
    LONG_FORM_BYTES,
    FormCache,
    KnownRequest,
    MadeRequest,
    ReadRequest,
    check_input_strings,
    infer_request,
    input_data,
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
    packed = InputCopy(form.places, input_data(form, head.offsets, message), arena).run()
    try:
        return infer_request(known, head, packed.slot, on_done, packed.copied)
    except BridgeError:
        packed.free()
        raise


class RequestReceiver(MessageReceiver):
    """Takes one message in pieces; owns the memory of its raw contents until the request is made.

    That is a slot of the arena of the model that the message has named by then. Where it has named
    none yet, or one that there is not, it is memory of this process alone.
    """

    _moved = False

    @property
    def takes_long(self) -> bool:
        """Return whether a complete message has to be read by a worker, by `read`."""
        return self.form_bytes > LONG_FORM_BYTES or sum(self.sizes) > LONG_STRINGS

    def request(self, forms: FormCache, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Make the request of the complete message, as `whole_request`; the slot goes with it.

        Raises BridgeError when it is no valid request; the slot is freed by `close`.
        """
        made = self.take(forms.templates, on_done)
        if made is not None:
            return made
        return self.make(forms.read(self._head()), on_done)

    def read(self, forms: FormCache) -> ReadRequest:
        """Return what a complete message says, its strings being checked; any thread may.

        Raises BridgeError when it is no valid request.
        """
        head = self._head()
        read = forms.read_once(head)
        form = read.form
        if not self._moved:
            data = input_data(form, head.offsets, self.memory or b"")
            check_input_strings(form, head.identifier, read.model.config.name, data)
        form.strings = ()
        return read

    def copy(self, known: KnownRequest) -> InputCopy | None:
        """Return what copies the inputs to where the request wants them; None where they are there.

        They were not expected there when they came as typed fields, behind the raw contents or before
        the model's name. Raises BridgeError: UNAVAILABLE when the arena is at its limit.
        """
        form, arena = known.form, known.arena
        if self._moved or (
            self.arena is arena
            and all(there == at for there, (at, _) in zip(self.offsets, form.places, strict=False))
        ):
            return None
        data = input_data(form, self.offsets, self.memory or b"")
        return InputCopy(form.places, data, arena)

    def move(self, copied: InputCopy, known: KnownRequest) -> None:
        """Take the slot that the inputs have been copied to, in the place of the one they came in."""
        self._moved = True
        self.copied += copied.copied
        self.close()
        copied.slot.charge(self.body)
        self.slot, self.arena = copied.slot, known.arena

    def _head(self) -> RequestHead:
        return RequestHead(self.form, self.identifier, self.sizes, self.offsets)

    def make(self, known: KnownRequest, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Make the request of a complete message that says so; as `request`."""
        head = RequestHead(b"", self.identifier, self.sizes, self.offsets)
        copy = self.copy(known)
        if copy is not None:
            self.move(copy.run(), known)
        made = infer_request(known, head, self.slot, on_done, self.copied)
        self.give_away()
        return made
