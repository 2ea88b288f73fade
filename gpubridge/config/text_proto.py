"""The text of a ``config.pbtxt`` as Triton reads it, in a form that every parser reads alike.

protobuf's parser in Python takes numbers, blanks and escapes that the one in C++, which Triton uses,
refuses, and the other way round. The text is split here by the rules of C++, and written anew with one
spelling for each token, at its line and column; then Python parses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpubridge.errors import invalid

_TOKEN = re.compile(
    rb"""(?P<blank>[ \t\n\v\f\r]+|\#[^\n\x00]*)
    |(?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<symbol>[]:{}[<>,;./-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"""\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{1,2})
    |u(?P<short>[0-9a-fA-F]{4})|U(?P<long>00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})
    |(?P<plain>[abfnrtv\\?'"])|(?P<wrong>.?))""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = dict(zip(b"abfnrtv\\?'\"", b"\a\b\f\n\r\t\v\\?'\"", strict=True))
_OCTAL = re.compile(rb"0[0-9]+")


def plain_text(content: bytes, source: str) -> str:
    """Return the same text in one spelling; comments are left out.

    Raises BridgeError: INVALID_ARG with `source`, line, column, and what was expected.
    """
    pieces: list[bytes] = []
    minus = False
    for kind, at, token in _tokens(content, source):
        if kind == "blank":
            # As long as it is, so that what follows keeps its line and column.
            pieces.append(re.sub(rb"[^\n]", b" ", token))
        elif token == b"-" and not minus:
            minus = True
        else:
            # A number may stand apart from its sign.
            sign = b"-" if minus else b""
            if kind == "number":
                _check_number(content, at, token, source)
            pieces.append(
                sign + (_plain_string(content, at, token, source) if kind == "text" else token)
            )
            minus = False
    if minus:
        pieces.append(b"-")
    return b"".join(pieces).decode()


def _tokens(content: bytes, source: str) -> Iterator[tuple[str, int, bytes]]:
    at = 0
    while at < len(content):
        match = _TOKEN.match(content, at)
        if match is None:
            raise _fault(content, at, source, _unknown(content[at : at + 1]))
        kind = match.lastgroup or ""
        yield kind, at, match[0]
        at = match.end()
        if kind == "number" and re.match(rb"[A-Za-z0-9_.]", content[at : at + 1]):
            raise _fault(content, at, source, "expected a blank after a number")


def _unknown(byte: bytes) -> str:
    if byte in (b'"', b"'"):
        return "expected a string that ends in its line"
    if b" " <= byte < b"\x7f":
        return f"expected a field, a value or one of : {{ }} [ ] < > , ; - got {byte.decode()}"
    if byte < b"\x80":
        return f"expected text, got the control character 0x{byte[0]:02x}"
    return f"expected ASCII outside of strings and comments, got the byte 0x{byte[0]:02x}"


def _check_number(content: bytes, at: int, token: bytes, source: str) -> None:
    if _OCTAL.fullmatch(token) and re.search(rb"[89]", token):
        raise _fault(content, at, source, f"expected octal digits after 0, got {token.decode()}")


def _plain_string(content: bytes, at: int, token: bytes, source: str) -> bytes:
    """Return a string with escapes that each parser knows, for bytes that are no letters or signs."""
    value = bytearray()
    end = 1
    inner = token[1:-1]
    high = 0
    while end <= len(inner):
        begin = inner.find(b"\\", end - 1)
        if begin < 0:
            value += inner[end - 1 :]
            break
        value += inner[end - 1 : begin]
        match = _ESCAPE.match(inner, begin)
        assert match is not None
        if match["wrong"] is not None:
            shown = match[0].decode("ascii", "backslashreplace")
            raise _fault(
                content, at + 1 + begin, source, f"expected an escape sequence, got {shown}"
            )
        unit = _unit(match)
        if 0xDC00 <= unit < 0xE000 and high:
            # The second half of a character that two sequences give.
            del value[-3:]
            unit = 0x10000 + ((high - 0xD800) << 10) + unit - 0xDC00
        high = unit if 0xD800 <= unit < 0xDC00 else 0
        value += _bytes_of(match, unit)
        end = match.end() + 1
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        wrong = value[error.start]
        raise _fault(content, at, source, f"expected UTF-8, got the byte 0x{wrong:02x}") from None
    return b'"' + b"".join(_spelt(byte) for byte in text.encode()) + b'"'


def _unit(match: re.Match[bytes]) -> int:
    """Return the number of a Unicode escape; 0 for others."""
    digits = match["short"] or match["long"]
    return int(digits, 16) if digits else 0


def _bytes_of(match: re.Match[bytes], unit: int) -> bytes:
    if match["octal"]:
        return bytes([int(match["octal"], 8) & 0xFF])
    if match["hex"]:
        return bytes([int(match["hex"], 16)])
    if match["plain"]:
        return bytes([_PLAIN[match["plain"][0]]])
    return chr(unit).encode("utf-8", "surrogatepass")


def _spelt(byte: int) -> bytes:
    plain = 0x20 <= byte < 0x7F and byte not in b"\"\\'"
    return bytes([byte]) if plain else b"\\%03o" % byte


def _fault(content: bytes, at: int, source: str, what: str) -> Exception:
    line = content.count(b"\n", 0, at) + 1
    column = at - content.rfind(b"\n", 0, at)
    return invalid(f"failed to read text proto from {source}: {line}:{column}: {what}")
