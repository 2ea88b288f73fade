"""The control tensors that tell a model where in which sequence a request stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpubridge.engine.scheduling.sequence_settings import Control, ControlKind

__all__ = ["ControlPlan", "ControlTensor"]


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """An input of one element that the scheduler adds to a request.

    Attributes
    ----------
    name : str
    datatype : str
        The KServe name.
    shape : tuple of int
        ``(1, 1)``, or ``(1,)`` for a model without batch dimension.
    value : int, float, bool or str
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    value: int | float | bool | str


class ControlPlan:
    """Makes the control tensors of requests; those without the correlation id only once.

    Parameters
    ----------
    controls : iterable of Control
    batched : bool
        The model has a batch dimension.
    """

    def __init__(self, controls: Iterable[Control], batched: bool) -> None:
        controls = tuple(controls)
        self._shape = (1, 1) if batched else (1,)
        self._correlation = next(
            (c for c in controls if c.kind is ControlKind.CONTROL_SEQUENCE_CORRID), None
        )
        self._flags = [c for c in controls if c is not self._correlation]
        self._running = {
            (start, end): self._flag_tensors(start, end, ready=True)
            for start in (False, True)
            for end in (False, True)
        }
        self._padding = self._flag_tensors(start=False, end=False, ready=False)

    def accepts(self, correlation_id: int | str) -> bool:
        """Whether the model's correlation control can carry this id."""
        control = self._correlation
        return control is None or control.datatype == "BYTES" or isinstance(correlation_id, int)

    def of_request(
        self, correlation_id: int | str, *, start: bool, end: bool
    ) -> tuple[ControlTensor, ...]:
        """Return the tensors of a request of a sequence."""
        return self._running[start, end] + self._correlation_tensor(correlation_id)

    def of_padding(self) -> tuple[ControlTensor, ...]:
        """Return the tensors of a place in a batch that no request fills: not ready, id 0."""
        control = self._correlation
        nothing = "" if control is not None and control.datatype == "BYTES" else 0
        return self._padding + self._correlation_tensor(nothing)

    def _flag_tensors(self, start: bool, end: bool, ready: bool) -> tuple[ControlTensor, ...]:
        raised = {
            ControlKind.CONTROL_SEQUENCE_START: start,
            ControlKind.CONTROL_SEQUENCE_END: end,
            ControlKind.CONTROL_SEQUENCE_READY: ready,
        }
        return tuple(
            ControlTensor(c.name, c.datatype, self._shape, c.true if raised[c.kind] else c.false)
            for c in self._flags
        )

    def _correlation_tensor(self, correlation_id: int | str) -> tuple[ControlTensor, ...]:
        control = self._correlation
        if control is None:
            return ()
        if control.datatype == "BYTES":
            value: int | str = str(correlation_id)
        else:
            value = _wrapped(int(correlation_id), control.datatype)
        return (ControlTensor(control.name, control.datatype, self._shape, value),)


def _wrapped(value: int, datatype: str) -> int:
    """Return the low bits of an unsigned id as `datatype` reads them, which is what Triton sends."""
    bits = 64 if datatype.endswith("64") else 32
    value &= (1 << bits) - 1
    if datatype.startswith("INT") and value >> (bits - 1):
        value -= 1 << bits
    return value
