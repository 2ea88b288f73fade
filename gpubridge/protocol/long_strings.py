"""JSON documents without their long strings, which would take long to decode."""

from __future__ import annotations

from typing import Any

from gpubridge import dataplane
from gpubridge.transport.context import LONG_TEXT


class LongStrings:
    """The long strings of a document, replaced by placeholders.

    ``document``: the document with the placeholders.
    """

    def __init__(self, document: bytes, *, split: bool = True) -> None:
        found = None
        if split and len(document) > LONG_TEXT:
            found = dataplane.split_long_strings(document)
        self._source = memoryview(document)
        self.document, self._places = found or (document, [])
        self._used: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def used(self) -> bool:
        """Return whether each string has been requested."""
        return len(self._used) == len(self._places)

    def text(self, value: Any) -> memoryview | None:
        """Return the raw text of the string that a value is the placeholder of, or None."""
        place = self._take(value)
        return None if place is None else self._source[place[0] : sum(place)]

    def json(self, value: Any) -> bytes | None:
        """Return the string that a value is the placeholder of, as JSON without needless escapes, or None.

        Raises ValueError if it is malformed.
        """
        place = self._take(value)
        if place is None:
            return None
        text = dataplane.plain_json_string(self._source, *place)
        if text is None:
            raise ValueError("no JSON")
        return text

    def _take(self, value: Any) -> tuple[int, int] | None:
        if not self._places or type(value) is not str or not value.startswith("\0"):
            return None
        index = int(value[1:])
        self._used.add(index)
        return self._places[index]


NO_LONG_STRINGS = LongStrings(b"")
