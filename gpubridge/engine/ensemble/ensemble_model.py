"""An ensemble as a model, with the interface that endpoints use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubridge.config import ModelConfig
from gpubridge.engine.ensemble.execution import DeviceEdges, Execution
from gpubridge.engine.ensemble.execution_plan import ExecutionPlan, MemberCall, plan_execution
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
from gpubridge.engine.ensemble.tensors import (
    ClientOutputs,
    EdgeTensor,
    request_tensors,
)
from gpubridge.engine.ensemble.times import EnsembleTimes
from gpubridge.engine.memory.device_region import OF_CLIENTS
from gpubridge.engine.memory.placed_response import PlacedResponse
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import Origin
from gpubridge.engine.supervisor.context import EngineContext
from gpubridge.engine.supervisor.ready_check import ReadyCheck
from gpubridge.errors import BridgeError, invalid, unavailable, unsupported
from gpubridge.request import InferRequest, InferResponse, Outcome, merged_parameters
from gpubridge.telemetry.logs import request_error
from gpubridge.tensor.dtypes import item_size
from gpubridge.transport.signatures import Signature, SignatureCache, TensorSpec

if TYPE_CHECKING:
    from gpubridge.engine.repository.served_models import ServedModels

_logger = logging.getLogger(__name__)
_clock = time.monotonic_ns

_FORMS_KEPT = 512
_SHOWN = 128


class EnsembleModel(Model):
    """A version of an ensemble; has no process of its own, only running executions.

    Raises BridgeError: INVALID_ARG when the configuration has no valid graph.
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
        self._plans: dict[tuple[str, ...], ExecutionPlan] = {}
        self.times = EnsembleTimes(self._graph)
        self._devices = context.devices
        edges = DeviceEdges(self.member, context.devices.peers.reaches)
        self._requests = MemberRequests(edges)
        self._signatures = SignatureCache(_FORMS_KEPT)
        self._answers: dict[tuple[TensorSpec, ...], Signature] = {}
        self._running: set[Execution] = set()
        self.submit = self._submit
        self._stopping = False
        self._idle = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------

    async def load(self) -> None:
        """Check that the members are loaded and their tensors fit; raises BridgeError."""
        configs = [self._member_config(step) for step in self._graph.steps]
        self._wiring = wire(self._graph, self.config, configs)
        self._decoupled = self._wiring.decoupled
        self.config = self.config
        if not self._decoupled:
            self.submit = self._cached(self._submit)

    def _member_config(self, step: Step) -> ModelConfig:
        try:
            return self._members.find(step.model, step.version).config
        except BridgeError as error:
            text = explain_missing(self.name, step.model, step.version, self._members.index())
            raise invalid(text) from error

    async def unload(self, seconds: float | None) -> None:
        """Complete running executions, within ``seconds`` unless None; fail the rest.

        Until then further requests are accepted, as an enclosing ensemble may need them.
        """
        await self._looked_up()
        self._idle.clear()
        if seconds is not None:
            self.set_deadline(seconds)
        if self._running:
            await self._idle.wait()
        if self._running:
            _logger.warning("model '%s' still has %d requests", self.name, self.pending)
        self._stopping = True
        for execution in list(self._running):
            execution.fail(self._unloaded())

    def set_deadline(self, seconds: float) -> None:
        """Limit an unload in progress: executions still running after ``seconds`` fail."""
        asyncio.get_running_loop().call_later(seconds, self._idle.set)

    def _unloaded(self) -> BridgeError:
        return unavailable(
            f"Request for model '{self.name}' cannot be served: it is being unloaded"
        )

    @property
    def config(self) -> ModelConfig:
        """Return its configuration; its members decide whether it is decoupled."""
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
        """Return the checks of its members."""
        try:
            return [c for step in self._graph.steps for c in self.member(step).ready_checks()]
        except BridgeError:
            return []

    @property
    def pending(self) -> int:
        """Return the number of running executions."""
        return len(self._running)

    @property
    def executed_by(self) -> Collection[str]:
        """Return its loaded members, and theirs where they are ensembles."""
        names: set[str] = set()
        for step in self._graph.steps:
            try:
                names.update(self.member(step).executed_by)
            except BridgeError:
                continue
        return names

    # -- work ----------------------------------------------------------------------------------

    def _submit(self, request: InferRequest, origin: Origin | None = None) -> None:
        """Submit a request: frees its slot and calls its ``on_done``."""
        try:
            self._begin(request, origin)
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            slot, request.slot = request.slot, None
            request.ranges = request.client = None
            if slot is not None:
                self._arena.free(slot)
            self._refuse(request, request_error(error))

    def _begin(self, request: InferRequest, origin: Origin | None) -> None:
        self.begin(request, origin)
        request.arrived = _clock()
        self.statistics.copied(request.copied)
        signature = self._signatures[request.signature]
        shared = request.context.shared
        refusal = self._unloaded() if self._stopping else None
        targets = ClientOutputs.of(request)
        wanted = set() if targets is None else targets.names
        batched = self.config.max_batch_size > 0
        inputs = request_tensors(request, signature, self._arena, batched=batched, shared=shared)
        plan = self._plan(signature.requested)
        for name in plan.outputs:
            if name not in inputs:
                continue
            if isinstance(inputs[name].place.segment, OF_CLIENTS):
                refusal = self._refused_output(name, "in shared memory: it is there already")
            elif name in wanted:
                refusal = self._refused_output(name, "that no model could write to shared memory")
        if refusal is not None:
            self._refuse(request, refusal)
            return
        execution = Execution(self, plan, request, targets)
        self._running.add(execution)
        execution.begin(inputs)

    def _refuse(self, request: InferRequest, error: BridgeError) -> None:
        self.statistics.failed("REJECTED", 0)
        self.statistics.errors.add(error, request.identifier)
        request.finish(error)

    def _refused_output(self, name: str, why: str) -> BridgeError:
        return unsupported(
            f"output '{name}' of ensemble '{self.name}' is an input {why}, do not ask for it"
        )

    def _plan(self, requested: tuple[str, ...]) -> ExecutionPlan:
        plan = self._plans.get(requested)
        if plan is None:
            if len(self._plans) >= _FORMS_KEPT:
                self._plans.clear()
            plan = plan_execution(self._graph, self._wiring, requested)
            self._plans[requested] = plan
        return plan

    # -- called by executions -------------------------------------------------------------------

    def member(self, step: Step) -> Model:
        """Return the loaded model of a step; raises BridgeError if there is none."""
        return self._members.find(step.model, step.version)

    def member_request(
        self,
        call: MemberCall[EdgeTensor],
        member: Model,
        execution: Execution,
        on_done: Callable[[Outcome | None], None],
    ) -> InferRequest:
        """Make the request of a step; raises BridgeError if the member does not accept its inputs."""
        return self._requests.make(
            call.step,
            call.inputs,
            member.config,
            execution,
            on_done,
            devices=self._devices.equipped,
        )

    def response(self, execution: Execution, outputs: dict[str, EdgeTensor]) -> InferResponse:
        """Make a response with the outputs in the order of the configuration."""
        plan = execution.plan
        if execution.targets is not None:
            # The member wrote them to the client's memory.
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
        # One object per form, as encoders cache by it.
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
            shared=plan.shared.union(name for name, tensor in outputs.items() if tensor.shared),
        )

    def finished(self, execution: Execution, reason: str) -> None:
        """Count a completed execution."""
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

    def answered(self, request: InferRequest, now: int) -> None:
        """Count the durations of a request whose last response, of ``now``, was passed on."""
        spent = now - request.arrived
        answer = _clock() - now
        self.statistics.passed_on(request.identifier[:_SHOWN], now, spent, spent, answer)
