"""The top level of a ModelInferRequest, field by field, without protobuf.

A request is its *form* (everything but the id and the raw contents), which is mostly the same bytes
again and again, and the raw contents, which may be large and are to be received where they stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.errors import BridgeError, ErrorCode, invalid
from gpubridge.protocol.grpc.messages import MALFORMED
from gpubridge.tensor.native import native

_ID = 3
_INPUTS = 5
_RAW = 7

_MODEL_NAME_TAG = 1 << 3 | 2
_LONGEST_VARINT = 10
_DEEPEST = 100
_MOST_FIELDS = 1 << 14


def malformed(reason: str) -> BridgeError:
    """Make the error of bytes that are no message: Triton's, with the reason as its cause."""
    error = BridgeError(MALFORMED, ErrorCode.INTERNAL)
    error.__cause__ = ValueError(reason)
    return error


@dataclass(slots=True)
class RequestHead:
    """What the top level of a message says.

    - ``form``: the message without its id and raw contents; a message itself.
    - ``sizes``: bytes of each raw content.
    - ``offsets``: where each begins: in the message, or in the slot that it was received into.
    """

    form: bytes
    identifier: str
    sizes: tuple[int, ...]
    offsets: list[int]


def read_request(message: bytes) -> RequestHead:
    """Read the top level of a whole message; raises BridgeError."""
    scanner = FieldScanner(len(message))
    view = memoryview(message)
    sizes = []
    offsets = []
    at = 0
    while at < len(message):
        at += scanner.feed(view[at:])
        if scanner.raw is not None:
            sizes.append(scanner.raw)
            offsets.append(at)
            at += scanner.raw
            scanner.pass_raw()
    return RequestHead(scanner.form(), scanner.identifier(), tuple(sizes), offsets)


class FieldScanner:
    """Splits a message that comes in pieces into its form, its id and its raw contents.

    ``nbytes``: bytes of the whole message.

    Its attributes:

    - ``raw``: bytes of the raw content that comes next, which the caller takes: then `pass_raw`.
    - ``left``: bytes of the message that are still to come, that raw content included.
    - ``inputs``: inputs seen so far.
    """

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.raw: int | None = None
        self.inputs = 0
        self._form = bytearray()
        self._identifier = bytearray()
        self._pending = bytearray()
        self._sink = self._form
        self._want = 0
        self._depth = 0
        self._fields = 0
        self._fresh = True

    def feed(self, data: memoryview) -> int:
        """Take bytes up to the next raw content; returns how many were taken.

        Raises BridgeError: ``INTERNAL`` as soon as the bytes can be no message of that length.
        """
        if len(data) > self.left:
            raise malformed("there is more than its length says")
        at = 0
        if self._fresh:
            self._fresh = False
            at = self._take_opening(data)
        while at < len(data) and self.raw is None:
            if self._want:
                taken = min(self._want, len(data) - at)
                self._sink += data[at : at + taken]
                self._want -= taken
                self.left -= taken
                at += taken
                continue
            self._pending.append(data[at])
            self.left -= 1
            at += 1
            self._header()
        return at

    def _take_opening(self, data: memoryview) -> int:
        """Take all up to the first raw content, if that is usual; returns how many bytes it was."""
        compiled = native()
        usual = None if compiled is None else compiled.read_opening(data, self.left)
        if usual is None:
            return 0
        form, identifier, self.inputs, self.raw, taken = usual
        self._form += form
        self._identifier += identifier
        self.left -= taken
        return taken

    def model_name(self) -> str | None:
        """Return the name of the model, if it is the first field of what has come."""
        form = self._form
        if not form or form[0] != _MODEL_NAME_TAG:
            return None
        nbytes, at = _read_varint(form, 1)
        name = form[at : at + nbytes]
        return name.decode(errors="replace") if len(name) == nbytes else None

    def pass_raw(self) -> None:
        """Go on behind the raw content."""
        assert self.raw is not None
        self.left -= self.raw
        self.raw = None

    def form(self) -> bytes:
        """Return the form of the complete message; raises BridgeError."""
        if self.left or self._want or self._pending or self._depth:
            raise malformed("it ends within a field")
        return bytes(self._form)

    def identifier(self) -> str:
        """Return the id; raises BridgeError."""
        try:
            return self._identifier.decode()
        except UnicodeDecodeError as error:
            raise malformed("its id is no UTF-8") from error

    def _header(self) -> None:
        """Look whether the pending bytes are a field's tag, and its length or number."""
        tag, at = _read_varint(self._pending, 0)
        if at == 0:
            return
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise malformed("a field has number 0")
        top = self._depth == 0
        length = 0
        if kind in (0, 2):
            value, at = _read_varint(self._pending, at)
            if at == 0:
                return
            length = value if kind == 2 else 0
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        elif kind in (3, 4):
            self._depth += 1 if kind == 3 else -1
            if not 0 <= self._depth <= _DEEPEST:
                raise malformed("its groups do not match, or are too deep")
        else:
            raise malformed(f"there is no wire type {kind}")
        if length > self.left:
            raise malformed("a field is longer than the message")
        self._begin(number if top and kind == 2 else 0, length)

    def _begin(self, number: int, length: int) -> None:
        """Begin with the data of a field; the number is 0 for one without a meaning here."""
        self._fields += 1
        if self._fields > _MOST_FIELDS:
            # Each takes time, and two bytes are enough for one.
            raise invalid(
                f"expected a request of at most {_MOST_FIELDS} fields, got more; send large data as "
                "raw_input_contents"
            )
        if number == _RAW:
            self.raw = length
        elif number == _ID:
            # The last one counts, but each has to be one.
            self.identifier()
            self._identifier.clear()
            self._sink, self._want = self._identifier, length
        else:
            self.inputs += number == _INPUTS
            self._form += self._pending
            self._sink, self._want = self._form, length
        self._pending.clear()


def _read_varint(data: bytearray, at: int) -> tuple[int, int]:
    """Return a number and where it ends; 0 for the latter when it goes on."""
    value = 0
    for i in range(at, len(data)):
        if i - at == _LONGEST_VARINT:
            break
        value |= (data[i] & 127) << 7 * (i - at)
        if data[i] < 128:
            return value & (1 << 64) - 1, i + 1
    if len(data) - at >= _LONGEST_VARINT:
        raise malformed("a number has more than 64 bits")
    return 0, 0
