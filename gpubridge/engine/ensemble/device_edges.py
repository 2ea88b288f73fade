"""Which outputs of an ensemble's steps stay on a GPU, because whoever needs them is on it."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.engine.ensemble.graph import Step
from gpubridge.engine.ensemble.run import Course
from gpubridge.engine.model import Model
from gpubridge.errors import BridgeError


class DeviceEdges:
    """Finds them for one course of an ensemble.

    - ``member``: gives the model of a step; raises BridgeError.
    - ``reaches``: tells whether tensors can be copied from one GPU to another.
    """

    __slots__ = ("_member", "_reaches")

    def __init__(
        self, member: Callable[[Step], Model], reaches: Callable[[str, str], bool]
    ) -> None:
        self._member = member
        self._reaches = reaches

    def of_step(self, step: Step, course: Course, wanted: str | None) -> dict[str, str]:
        """Return the device by the output, for those that all who need them can take there.

        ``wanted``: where who has sent the ensemble's request can take outputs.
        """
        found = {}
        own = self._device(step)
        for name, tensor in step.outputs.items():
            devices = {
                self._device(course.graph.steps[index])
                for index in course.graph.consumers.get(tensor, ())
                if index in course.steps
            }
            if tensor in course.outputs:
                devices.add(wanted)
            device = self._place(devices, own, leaves=tensor in course.outputs)
            if device is not None:
                found[name] = device
        return found

    def _place(self, devices: set[str | None], own: str | None, *, leaves: bool) -> str | None:
        """Return where a tensor can stay that is made on ``own`` and needed on ``devices``."""
        if len(devices) == 1 and (own in devices or own is None or leaves):
            return next(iter(devices))
        # What leaves the ensemble is copied by nobody.
        if leaves or own is None or not devices:
            return None
        near = all(d is not None and (d == own or self._reaches(own, d)) for d in devices)
        return own if near else None

    def _device(self, step: Step) -> str | None:
        try:
            return self._member(step).device
        except BridgeError:
            return None
