"""Contexts: the fields of requests, calls and responses besides their tensors, and their codec.

`FIELDS` defines every field once; ``csrc/ipc/context.h`` has the same table. An encoded context is
little-endian: a u32 with the bit of each field that is present, then their values in the order of the
bits::

    u64, i64   8 bytes
    text       u32 length, UTF-8
    JSON       u32 length, UTF-8 of a JSON value
    flag       no value: True if present

A field with its default value is absent, and a context without fields has no bytes. The compiled
module's codec and the one here behave the same.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, ClassVar, NamedTuple, TypeVar, cast

from gpubridge.tensor.native import native

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        """Do nothing at run time: it is for type checkers."""
        return lambda decorator: decorator


LONG_TEXT = 64 * 1024
"""The server does not decode texts of more bytes."""


class FieldKind:
    """Encoding of a field's value."""

    U64 = "u64"
    I64 = "i64"
    TEXT = "text"
    JSON = "json"
    FLAG = "flag"


class ContextField(NamedTuple):
    """One field: its name, the bit that marks it as present, and its kind."""

    name: str
    tag: int
    kind: str


FIELDS = (
    ContextField("flags", 0, FieldKind.U64),
    ContextField("correlation_id", 1, FieldKind.U64),
    ContextField("correlation_text", 2, FieldKind.TEXT),
    ContextField("timeout", 3, FieldKind.U64),
    ContextField("parameters", 4, FieldKind.TEXT),
    ContextField("trace", 5, FieldKind.U64),
    ContextField("shared", 6, FieldKind.FLAG),
    ContextField("state", 7, FieldKind.JSON),
    ContextField("controls", 8, FieldKind.JSON),
    ContextField("client", 9, FieldKind.JSON),
    ContextField("device", 10, FieldKind.TEXT),
    ContextField("device_outputs", 11, FieldKind.JSON),
    ContextField("waits", 12, FieldKind.JSON),
    ContextField("event", 13, FieldKind.U64),
    ContextField("event_lease", 14, FieldKind.U64),
    ContextField("model", 15, FieldKind.TEXT),
    ContextField("version", 16, FieldKind.I64),
    ContextField("decoupled", 17, FieldKind.FLAG),
    ContextField("handed_on", 18, FieldKind.FLAG),
    ContextField("host_outputs", 19, FieldKind.FLAG),
    ContextField("error", 20, FieldKind.TEXT),
    ContextField("code", 21, FieldKind.U64),
    ContextField("passed_on", 22, FieldKind.FLAG),
    ContextField("set_aside", 23, FieldKind.U64),
    ContextField("outputs_for", 24, FieldKind.TEXT),
    ContextField("trace_context", 25, FieldKind.TEXT),
    ContextField("span", 26, FieldKind.U64),
)

K = TypeVar("K")


@dataclass_transform(frozen_default=True)
def _context(kind: type[K]) -> type[K]:
    """Make a context class: a dataclass, with slots where the interpreter supports them.

    Contexts are immutable; only type checkers enforce it, which halves the cost of making one.
    """
    slots: Any = {"slots": True} if sys.version_info >= (3, 10) else {}
    return cast("type[K]", dataclass(**slots)(kind))


class Context:
    """Base class of contexts, which are immutable and encoded once."""

    __slots__ = ("_encoded",)
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _encoded: bytes

    def encoded(self) -> bytes:
        """Return the context as encoded in a record."""
        try:
            return self._encoded
        except AttributeError:
            raw = self._encoded = context_codec(type(self)).encode(self)
            return raw

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values in some fields."""
        made = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            setattr(made, name, getattr(self, name))
        for name, value in values.items():
            setattr(made, name, value)
        return made

    @classmethod
    def layout(cls) -> list[tuple[ContextField, Any]]:
        """Return the fields of this class with their defaults, in the order of their bits."""
        defaults = {field.name: field.default for field in cls.__dataclass_fields__.values()}
        return [(field, defaults[field.name]) for field in FIELDS if field.name in defaults]


Waits = Sequence[Sequence[int]]
Control = Sequence[Any]


@_context
class RequestContext(Context):
    """Context of a request, from the server to the stub that executes it.

    - ``flags``: bits of ``TRITONSERVER_REQUEST_FLAG_...``.
    - ``correlation_id``, ``correlation_text``: the sequence, by number or name; 0 and None for none.
    - ``timeout``: the client's timeout in microseconds; 0 for none.
    - ``parameters``: the client's parameters, the text of a JSON object; empty for none. In the server
      long ones are a memoryview of UTF-8, which `encoded` leaves out.
    - ``trace``: the number of the trace; 0 for none. ``trace_context``: its W3C context as JSON.
    - ``shared``: whether other requests or models use the inputs as well.
    - ``state``: the instance's slot for the states of the sequence, and whether the sequence starts, so
      that the slot's old states are discarded; None for none.
    - ``controls``: the control inputs of the sequence: name, datatype, shape and value of each.
    - ``client``: use of the client's memory: ``in``, indices of the inputs there; ``out`` and ``also``,
      by output, the region, offset and bytes to which it is written instead of, or besides, being
      sent.
    - ``device``: the UUID of the device on which outputs may stay; empty for none.
    - ``device_outputs``: the same by output, where it differs.
    - ``waits``: events that tensors on a device wait for, see `gpubridge.transport.device_events`.
    - ``outputs_for``: the model or ensemble whose processes map the outputs; empty for the server
      alone.
    """

    flags: int = 0
    correlation_id: int = 0
    correlation_text: str | None = None
    timeout: int = 0
    parameters: Any = ""
    trace: int = 0
    shared: bool = False
    state: Sequence[int] | None = None
    controls: Sequence[Control] | None = None
    client: Mapping[str, Any] | None = None
    device: str = ""
    device_outputs: Mapping[str, str] | None = None
    waits: Waits | None = None
    outputs_for: str = ""
    trace_context: str = ""

    @property
    def correlation(self) -> int | str:
        """Id or name of the sequence; 0 for none."""
        return self.correlation_id if self.correlation_text is None else self.correlation_text


@_context
class CallContext(Context):
    """Context of a model's call of another model; version -1 lets the server choose.

    - ``decoupled``: whether the caller accepts more than one response.
    - ``handed_on``: whether the caller may still use some tensors; False if all were copied.
    - ``host_outputs``: whether the caller wants outputs in host memory.
    - ``event``, ``event_lease``: the event that tensors on a device wait for, and its lease.
    - ``span``: the model's span that sends the call; 0 for none.
    """

    model: str = ""
    version: int = -1
    decoupled: bool = False
    handed_on: bool = False
    host_outputs: bool = False
    flags: int = 0
    correlation_id: int = 0
    correlation_text: str | None = None
    timeout: int = 0
    parameters: Any = ""
    trace: int = 0
    event: int | None = None
    event_lease: int | None = None
    span: int = 0

    @property
    def correlation(self) -> int | str:
        """Id or name of the sequence; 0 for none."""
        return self.correlation_id if self.correlation_text is None else self.correlation_text


@_context
class ResponseContext(Context):
    """Context of a response: from a stub, of its model's; from the server, of one to a model's call.

    - ``parameters``: the text of a JSON object; empty for none.
    - ``error``, ``code``: set where the record's flags mark an error; no code for an internal one.
    - ``event``, ``event_lease``: as in `CallContext`; ``waits`` as in `RequestContext`.
    - ``passed_on``: whether outputs may lie in the memory of the request's inputs.
    - ``set_aside``: inside the server: the number of the texts that `without_long_texts` removed.
    """

    parameters: str = ""
    error: str = ""
    code: int | None = None
    event: int | None = None
    event_lease: int | None = None
    passed_on: bool = False
    waits: Waits | None = None
    set_aside: int | None = None


def correlated(correlation: int | str) -> dict[str, Any]:
    """Return the context fields for the id or name of a sequence."""
    if isinstance(correlation, str):
        return {"correlation_id": 0, "correlation_text": correlation}
    return {"correlation_id": correlation, "correlation_text": None}


_MASK = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_NUMBERS = {FieldKind.U64: struct.Struct("<Q"), FieldKind.I64: struct.Struct("<q")}
_codecs: dict[type[Context], PythonContextCodec] = {}


def context_codec(kind: type[Context]) -> PythonContextCodec:
    """Return the codec of a context class: the compiled one where there is a module."""
    codec = _codecs.get(kind)
    if codec is None:
        compiled = native()
        codec = _codecs[kind] = (
            PythonContextCodec(kind)
            if compiled is None
            else compiled.ContextCodec(kind, kind(), kind.layout(), _json_text, _json_value)
        )
    return codec


_json_text = json.JSONEncoder(separators=(",", ":")).encode


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"a context with JSON that is too deep: {error}") from error


(_SET_ASIDE,) = (field for field in FIELDS if field.name == "set_aside")


def without_long_texts(
    raw: memoryview, longest: int, names: Sequence[str]
) -> tuple[bytes, dict[str, memoryview]]:
    """Remove texts of more than ``longest`` bytes in fields ``names`` from an encoded context.

    Returns the remaining context, and the texts, unchecked UTF-8, by their fields. Raises ValueError
    for a truncated context.
    """
    kept: list[bytes | memoryview] = []
    texts: dict[str, memoryview] = {}
    try:
        (mask,) = _MASK.unpack_from(raw)
        at = _MASK.size
        for field, begin, at in _fields_of(raw):
            if at - begin > longest and field.name in names:
                texts[field.name] = raw[begin + _LENGTH.size : at]
                mask &= ~(1 << field.tag)
            else:
                kept.append(raw[begin:at])
    except struct.error as error:
        raise ValueError(_CUT) from error
    return b"".join((_MASK.pack(mask), *kept, raw[at:])), texts


def with_number_aside(raw: bytes, number: int) -> bytes:
    """Add a field ``set_aside`` to an encoded `ResponseContext`; ValueError if it has one."""
    (mask,) = _MASK.unpack_from(raw)
    if mask >> _SET_ASIDE.tag:
        # That field or a later one, which responses do not have.
        raise ValueError(f"a context with bits {mask:#x}")
    aside = _NUMBERS[_SET_ASIDE.kind].pack(number)
    return b"".join((_MASK.pack(mask | 1 << _SET_ASIDE.tag), raw[_MASK.size :], aside))


def opened_for(raw: bytes, name: str, nbytes: int) -> tuple[bytes, bytes]:
    """Add a text field of ``nbytes`` bytes to an encoded context without a field of this name.

    Returns the bytes before and after the text.
    """
    raw = raw or _MASK.pack(0)
    (added,) = (field for field in FIELDS if field.name == name)
    earlier = [end for field, _, end in _fields_of(raw) if field.tag < added.tag]
    at = max(earlier, default=_MASK.size)
    (mask,) = _MASK.unpack_from(raw)
    mask |= 1 << added.tag
    return b"".join((_MASK.pack(mask), raw[_MASK.size : at], _LENGTH.pack(nbytes))), raw[at:]


def _fields_of(raw: bytes | memoryview) -> Iterator[tuple[ContextField, int, int]]:
    """Yield the fields of an encoded context, each with its begin and end.

    Raises ValueError or struct.error for a truncated context.
    """
    (mask,) = _MASK.unpack_from(raw)
    at = _MASK.size
    for field in (field for field in FIELDS if mask >> field.tag & 1):
        size = _NUMBERS[field.kind].size if field.kind in _NUMBERS else 0
        if field.kind in (FieldKind.TEXT, FieldKind.JSON):
            size = _LENGTH.size + _LENGTH.unpack_from(raw, at)[0]
        if size > len(raw) - at:
            raise ValueError(_CUT)
        yield field, at, at + size
        at += size


class PythonContextCodec:
    """Encodes and decodes contexts of one class in Python."""

    __slots__ = ("_empty", "_kind", "_layout", "_unknown")

    def __init__(self, kind: type[Context]) -> None:
        self._kind = kind
        self._empty = kind()
        self._layout = kind.layout()
        self._unknown = ~sum(1 << field.tag for field, _ in self._layout)

    def encode(self, context: Context) -> bytes:
        """Encode a context; ValueError if a value is not of its field's kind."""
        mask = 0
        parts = [b""]
        for field, default in self._layout:
            value = getattr(context, field.name)
            if value == default or isinstance(value, memoryview):
                continue
            mask |= 1 << field.tag
            try:
                parts.append(_encode_value(field.kind, value))
            except struct.error as error:
                raise ValueError(f"context field '{field.name}': got {value!r:.100}") from error
            except (AttributeError, TypeError) as error:
                raise ValueError(f"context field '{field.name}': {error}") from error
        if not mask:
            return b""
        parts[0] = _MASK.pack(mask)
        return b"".join(parts)

    def decode(self, raw: bytes) -> Context:
        """Decode a context; ValueError if the bytes are not one of this class."""
        if not raw:
            return self._empty
        if len(raw) < _MASK.size:
            raise ValueError(_CUT)
        (mask,) = _MASK.unpack_from(raw)
        if mask & self._unknown:
            raise ValueError(f"a context with unknown fields, of the bits {mask:#x}")
        values: dict[str, Any] = {}
        at = _MASK.size
        for field, _ in self._layout:
            if mask >> field.tag & 1:
                value, at = _decode_value(field.kind, raw, at)
                values[field.name] = value
        if at != len(raw):
            raise ValueError(f"a context with {len(raw) - at} bytes after its end")
        return self._kind(**values)


def _encode_value(kind: str, value: Any) -> bytes:
    if kind == FieldKind.FLAG:
        return b""
    if kind in _NUMBERS:
        return _NUMBERS[kind].pack(value)
    # Models' texts may have lone surrogates, which UTF-8 cannot encode.
    text: str = _json_text(value) if kind == FieldKind.JSON else value
    encoded = text.encode(errors="replace")
    return _LENGTH.pack(len(encoded)) + encoded


def _decode_value(kind: str, raw: bytes, at: int) -> tuple[Any, int]:
    if kind == FieldKind.FLAG:
        return True, at
    if kind in _NUMBERS:
        end = at + _NUMBERS[kind].size
        if end > len(raw):
            raise ValueError(_CUT)
        return _NUMBERS[kind].unpack_from(raw, at)[0], end
    at += _LENGTH.size
    if at > len(raw):
        raise ValueError(_CUT)
    end = at + _LENGTH.unpack_from(raw, at - _LENGTH.size)[0]
    if end > len(raw):
        raise ValueError(_CUT)
    text = str(raw[at:end], "utf-8")
    return (text if kind == FieldKind.TEXT else _json_value(text)), end


_CUT = "a context that ends in the middle of a field"
