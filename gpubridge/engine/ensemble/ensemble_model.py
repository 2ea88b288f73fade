"""An ensemble as a model, with the interface that endpoints use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from gpubridge.config import ModelConfig
from gpubridge.engine.ensemble.execution import DeviceEdges, Execution
from gpubridge.engine.ensemble.execution_plan import ExecutionPlan, MemberCall, plan_execution
from gpubridge.engine.ensemble.graph import EnsembleGraph, fit_shape, wire
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
from gpubridge.errors import BridgeError, counted, unavailable, unsupported
from gpubridge.request import InferRequest, InferResponse, Outcome, merged_parameters
from gpubridge.telemetry.logs import request_error
from gpubridge.tensor.datatypes import item_size
from gpubridge.transport.signatures import Signature, SignatureCache, TensorSpec

_logger = logging.getLogger(__name__)
_clock = time.monotonic_ns

_FORMS_KEPT = 512
_SHOWN = 128


class EnsembleModel(Model):
    """A version of an ensemble; has no process of its own, only running executions.

    All its requests go to the same versions of its members, which are unloaded after it. When one of
    them is replaced, another `EnsembleModel` takes its place.

    ``members``: the model of each step.

    Raises BridgeError: INVALID_ARG when the tensors of the members do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        graph: EnsembleGraph,
        members: Sequence[Model],
        context: EngineContext,
    ) -> None:
        self._graph = graph
        self._wiring = wire(graph, config, [member.config for member in members])
        self._decoupled = self._wiring.decoupled
        super().__init__(config, version, context)
        self.members = tuple(members)
        self._arena = context.regions.arena(config.name)
        self._plans: dict[tuple[str, ...], ExecutionPlan] = {}
        self.times = EnsembleTimes(graph)
        self._devices = context.devices
        self._requests = MemberRequests(DeviceEdges(self.members, context.devices.peers.reaches))
        self._signatures = SignatureCache(_FORMS_KEPT)
        self._answers: dict[tuple[TensorSpec, ...], Signature] = {}
        self._running: set[Execution] = set()
        self.submit = self._submit if self._decoupled else self._cached(self._submit)
        self._stopping = False
        self._idle = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------

    async def unload(self, deadline: float | None) -> None:
        """Complete running executions, until ``deadline`` unless None; fail the rest.

        Requests that were on their way are accepted until then.
        """
        if deadline is not None:
            self.set_deadline(deadline)
        await self._looked_up()
        while self._running and not self._stopping:
            self._idle.clear()
            await self._idle.wait()
        if self._running:
            _logger.warning("model '%s' still has %s", self.name, counted(self.pending, "request"))
        self._stopping = True
        for execution in list(self._running):
            execution.fail(self._unloaded())

    def set_deadline(self, deadline: float) -> None:
        """Limit an unload in progress: executions that are running then fail."""
        asyncio.get_running_loop().call_at(deadline, self._give_up)

    def _give_up(self) -> None:
        self._stopping = True
        self._idle.set()

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
        return not self._stopping and all(member.ready for member in self.members)

    @property
    def whole(self) -> bool:
        """Return whether every instance of its members is ready."""
        return all(member.whole for member in self.members)

    def ready_checks(self) -> list[ReadyCheck]:
        """Return the checks of its members."""
        return [check for member in self.members for check in member.ready_checks()]

    @property
    def pending(self) -> int:
        """Return the number of running executions."""
        return len(self._running)

    @property
    def executed_by(self) -> Collection[str]:
        """Return its members, and theirs where they are ensembles."""
        return {name for member in self.members for name in member.executed_by}

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
        self.statistics.note_error(error, request.identifier)
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

    def member_request(
        self,
        call: MemberCall[EdgeTensor],
        execution: Execution,
        on_done: Callable[[Outcome | None], None],
    ) -> InferRequest:
        """Make the request of a step; raises BridgeError if the member does not accept its inputs."""
        return self._requests.make(
            call.step,
            call.inputs,
            self.members[call.step.index].config,
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

    def finished(self, execution: Execution, reason: str, now: int) -> None:
        """Count an execution that was completed at ``now``, CLOCK_MONOTONIC nanoseconds."""
        self._running.discard(execution)
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

    def answered(self, execution: Execution, now: int) -> None:
        """Count the durations of a request whose last response, of ``now``, was passed on."""
        request = execution.request
        spent, answer = now - request.arrived, _clock() - now
        identifier = request.identifier[:_SHOWN]
        self.statistics.passed_on(identifier, now, spent, execution.member_ns, answer)
