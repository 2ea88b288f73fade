"""Execution of one ensemble request by its members."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from gpubridge.engine.ensemble.execution_plan import (
    ExecutionPlan,
    ExecutionState,
    MemberCall,
    Progress,
)
from gpubridge.engine.ensemble.graph import ROOT, Step
from gpubridge.engine.ensemble.tensors import ClientOutputs, EdgeTensor, response_tensors
from gpubridge.engine.ensemble.times import RESPONSE, EnsembleTimes
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import UNTRACED, Caused
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.statistics import ModelStatistics

_clock = time.monotonic_ns


class ExecutedEnsemble(Protocol):
    """The ensemble of an execution, as the execution uses it.

    - ``members``: its models, by the index of their step.
    """

    members: Sequence[Model]
    times: EnsembleTimes
    statistics: ModelStatistics

    @property
    def name(self) -> str:
        """Its name."""

    def member_request(
        self,
        call: MemberCall[EdgeTensor],
        execution: Execution,
        on_done: Callable[[Outcome | None], None],
    ) -> InferRequest:
        """Make the request of a step; raises BridgeError if the member does not accept its inputs."""

    def response(self, execution: Execution, outputs: dict[str, EdgeTensor]) -> InferResponse:
        """Make a response with the outputs in the order of the configuration."""

    def answered(self, execution: Execution, now: int) -> None:
        """Count the durations of a request whose last response, of ``now``, was passed on."""

    def finished(self, execution: Execution, reason: str, now: int) -> None:
        """Count an execution that was completed at ``now``, CLOCK_MONOTONIC nanoseconds."""


class Execution:
    """Sends requests to the members, passes tensors between them, and responds to the client.

    The first error ends the execution and cancels all its running requests.

    - ``targets``: outputs that the client wants in its own memory.
    - ``member_ns``: sum of the durations of requests to members, in nanoseconds.
    - ``homes``: models for which the input memory is exclusive.
    - ``ended``: when each step responded last, and the request arrived.
    """

    __slots__ = (
        "_calls",
        "_due",
        "_ensemble",
        "_making",
        "_run",
        "ended",
        "homes",
        "member_ns",
        "plan",
        "request",
        "targets",
    )

    def __init__(
        self,
        ensemble: ExecutedEnsemble,
        plan: ExecutionPlan,
        request: InferRequest,
        targets: ClientOutputs | None,
    ) -> None:
        self.request = request
        self.targets = targets
        self.member_ns = 0
        self.homes: Collection[str] = ()
        self.ended = {ROOT: request.arrived}
        self._ensemble = ensemble
        self.plan = plan
        self._run: ExecutionState[EdgeTensor] | None = ExecutionState(plan)
        self._calls: dict[MemberCall[EdgeTensor], tuple[InferRequest, int]] = {}
        self._due: deque[Progress[EdgeTensor]] = deque()
        self._making = False

    def running(self) -> list[tuple[InferRequest, Model]]:
        """Return the requests that members have not answered, each with its member."""
        members = self._ensemble.members
        return [(made[0], members[call.step.index]) for call, made in self._calls.items()]

    # -- called for the client --------------------------------------------------------------------

    def begin(self, inputs: dict[str, EdgeTensor]) -> None:
        """Make the first calls."""
        self._guard(lambda: self._start(inputs))

    def _start(self, inputs: dict[str, EdgeTensor]) -> None:
        run = self._run
        assert run is not None
        self.request.cancelled = self._cancel
        self.request.instance = self
        # Input memory that is exclusive to the ensemble is exclusive to its members, too.
        given = (each.place.segment for each in inputs.values() if not each.shared)
        self.homes = {
            self._ensemble.name,
            *(segment.home for segment in given if isinstance(segment, Segment)),
        }
        self._apply(run.begin(inputs))

    def passed_on(self, _: InferRequest, responses: int) -> None:
        """Handle delivered responses, which lets members send further ones."""
        if self._run is not None:
            self._apply(self._run.passed_on(responses))

    def cancel(self, _: InferRequest, *how: object) -> None:  # noqa: ARG002
        """Cancel the execution, as an instance cancels a request; its end is still reported.

        ``how``: what an instance tells its stub; none of it matters to members.
        """
        if self._run is not None:
            self._close("CANCELED")
            self.request.finish(BridgeError("the request was cancelled", ErrorCode.CANCELLED))

    def _cancel(self, _: InferRequest) -> None:
        """Cancel the requests to members."""
        if self._run is not None:
            self._close("CANCELED")

    def fail(self, error: BridgeError) -> None:
        """End with an error; idempotent."""
        if self._run is None:
            return
        cancelled = error.code == ErrorCode.CANCELLED
        error = error.prefixed(f"in ensemble '{self._ensemble.name}', ")
        if not cancelled:
            self._ensemble.statistics.note_error(error, self.request.identifier)
        self._close("CANCELED" if cancelled else "OTHER")
        self.request.finish(error)

    # -- called for members -------------------------------------------------------------------------

    def _partial(self, call: MemberCall[EdgeTensor], model: Model, outcome: Outcome) -> None:
        """Handle a response of a member that is not the last."""
        self._guard(lambda: self._answered(call, model, outcome, last=False))

    def _done(self, call: MemberCall[EdgeTensor], model: Model, outcome: Outcome | None) -> None:
        """Handle the end of a member's request, with its last response if there is one."""
        made = self._calls.pop(call, None)
        if made is not None:
            spent = _clock() - made[1]
            self.member_ns += spent
            self._ensemble.times.done(call.step.index, spent)
            made[0].on_partial = None
        if outcome is not None:
            self._guard(lambda: self._answered(call, model, outcome, last=True))
        elif (run := self._run) is not None:
            self._guard(lambda: self._apply(run.ended(call)))

    def _guard(self, callback: Callable[[], None]) -> None:
        """Run a callback; an internal error fails this execution only."""
        try:
            callback()
        except Exception as error:  # noqa: BLE001
            self._making = False
            self.fail(request_error(error))

    def _answered(
        self, call: MemberCall[EdgeTensor], model: Model, outcome: Outcome, *, last: bool
    ) -> None:
        if self._run is None:
            return
        if not isinstance(outcome, InferResponse):
            self.fail(outcome)
            return
        self.ended[call.step.index] = _clock()
        outputs = response_tensors(outcome, model.config)
        self._apply(self._run.answered(call, outputs, last=last))

    # -- progress ------------------------------------------------------------------------

    def _apply(self, progress: Progress[EdgeTensor]) -> None:
        # Whoever is told of something may answer at once, and so re-enter this method.
        self._due.append(progress)
        if self._making:
            return
        self._making = True
        while self._due:
            self._proceed(self._due.popleft())
        self._making = False

    def _proceed(self, progress: Progress[EdgeTensor]) -> None:
        if progress.over:
            self._finish(progress.responses)
            return
        for outputs in progress.responses:
            if self._run is not None:
                self.request.respond(self._ensemble.response(self, outputs))
        for call in progress.calls:
            if self._run is not None:
                self._make(call)
        for call in progress.passed_on:
            made = self._calls.get(call)
            if made is not None:
                made[0].passed_on(1)

    def _make(self, call: MemberCall[EdgeTensor]) -> None:
        ensemble = self._ensemble
        model = ensemble.members[call.step.index]
        try:
            request = ensemble.member_request(call, self, partial(self._done, call, model))
        except BridgeError as error:
            self.fail(error)
            return
        # The request now keeps the memory alive.
        call.inputs.clear()
        if call.step.index in self.plan.wiring.fans_out:
            request.on_partial = partial(self._partial, call, model)
        now = _clock()
        self._ensemble.times.begun(call.step.index, self.ended, now)
        self._calls[call] = request, now
        parent = self.request.trace
        model.submit(request, UNTRACED if parent is None else Caused(parent.trace))

    def _finish(self, responses: list[dict[str, EdgeTensor]]) -> None:
        """Send the last responses and end the request."""
        answers = [self._ensemble.response(self, outputs) for outputs in responses]
        request = self.request
        now = self._close("")
        self._ensemble.times.begun(RESPONSE, self.ended, now)
        for answer in answers[:-1]:
            request.respond(answer)
        request.finish(answers[-1] if answers else None)
        self._ensemble.answered(self, now)

    def _close(self, reason: str) -> int:
        """Release everything; break reference cycles so that memory is freed now. Return when that was."""
        now = _clock()
        self._run = None
        self._due.clear()
        self.targets = None
        calls, self._calls = self._calls, {}
        for request, begun in calls.values():
            self.member_ns += now - begun
            request.on_partial = None
            request.cancel()
        self.request.cancelled = None
        self.request.instance = None
        self._ensemble.finished(self, reason, now)
        return now


class DeviceEdges:
    """Finds outputs of steps that can stay on a GPU.

    ``members``: the model of each step.
    """

    def __init__(self, members: Sequence[Model], reaches: Callable[[str, str], bool]) -> None:
        self._members = members
        self._reaches = reaches

    def of_step(self, step: Step, plan: ExecutionPlan, wanted: str | None) -> dict[str, str]:
        """Return the GPU by the output, for outputs that all consumers can read there.

        ``wanted``: the GPU on which the sender of the request can read outputs.
        """
        found = {}
        own = self._members[step.index].device
        consumers = plan.graph.consumers
        for name, tensor in step.outputs.items():
            takers = consumers.get(tensor, ())
            devices = {self._members[index].device for index in takers if index in plan.steps}
            if tensor in plan.outputs:
                devices.add(wanted)
            device = self._place(devices, own, leaves=tensor in plan.outputs)
            if device is not None:
                found[name] = device
        return found

    def _place(self, devices: set[str | None], own: str | None, *, leaves: bool) -> str | None:
        """Return the GPU for a tensor that is made on ``own`` and needed on ``devices``."""
        if len(devices) == 1 and (own in devices or own is None or leaves):
            return next(iter(devices))
        # Outputs of the ensemble are not copied between GPUs.
        if leaves or own is None or not devices:
            return None
        near = all(d is not None and (d == own or self._reaches(own, d)) for d in devices)
        return own if near else None
