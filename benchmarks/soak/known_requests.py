"""Requests of many forms whose answers are known: sums, turned texts, and steps of sequences."""

from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = [
    "KnownRequest",
    "RequestSource",
    "Sequences",
    "Sums",
    "Texts",
    "parsed",
    "serialized",
    "texts_array",
]

Array = np.ndarray[Any, Any]
Parameter = bool | int | str

_BINARY_SHARE = 0.5
_LARGE_SHARE, _LARGEST = 0.01, 40_000
_LONGEST_SEQUENCE = 12


@dataclass(frozen=True)
class KnownRequest:
    """One request, and the output that answers it.

    - ``inputs``: name, datatype and values of each.
    - ``expected``: the values of the one output; for BYTES an array of objects.
    - ``binary``: whether tensors cross as bytes, else as JSON or typed contents.
    """

    id: str
    inputs: list[tuple[str, str, Array]]
    expected: Array
    binary: bool
    parameters: dict[str, Parameter] = field(default_factory=dict)

    def is_answered(self, name: str, shape: list[int], values: Array) -> bool:
        """Return whether an answer has this request's id, and the expected shape and values."""
        return (
            name == self.id
            and shape == list(self.expected.shape)
            and values.size == self.expected.size
            and bool(np.array_equal(values.reshape(shape), self.expected))
        )


class RequestSource(Protocol):
    """Source of a client's requests."""

    def ask(self) -> KnownRequest:
        """Return the next request."""
        ...

    def failed(self) -> None:
        """Note that the last request failed, since its stub was killed."""
        ...


class _Varied:
    def __init__(self, seed: str) -> None:
        self._chance = random.Random(f"{seed} {time.monotonic_ns()}")  # noqa: S311  (no secret)

    def _id(self) -> str:
        return f"{self._chance.getrandbits(64):x}"

    def _is_binary(self) -> bool:
        return self._chance.random() < _BINARY_SHARE

    def failed(self) -> None:
        """Go on: no request depends on the one before."""


class Sums(_Varied):
    """Sums A + B, or A + 2 B; each has an id, a size and values of its own."""

    def __init__(self, seed: str, twice: bool = False) -> None:
        super().__init__(seed)
        self._factor = 2 if twice else 1

    def ask(self) -> KnownRequest:
        """Return a request of small integers, so that every sum is exact."""
        chance = self._chance
        size = int(2 ** chance.uniform(0, 11))
        if chance.random() < _LARGE_SHARE:
            size = chance.randrange(1, _LARGEST)
        start = chance.randrange(-1000, 1000)
        first = np.arange(start, start + size, dtype=np.float32)
        second = np.full(size, chance.randrange(1000), np.float32)
        inputs = [("A", "FP32", first), ("B", "FP32", second)]
        return KnownRequest(self._id(), inputs, first + self._factor * second, self._is_binary())


class Texts(_Varied):
    """Strings of any length whose bytes are to be turned round; binary ones have any bytes."""

    def ask(self) -> KnownRequest:
        """Return a request of a batch of strings."""
        chance = self._chance
        shape = (chance.randrange(1, 5), chance.randrange(0, 9))
        binary = self._is_binary()
        given = np.empty(shape, np.object_)
        turned = np.empty(shape, np.object_)
        for place in np.ndindex(shape):
            text = chance.randbytes(int(2 ** chance.uniform(0, 12)) - 1)
            given[place] = text if binary else text.hex().encode()
            turned[place] = given[place][::-1]
        return KnownRequest(self._id(), [("TEXT", "BYTES", given)], turned, binary)


class Sequences(_Varied):
    """Sequences of up to a dozen numbers, one after the other; each is answered by the sum so far."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self._left = 0
        self._total = 0
        self._sequence: Parameter = 0

    def ask(self) -> KnownRequest:
        """Return the next step of the sequence, or the first of another one."""
        chance = self._chance
        start = self._left == 0
        if start:
            self._left = chance.randrange(1, _LONGEST_SEQUENCE)
            number = chance.randrange(1, 1 << 63)
            self._sequence = number if chance.random() < 0.5 else f"sequence {number}"
            self._total = 0
        self._left -= 1
        value = chance.randrange(-1000, 1000)
        self._total += value
        parameters = {
            "sequence_id": self._sequence,
            "sequence_start": start,
            "sequence_end": self._left == 0,
        }
        return KnownRequest(
            self._id(),
            [("VALUE", "INT64", np.array([[value]], np.int64))],
            np.array([[self._total]], np.int64),
            self._is_binary(),
            parameters,
        )

    def failed(self) -> None:
        """Begin another sequence: this one was lost with its stub."""
        self._left = 0


def serialized(values: Array) -> bytes:
    """Return values as they cross in binary form."""
    if values.dtype != np.object_:
        return values.tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in values.flat)


def parsed(datatype: str, content: bytes) -> Array:
    """Return the values that cross as ``content``, in one dimension."""
    if datatype != "BYTES":
        return np.frombuffer(content, {"FP32": np.float32, "INT64": np.int64}[datatype])
    texts = []
    while content:
        (size,) = struct.unpack_from("<I", content)
        texts.append(content[4 : 4 + size])
        content = content[4 + size :]
    return texts_array(texts)


def texts_array(texts: list[bytes]) -> Array:
    """Return an array of objects, in one dimension."""
    values = np.empty(len(texts), np.object_)
    values[:] = texts
    return values
