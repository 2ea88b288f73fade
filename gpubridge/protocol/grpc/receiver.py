"""Requests from ModelInferRequest messages, received whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.dataplane import MessageReceiver
from gpubridge.errors import BridgeError
from gpubridge.host_shm import LARGE_BYTES, PrivateBytes
from gpubridge.protocol.body import LONG_STRINGS, InputCopy
from gpubridge.protocol.grpc.infer_request import (
    LONG_FORM_BYTES,
    FormCache,
    KnownRequest,
    MadeRequest,
    ReadRequest,
    RequestHead,
    check_input_strings,
    infer_request,
    input_data,
    read_request,
)
from gpubridge.request import Outcome


def whole_request(
    message: bytes, forms: FormCache, on_done: Callable[[Outcome], None]
) -> MadeRequest:
    """Return the request of a small complete message, whose inputs are copied into a slot.

    The submitted request owns its slot. Raises BridgeError if the request is invalid; the slot is
    freed.
    """
    made = forms.templates.take_message(message, on_done)
    if made is not None:
        return made
    head = read_request(message)
    known = forms.read(head)
    form, arena = known.form, known.arena
    with known.model.statistics.refusing(head.identifier):
        packed = InputCopy(form.places, input_data(form, head.offsets, message), arena).run()
        try:
            return infer_request(known, head, packed.slot, on_done, packed.copied)
        except BridgeError:
            packed.free()
            raise


class RequestReceiver(MessageReceiver):
    """Receives one message in pieces; owns the memory of its raw contents until the request is made.

    This is a slot in the arena of the model that the message has named before; private memory if it
    has named none or an unknown one.
    """

    _moved = False

    def charge_form(self, arrived: int, left: int) -> int:
        """Charge more of a long form; return up to where.

        ``left``: bytes of the message to come. Raises BridgeError: UNAVAILABLE if memory is short.
        """
        if self.form_charge is None:
            self.form_charge = PrivateBytes(self.body.beside())
        upto = arrived + min(left, max(LARGE_BYTES, arrived // 2))
        self.form_charge.count(upto)
        return upto

    def set_refuse(self, refuse: Callable[[BridgeError], None]) -> None:
        """Replace the function that answers the request with an error."""
        self.body.set_refuse(refuse)
        if self.form_charge is not None:
            self.form_charge.set_refuse(refuse)

    @property
    def takes_long(self) -> bool:
        """Return whether a worker should parse the complete message, by `read`."""
        return self.form_bytes > LONG_FORM_BYTES or sum(self.sizes) > LONG_STRINGS

    def request(self, forms: FormCache, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Return the request of the complete message, which owns the slot.

        Raises BridgeError if the request is invalid; `close` frees the slot.
        """
        made = self.take(forms.templates, on_done)
        if made is not None:
            return made
        return self.make(forms.read(self._head()), on_done)

    def read(self, forms: FormCache) -> ReadRequest:
        """Parse a complete message and check its strings; thread-safe.

        Raises BridgeError if the request is invalid.
        """
        head = self._head()
        read = forms.read_once(head)
        form = read.form
        if not self._moved:
            data = input_data(form, head.offsets, self.memory or b"")
            with read.model.statistics.refusing(head.identifier):
                check_input_strings(form, head.identifier, read.model.config.name, data)
        form.strings = ()
        return read

    def copy(self, known: KnownRequest) -> InputCopy | None:
        """Return the copy of the inputs to their places; None if they are there already.

        Inputs need a copy if they are typed fields, or were received before the model's name. Raises
        BridgeError: UNAVAILABLE when the arena is at its limit.
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
        """Replace the slot by the one that the inputs have been copied to."""
        self._moved = True
        self.copied += copied.copied
        self.drop_memory()
        self.body.release()
        copied.slot.charge(self.body)
        self.slot, self.arena = copied.slot, known.arena

    def _head(self) -> RequestHead:
        return RequestHead(self.form, self.identifier, self.sizes, self.offsets)

    def make(self, known: KnownRequest, on_done: Callable[[Outcome], None]) -> MadeRequest:
        """Return the request of a parsed complete message; as `request`."""
        head = RequestHead(b"", self.identifier, self.sizes, self.offsets)
        with known.model.statistics.refusing(self.identifier):
            copy = self.copy(known)
            if copy is not None:
                self.move(copy.run(), known)
            made = infer_request(known, head, self.slot, on_done, self.copied)
        self.give_away()
        return made
