"""Types of the compiled module's server half; `gpubridge.dataplane` re-exports them with their contract.

What stubs use of the module is typed in `gpubridge.tensor.native`, since they may run without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

def split_json_data(document: bytes | memoryview, /) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Take the values of the inputs out of a request's JSON.

    Returns
    -------
    (bytes, list of (int, int)) or None
        The document with an empty array in the place of each ``inputs[i].data`` that is one, and where
        those are (start, bytes). None where they cannot be told by looking at brackets and names:
        what is taken out, and what is left, has still to be parsed.
    """

def pack_json_values(
    document: bytes | memoryview, start: int, nbytes: int, datatype: str, count: int, /
) -> bytes | None:
    """Return the leaves of an array in a document as the bytes of a tensor of ``count`` elements.

    Accepts what orjson accepts, with the same meaning; integers wrap. None for anything else. Holds
    no lock of the interpreter while it works.
    """

def format_json_values(data: bytes | memoryview, datatype: str, count: int, /) -> bytes | None:
    """Return a tensor's elements as a flat JSON array; None for malformed BYTES, or another count.

    Floats have the shortest digits that read back as the same double; NaN, Infinity and -Infinity are
    literals. Bytes of strings that are no UTF-8 go out as they are. Holds no lock of the interpreter
    while it works.
    """

def pack_typed_contents(message: bytes, field: int, form: str, size: int, /) -> bytes | None:
    """Return the values of a repeated field of a serialised message as elements of ``size`` bytes.

    ``form`` is how they lie there: "varint", "fixed", or "bytes" for the strings of a BYTES tensor. None
    for a malformed message. Holds no lock of the interpreter while it works.
    """

class DynamicBatcher:
    """The default queue and the dynamic batcher, of any Python objects.

    A batch is due when it has the largest preferred size within reach, when it cannot grow any more
    (the next item does not fit, or has another shape), or when its oldest item has waited for
    ``max_delay_us``. Then, and only then, it may have any size up to ``max_batch_size``. With no
    arguments but 0 it gives one item after the other: the default queue.

    It reads no clock: ``now`` is that of any clock that never goes back. It holds an item from
    `add` until `take`, `refused`, a `cancel` that returns True, or `clear` gives it away; a taken
    item comes back by `put_back`, or is reported by `answered` where the order is kept.

    Parameters
    ----------
    max_batch_size : int
        0: every item is a batch.
    preferred : sequence of int
        Batch sizes.
    max_delay_us : int
        How long an item may wait for others.
    keep_order : bool
        Outcomes go out in the order in which items were taken first.
    levels : int
        Priorities are 1, the highest, to this; 0 for a queue without priorities.
    default_level : int
        Where items go that name no priority, or none that exists.
    policy : tuple
        The limits of a level: whether late items go behind the others (else they are refused), when
        they are late (microseconds in the queue; 0 for never), whether items may ask for less, and
        how many may wait (0 for any number).
    policies : mapping of int to tuple
        Those of the levels with their own.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred: Sequence[int] = ...,
        max_delay_us: int = ...,
        keep_order: bool = ...,
        levels: int = ...,
        default_level: int = ...,
        policy: tuple[bool, int, bool, int] = ...,
        policies: Mapping[int, tuple[bool, int, bool, int]] = ...,
    ) -> None: ...
    @property
    def pending(self) -> int:
        """Items that were not taken, those included that `refused` is about to return."""
    def add(
        self, item: Any, size: int, shape: int, priority: int, timeout_us: int, now: int, /
    ) -> int:
        """Take an item over; returns 0, or 1 if the queue of its level is full, 2 after `stop`."""
    def take(self, instance: object, now: int, /) -> list[Any] | None:
        """Give away the next batch if it is due, for whichever instance."""
    def take_ahead(self, instance: object, now: int, /) -> list[Any] | None:
        """Give away the next batch if it cannot grow, and nothing may come before it or has a limit."""
    def next_wakeup(self, now: int, /) -> int | None:
        """Return when a batch becomes due, or an item late, by the mere passing of time."""
    def refused(self, now: int, /) -> list[Any]:
        """Give away the items whose time in the queue is over."""
    def cancel(self, item: Any, /) -> bool:
        """Give an item away if it was not taken yet; return whether that was so."""
    def put_back(self, items: Sequence[tuple[Any, int, int, int, int]], /) -> None:
        """Put items before all others of their level, in the order given; they are never late.

        Each with its size, shape, priority and the time at which it came.
        """
    def answered(self, item: Any, /) -> list[Any]:
        """Hear that a taken item has its outcome; return the items whose outcomes may go out now."""
    def releasable(self) -> list[Any]:
        """Return what waited for an item that was cancelled or refused."""
    def abandon_order(self) -> list[Any]:
        """Give up the order for what was taken; return what can go out therefore."""
    def stop(self) -> None:
        """Accept nothing from now on."""
    def clear(self) -> list[Any]:
        """Give every item away that was not taken."""
