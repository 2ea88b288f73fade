"""An ensemble as a model: the interface that endpoints use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubridge.config import ModelConfig
from gpubridge.engine.context import EngineContext
from gpubridge.engine.devices.region import OF_CLIENTS
from gpubridge.engine.ensemble.execution import DeviceEdges, Execution
from gpubridge.engine.ensemble.graph import (
    ROOT,
    Step,
    Wiring,
    draw_graph,
    explain_missing,
    fit_shape,
    wire,
)
from gpubridge.engine.ensemble.member_requests import MemberRequests
from gpubridge.engine.ensemble.run import Call, Course, plan_course
from gpubridge.engine.ensemble.tensors import (
    ClientOutputs,
    FlowTensor,
    request_tensors,
)
from gpubridge.engine.model import Model
from gpubridge.engine.placed_response import PlacedResponse
from gpubridge.engine.ready_check import ReadyCheck
from gpubridge.engine.tracing import Origin
from gpubridge.errors import BridgeError, invalid, unavailable, unsupported
from gpubridge.request import InferRequest, InferResponse, Outcome, merged_parameters
from gpubridge.telemetry.logs import request_error
from gpubridge.tensor.dtypes import item_size
from gpubridge.transport.signatures import Signature, SignatureCache, TensorSpec

if TYPE_CHECKING:
    from gpubridge.engine.served_models import ServedModels

_logger = logging.getLogger(__name__)
_clock = time.monotonic_ns

_FORMS_KEPT = 512


class EnsembleModel(Model):
    """A version of an ensemble; has no process of its own, only requests under way.

    Raises BridgeError: INVALID_ARG when the configuration draws no graph.
    """

    def __init__(
        self, config: ModelConfig, version: int, members: ServedModels, context: EngineContext
    ) -> None:
        self._decoupled = False
        super().__init__(config, version, context)
        self._members = members
        self._arena = context.regions.arena(config.name)
        self._graph = draw_graph(config)
        self._wiring = Wiring(frozenset(), (), ROOT)
        self._courses: dict[tuple[str, ...], Course] = {}
        self._devices = context.devices
        edges = DeviceEdges(self.member, context.devices.peers.reaches)
        self._requests = MemberRequests(edges)
        self._signatures = SignatureCache(_FORMS_KEPT)
        self._answers: dict[tuple[TensorSpec, ...], Signature] = {}
        self._running: set[Execution] = set()
        self._stopping = False
        self._idle = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------

    async def load(self) -> None:
        """Check that the members are there and fit together; raises BridgeError."""
        configs = [self._member_config(step) for step in self._graph.steps]
        self._wiring = wire(self._graph, self.config, configs)
        self._decoupled = self._wiring.decoupled
        self.config = self.config

    def _member_config(self, step: Step) -> ModelConfig:
        try:
            return self._members.find(step.model, step.version).config
        except BridgeError as error:
            text = explain_missing(self.name, step.model, step.version, self._members.index())
            raise invalid(text) from error

    async def unload(self, seconds: float | None) -> None:
        """Answer what is under way, within ``seconds`` if that is said; the rest fails then.

        Until the last answer further requests are taken: an ensemble around this one may need them.
        """
        self._idle.clear()
        if seconds is not None:
            self.hurry(seconds)
        if self._running:
            await self._idle.wait()
        if self._running:
            _logger.warning("model '%s' still has %d requests", self.name, self.pending)
        self._stopping = True
        for execution in list(self._running):
            execution.fail(self._unloaded())

    def hurry(self, seconds: float) -> None:
        """Bound an unload that goes on: what is not answered within ``seconds`` will not be."""
        asyncio.get_running_loop().call_later(seconds, self._idle.set)

    def _unloaded(self) -> BridgeError:
        return unavailable(
            f"Request for model '{self.name}' cannot be served: it is being unloaded"
        )

    @property
    def config(self) -> ModelConfig:
        """Its configuration; whether it is decoupled, its members alone decide."""
        return self._config

    @config.setter
    def config(self, config: ModelConfig) -> None:
        message = type(config.message)()
        message.CopyFrom(config.message)
        message.model_transaction_policy.decoupled = self._decoupled
        self._config = replace(config, decoupled=self._decoupled, message=message)

    # -- state ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether every member is ready."""
        if self._stopping:
            return False
        try:
            return all(self.member(step).ready for step in self._graph.steps)
        except BridgeError:
            return False

    def ready_checks(self) -> list[ReadyCheck]:
        """Return whom to ask, besides: its members."""
        try:
            return [c for step in self._graph.steps for c in self.member(step).ready_checks()]
        except BridgeError:
            return []

    @property
    def pending(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def executed_by(self) -> Collection[str]:
        """Its members, and where they are ensembles theirs; those that are loaded."""
        names: set[str] = set()
        for step in self._graph.steps:
            try:
                names.update(self.member(step).executed_by)
            except BridgeError:
                continue
        return names

    # -- work ----------------------------------------------------------------------------------

    def submit(self, request: InferRequest, origin: Origin | None = None) -> None:
        """Take a request over: its slot is freed here, its outcome comes by ``on_done``."""
        try:
            self._begin(request, origin)
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            slot, request.slot = request.slot, None
            request.ranges = request.client = None
            if slot is not None:
                self._arena.free(slot)
            self._refuse(request, request_error(error))

    def _begin(self, request: InferRequest, origin: Origin | None) -> None:
        if self.traces.active:
            self.tracing.begin(request, origin)
        self._measured(request)
        request.arrived = _clock()
        self.statistics.copied(request.copied)
        signature = self._signatures[request.signature]
        shared = request.context.shared
        refusal = self._unloaded() if self._stopping else None
        targets = ClientOutputs.of(request)
        wanted = set() if targets is None else targets.names
        batched = self.config.max_batch_size > 0
        inputs = request_tensors(request, signature, self._arena, batched=batched, shared=shared)
        course = self._course(signature.requested)
        for name in course.outputs:
            if name not in inputs:
                continue
            if isinstance(inputs[name].place.segment, OF_CLIENTS):
                refusal = self._refused_output(name, "in shared memory: it is there already")
            elif name in wanted:
                refusal = self._refused_output(name, "that no model could write to shared memory")
        if refusal is not None:
            self._refuse(request, refusal)
            return
        execution = Execution(self, course, request, targets)
        self._running.add(execution)
        execution.begin(inputs)

    def _refuse(self, request: InferRequest, error: BridgeError) -> None:
        self.statistics.failed("REJECTED", 0)
        request.finish(error)

    def _refused_output(self, name: str, why: str) -> BridgeError:
        return unsupported(
            f"output '{name}' of ensemble '{self.name}' is an input {why}, do not ask for it"
        )

    def _course(self, requested: tuple[str, ...]) -> Course:
        course = self._courses.get(requested)
        if course is None:
            if len(self._courses) >= _FORMS_KEPT:
                self._courses.clear()
            course = plan_course(self._graph, self._wiring, requested)
            self._courses[requested] = course
        return course

    # -- what executions ask -------------------------------------------------------------------

    def member(self, step: Step) -> Model:
        """Return the model of a step, as it is loaded now; raises BridgeError if it is not."""
        return self._members.find(step.model, step.version)

    def member_request(
        self,
        call: Call[FlowTensor],
        member: Model,
        execution: Execution,
        on_done: Callable[[Outcome | None], None],
    ) -> InferRequest:
        """Make the request of a step; raises BridgeError if its inputs are not what it wants."""
        return self._requests.make(
            call.step,
            call.inputs,
            member.config,
            execution,
            on_done,
            devices=self._devices.used,
        )

    def response(self, execution: Execution, outputs: dict[str, FlowTensor]) -> InferResponse:
        """Make a response: the outputs in the order of the configuration."""
        course = execution.course
        if execution.targets is not None:
            # They are where the client wants them.
            for name in outputs.keys() & execution.targets.out.keys():
                outputs[name] = outputs[name].elsewhere()
        batched = self.config.max_batch_size > 0
        specs = []
        shapes = []
        for output in self.config.outputs:
            tensor = outputs.get(output.name)
            if tensor is not None:
                dims = output.dims if output.reshape is None else output.reshape
                shape = fit_shape(tensor.shape, dims, made_batched=tensor.batched, batched=batched)
                shapes.append(shape)
                itemsize = item_size(tensor.datatype)
                specs.append(TensorSpec(output.name, tensor.datatype, len(shape), itemsize))
        key = tuple(specs)
        # The same object for the same form: encoders remember it.
        signature = self._answers.get(key)
        if signature is None:
            if len(self._answers) >= _FORMS_KEPT:
                self._answers.clear()
            signature = self._answers[key] = Signature(key, ())
        tensors = [outputs[spec.name] for spec in specs]
        return PlacedResponse(
            signature,
            tuple(shapes),
            [tensor.bytes_held() for tensor in tensors],
            merged_parameters(tensor.parameters for tensor in tensors),
            parts=[tensor.place for tensor in tensors],
            shared=course.shared.union(name for name, tensor in outputs.items() if tensor.shared),
        )

    def finished(self, execution: Execution, reason: str) -> None:
        """Count a request that is over."""
        self._running.discard(execution)
        now = _clock()
        request = execution.request
        spent = now - request.arrived
        if reason:
            self.statistics.failed(reason, spent)
            if request.trace is not None and request.on_done is None:
                request.trace.abandoned()
        else:
            if request.trace is not None:
                request.trace.completed(None)
            self.statistics.executed(
                1, request.batch_size, (1, spent, 0), (0, execution.member_ns, 0)
            )
            self.statistics.last_ended_ns = now
            self.statistics.observe(now, spent, 0, (0, execution.member_ns, 0))
        if not self._running:
            self._idle.set()
