"""Outputs of an ensemble that its client wants in its own memory: which member writes which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpubridge.engine.ensemble.graph import Step
from gpubridge.request import ClientUse, InferRequest

__all__ = ["ClientOutputs", "StepOutputs"]

_Places = dict[str, list[int]]


class StepOutputs(NamedTuple):
    """What of it one step has to do with, by the member's names of the outputs.

    Attributes
    ----------
    out : dict
        Those that are written to the client's memory, and nowhere else.
    also : dict
        Those that are copied there, since somebody else needs them, too.
    """

    out: _Places
    also: _Places


class ClientOutputs:
    """Where a request wants outputs.

    Attributes
    ----------
    out, also : dict of str to list of int
        By the ensemble's output: region, offset and bytes. Those of the second kind are wanted in
        the response as well.
    segments : list
        The regions; none of them can go while this object lives.
    """

    __slots__ = ("_use", "also", "out")

    def __init__(self, use: ClientUse, out: _Places, also: _Places) -> None:
        self._use = use
        self.out = out
        self.also = also

    @classmethod
    def of(cls, request: InferRequest) -> ClientOutputs | None:
        """Return those of a request whose memory nobody has taken over yet; None without any."""
        use = request.client
        client = request.context.client
        if use is None or client is None:
            return None
        out, also = client.get("out", {}), client.get("also", {})
        return cls(use, out, also) if out or also else None

    @property
    def segments(self) -> list[Any]:
        """The regions."""
        return self._use.segments

    @property
    def names(self) -> set[str]:
        """The outputs."""
        return {*self.out, *self.also}

    def of_step(self, step: Step, uses: Mapping[str, int]) -> StepOutputs:
        """Return what a step writes; ``uses`` says how often each tensor is needed."""
        out: _Places = {}
        also: _Places = {}
        for name, tensor in step.outputs.items():
            if tensor in self.also:
                also[name] = self.also[tensor]
            elif tensor in self.out:
                places = out if uses[tensor] == 1 else also
                places[name] = self.out[tensor]
        return StepOutputs(out, also)
