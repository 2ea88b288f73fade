"""The ways of a tensor from a client to a model and back that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["PATHS", "BenchPath", "Way"]


class Way(str, Enum):
    """Where a request's tensors are when they are sent and when they are answered."""

    REGIONS = "CUDA shared memory"
    NETWORK = "HTTP"


@dataclass(frozen=True, slots=True)
class BenchPath:
    """One way.

    Attributes
    ----------
    model : str
        Of this package's model_repository; it answers with what it is sent.
    copies : int
        How often the bridge may copy the tensor on the device.
    """

    name: str
    title: str
    model: str
    way: Way
    copies: int

    @property
    def stays(self) -> bool:
        """Whether the tensor has no reason to leave the device."""
        return self.way is Way.REGIONS


PATHS = (
    BenchPath("hand_on", "device: the model's own tensor", "hand_on", Way.REGIONS, 1),
    BenchPath("place", "device: written by request.output", "place", Way.REGIONS, 0),
    BenchPath("chain", "device: ensemble of two models", "chain", Way.REGIONS, 2),
    BenchPath("host", "host: over HTTP, to the GPU and back", "upload", Way.NETWORK, 0),
)
