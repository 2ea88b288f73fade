"""One request of an ensemble on its way through the members."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from gpubridge.engine.ensemble.graph import Step
from gpubridge.engine.ensemble.run import Call, Course, EnsembleRun, Progress
from gpubridge.engine.ensemble.tensors import ClientOutputs, FlowTensor, response_tensors
from gpubridge.engine.model import Model
from gpubridge.engine.tracing import UNTRACED, Caused
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

if TYPE_CHECKING:
    from gpubridge.engine.ensemble.ensemble_model import EnsembleModel

_clock = time.monotonic_ns


class Execution:
    """Asks the members, hands tensors from one to the next, and answers the client.

    The first error ends it, and whatever is still under way is cancelled.

    - ``targets``: the outputs that the client wants in its own memory.
    - ``member_ns``: what its requests to members took, one by one, in nanoseconds.
    """

    __slots__ = (
        "_calls",
        "_due",
        "_ensemble",
        "_making",
        "_run",
        "course",
        "homes",
        "member_ns",
        "request",
        "targets",
    )

    def __init__(
        self,
        ensemble: EnsembleModel,
        course: Course,
        request: InferRequest,
        targets: ClientOutputs | None,
    ) -> None:
        self.request = request
        self.targets = targets
        self.member_ns = 0
        self.homes: Collection[str] = ()
        self._ensemble = ensemble
        self.course = course
        self._run: EnsembleRun[FlowTensor] | None = EnsembleRun(course)
        self._calls: dict[Call[FlowTensor], tuple[InferRequest, int]] = {}
        self._due: deque[Call[FlowTensor]] = deque()
        self._making = False

    # -- what the client does --------------------------------------------------------------------

    def begin(self, inputs: dict[str, FlowTensor]) -> None:
        """Make the first calls."""
        self._guard(lambda: self._start(inputs))

    def _start(self, inputs: dict[str, FlowTensor]) -> None:
        run = self._run
        assert run is not None
        self.request.cancelled = self._cancel
        self.request.instance = self
        # What the ensemble was given for itself alone, its members may have for themselves.
        given = (each.place.segment for each in inputs.values() if not each.shared)
        self.homes = {
            self._ensemble.name,
            *(segment.home for segment in given if isinstance(segment, Segment)),
        }
        self._apply(run.begin(inputs))

    def passed_on(self, _: InferRequest, responses: int) -> None:
        """Responses have left, so that others may come."""
        if self._run is not None:
            self._apply(self._run.passed_on(responses))

    def cancel(self, _: InferRequest) -> None:
        """Cancel the execution; its end is still reported."""
        if self._run is not None:
            self._close("CANCELED")
            self.request.finish(BridgeError("the request was cancelled", ErrorCode.CANCELLED))

    def _cancel(self, _: InferRequest) -> None:
        """Cancel the member's request."""
        if self._run is not None:
            self._close("CANCELED")

    def fail(self, error: BridgeError) -> None:
        """End with an error; idempotent."""
        if self._run is None:
            return
        self._close("CANCELED" if error.code == ErrorCode.CANCELLED else "OTHER")
        self.request.finish(error.behind(f"in ensemble '{self._ensemble.name}', "))

    # -- what members do -------------------------------------------------------------------------

    def _partial(self, call: Call[FlowTensor], model: Model, outcome: Outcome) -> None:
        """A member has answered, and may again."""
        self._guard(lambda: self._answered(call, model, outcome, last=False))

    def _done(self, call: Call[FlowTensor], model: Model, outcome: Outcome | None) -> None:
        """A member has answered for the last time, or says that it will not any more."""
        made = self._calls.pop(call, None)
        if made is not None:
            self.member_ns += _clock() - made[1]
            made[0].on_partial = None
        if outcome is not None:
            self._guard(lambda: self._answered(call, model, outcome, last=True))
        elif (run := self._run) is not None:
            self._guard(lambda: self._apply(run.ended(call)))

    def _guard(self, take: Callable[[], None]) -> None:
        """Take what a member has said; a bug of ours fails this request, not who tells of it."""
        try:
            take()
        except Exception as error:  # noqa: BLE001
            self._making = False
            self.fail(request_error(error))

    def _answered(
        self, call: Call[FlowTensor], model: Model, outcome: Outcome, *, last: bool
    ) -> None:
        if self._run is None:
            return
        if not isinstance(outcome, InferResponse):
            self.fail(outcome)
            return
        outputs = response_tensors(outcome, model.config)
        self._apply(self._run.answered(call, outputs, last=last))

    # -- what comes of it ------------------------------------------------------------------------

    def _apply(self, progress: Progress[FlowTensor]) -> None:
        if progress.over:
            self._finish(progress.responses)
            return
        for call in progress.passed_on:
            made = self._calls.get(call)
            if made is not None:
                made[0].passed_on(1)
        self._due.extend(progress.calls)
        for outputs in progress.responses:
            self.request.respond(self._ensemble.response(self, outputs))
        # A member may answer at once, and so lead back here.
        if self._making:
            return
        self._making = True
        while self._due:
            self._make(self._due.popleft())
        self._making = False

    def _make(self, call: Call[FlowTensor]) -> None:
        ensemble = self._ensemble
        try:
            model = ensemble.member(call.step)
            done = partial(self._done, call, model)
            request = ensemble.member_request(call, model, self, done)
        except BridgeError as error:
            self.fail(error)
            return
        # From here on the request holds the memory.
        call.inputs.clear()
        if call.step.index in self.course.wiring.fans_out:
            request.on_partial = partial(self._partial, call, model)
        self._calls[call] = request, _clock()
        parent = self.request.trace
        model.submit(request, UNTRACED if parent is None else Caused(parent.trace))

    def _finish(self, responses: list[dict[str, FlowTensor]]) -> None:
        """Give the client the last response, if there is one."""
        answers = [self._ensemble.response(self, outputs) for outputs in responses]
        request = self.request
        self._close("")
        for answer in answers[:-1]:
            request.respond(answer)
        request.finish(answers[-1] if answers else None)

    def _close(self, reason: str) -> None:
        """Let go of everything; circles of references would hold memory until the next collection."""
        self._run = None
        self._due.clear()
        self.targets = None
        calls, self._calls = self._calls, {}
        for request, begun in calls.values():
            self.member_ns += _clock() - begun
            request.on_partial = None
            request.cancel()
        self.request.cancelled = None
        self.request.instance = None
        self._ensemble.finished(self, reason)


class DeviceEdges:
    """Finds them for one course of an ensemble."""

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
