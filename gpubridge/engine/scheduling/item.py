"""What a scheduler holds for one request: the request itself, unseen, and what rules look at."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

__all__ = ["Item", "Place", "request_prefix"]


class Place(enum.IntEnum):
    """Where an item is; only the scheduler that holds it changes this."""

    NEW = 0
    QUEUED = 1
    DELAYED = 2
    TAKEN = 3
    GONE = 4


# Enum members cost an attribute look-up each time; these are the same objects.
_NEW = Place.NEW


class Item:
    """One request on its way through a scheduler.

    Parameters
    ----------
    request : object
        The scheduler never looks at it.
    size : int
        Its batch size; 1 for a model without batch dimension.
    shape : hashable, optional
        Only items with equal keys share a batch. The key is made of the shapes of those inputs that
        must agree (`gpubridge.engine.scheduling.settings.ShapeAgreement`).
    priority : int
        1 is the highest, 0 means the model's default.
    timeout_us : int
        What the request asks for; 0 for nothing.
    identifier : str
        The request's id, for messages.

    Attributes
    ----------
    arrived : int
        The ``now_ns`` of its `add`.
    deadline : int
        When its queue gives it up or puts it behind the others, in ns; 0 for never.
    place : Place
    """

    __slots__ = (
        "arrived",
        "deadline",
        "identifier",
        "place",
        "priority",
        "request",
        "shape",
        "size",
        "timeout_us",
    )

    def __init__(
        self,
        request: Any,
        size: int = 1,
        shape: Hashable = None,
        priority: int = 0,
        timeout_us: int = 0,
        identifier: str = "",
    ) -> None:
        self.request = request
        self.size = size
        self.shape = shape
        self.priority = priority
        self.timeout_us = timeout_us
        self.identifier = identifier
        self.arrived = 0
        self.deadline = 0
        self.place = _NEW


def request_prefix(item: Item) -> str:
    """Return what Triton writes before messages about one request."""
    return f"[request id: {item.identifier or '<id_unknown>'}] "
