"""Numbers as the bytes of their datatypes, without NumPy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gpubridge.errors import invalid

_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_PIECE = 1 << 14


def numbers_to_bytes(name: str, datatype: str, values: Sequence[float]) -> bytes:
    """Convert the numbers of an input to the bytes of its tensor.

    - ``datatype``: one with numbers, other than BF16, or BOOL.

    Raises BridgeError: INVALID_ARG for a number out of the datatype's range.
    """
    code = _CODES[datatype]
    pieces = []
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE]
        try:
            pieces.append(struct.pack(f"<{len(piece)}{code}", *piece))
        except (OverflowError, struct.error):
            raise _beyond(name, datatype, values, begin) from None
    return b"".join(pieces)


def _beyond(name: str, datatype: str, values: Sequence[float], begin: int) -> Exception:
    """Return the error for the first value from ``begin`` on that is beyond the datatype's range."""
    one = struct.Struct(f"<{_CODES[datatype]}")
    for index in range(begin, len(values)):
        try:
            one.pack(values[index])
        except (OverflowError, struct.error):
            return invalid(
                f"element {index} of input '{name}' is {values[index]}, which is beyond the range of "
                f"{datatype}"
            )
    raise AssertionError("a value was refused that is in the range")
