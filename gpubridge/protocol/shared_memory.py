"""Inputs and outputs in memory that the client has registered: what requests say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpubridge.errors import not_found
from gpubridge.protocol.fields import string, unsigned

_REGION = "shared_memory_region"
_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"


class SharedRegion(NamedTuple):
    """A piece of memory that the client registered: bytes of it from an offset on."""

    name: str
    nbytes: int
    offset: int


CheckRegion = Callable[[SharedRegion], None]
"""Raises where a request names memory that there is not; asked once for each form of request."""


def nothing_registered(region: SharedRegion) -> None:
    """Refuse every region, as if nobody had registered any."""
    raise not_found(f"Unable to find shared memory region: '{region.name}'")


def region_of(parameters: Mapping[str, Any]) -> SharedRegion | None:
    """Return the region that the parameters of an input or output name in JSON, if any.

    Raises BridgeError: INTERNAL, in Triton's words, for members of another type.
    """
    if parameters.get(_REGION) is None:
        return None
    members = dict(parameters)
    return SharedRegion(
        string(members, _REGION),
        unsigned(members.get(_SIZE, 0), _SIZE),
        unsigned(members.get(_OFFSET, 0), _OFFSET),
    )
