"""The JSON of an inference request, its tensors' values taken out as text and packed without Python.

Values of large requests are most of their JSON. The compiled module packs them from the text, without
the interpreter's lock; Python parses the rest.
"""

from __future__ import annotations

from typing import Any

from gpubridge import dataplane
from gpubridge.protocol.fields import parse_json


class NotPacked(Exception):
    """The values cannot be packed from their text: the whole document has to be parsed."""


class JsonValues:
    """The text of an array in a document.

    - ``document``: has to stay as it is.
    - ``start``, ``nbytes``: where in it the array is, brackets included.
    """

    __slots__ = ("_document", "_nbytes", "_start")

    def __init__(self, document: bytes | memoryview, start: int, nbytes: int) -> None:
        self._document = document
        self._start = start
        self._nbytes = nbytes

    def pack(self, datatype: str, count: int) -> bytes:
        """Return the values as the bytes of a tensor.

        ``datatype``: any that JSON can carry: not FP16 and BF16.

        Raises NotPacked for values of another type or number, and for what is no JSON.
        """
        packed = dataplane.pack_json_values(
            self._document, self._start, self._nbytes, datatype, count
        )
        if packed is None:
            raise NotPacked
        return packed


def parse_without_values(document: bytes) -> Any:
    """Parse a request's JSON; each array ``inputs[i].data`` becomes a `JsonValues`.

    Raises NotPacked when there are none that can be taken out.
    Raises BridgeError as `parse_json` does, of what is left.
    """
    split = dataplane.split_json_data(document)
    if split is None or not split[1]:
        raise NotPacked
    skeleton, ranges = split
    parsed = parse_json(skeleton)
    entries = [
        entry for entry in parsed["inputs"] if type(entry) is dict and entry.get("data") == []
    ]
    if len(entries) != len(ranges):
        raise NotPacked
    for entry, (start, nbytes) in zip(entries, ranges, strict=True):
        entry["data"] = JsonValues(document, start, nbytes)
    return parsed
