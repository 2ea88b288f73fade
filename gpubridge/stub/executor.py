"""Runs batches: builds requests over borrowed memory, calls ``execute``, places the answers."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor
from gpubridge.pb_utils.request_fields import InferenceTrace
from gpubridge.stub.answers import AnswerEncoder, ContractError, ModelIdentity, error_context
from gpubridge.stub.client_memory import ClientMemory
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.outputs import OutputMemory
from gpubridge.stub.placement import Placement
from gpubridge.stub.response_lines import DecoupledOrigin, RequestOrigin, ResponseDesk
from gpubridge.stub.results import ResultSender
from gpubridge.stub.shared_inputs import SharedInputs
from gpubridge.stub.states import SequenceStates
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.tensor.native import NativeStubLoop
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.messages import Batch, ResponseFlag, encode_result_batch
from gpubridge.transport.records import Record, record_reader

if TYPE_CHECKING:
    from gpubridge.stub.coroutines import Coroutines
    from gpubridge.stub.device.inputs import DeviceInputs
    from gpubridge.stub.device.placement import DevicePlacement


class Executor:
    """Turns a batch that came into the result that goes back.

    - ``shared_inputs``: what the model is shown of inputs that others look at, too.
    - ``plain``: whether a batch of requests that say no more than where their inputs lie is nothing
      but tensors for the model, and responses of it: what the compiled loop executes by itself.
    - ``ended_at``: CLOCK_MONOTONIC nanoseconds at which the last ``execute`` ended.
    """

    def __init__(  # noqa: PLR0913  (it joins what a stub consists of)
        self,
        model: Any,
        identity: ModelIdentity,
        outputs: OutputMemory,
        control: ControlPage,
        results: ResultSender,
        clients: ClientMemory,
        states: SequenceStates | None,
        fall_back: Callable[[str, str], None],
        inputs: DeviceInputs | None,
        placement: DevicePlacement | None,
    ) -> None:
        self.execute = model.execute
        self.identity = identity
        self._borrowed = borrowed = clients.borrowed
        self._outputs = outputs
        self._control = control
        self._clients = clients
        self._states = states
        self._answers = AnswerEncoder(
            identity,
            outputs,
            Placement(outputs, clients, placement),
            states,
            borrowed,
            control.lent,
        )
        self._desk = ResponseDesk(control, outputs, results, self._answers, identity)
        self._origin = DecoupledOrigin if identity.decoupled else RequestOrigin
        self._device_inputs = inputs
        self._fall_back = fall_back
        self._coroutines: Coroutines | None = None
        self._first_coroutine = threading.Lock()
        self._keeps = False
        self._private_bytes = 0
        self.book = borrowed.book
        self._reader = record_reader(RequestContext)
        self.shared_inputs = SharedInputs(borrowed, clients.sharing, identity, fall_back)
        self._crowded = False
        self._handed_on = True
        self.ended_at = 0
        self.plain = states is None and inputs is None and not identity.iterative

    def run(self, batch: Batch) -> bytes:
        """Execute one batch; returns its encoded result. Never raises for what the model does."""
        cancelled = self._control.cancelled
        live = waiting = [record for record in batch.records if not cancelled[record.ticket]]
        self._private_bytes = 0
        book = self.book
        self._crowded = book.held > LIMITS.kept_leases or book.held_bytes > LIMITS.kept_bytes
        # A request may come back: with the inputs it had, whatever the model did to them.
        self._handed_on = not (self._crowded or self.identity.iterative)
        started = self._control.start(batch.sequence)
        answers: list[bytes] = []
        clients = self._clients
        if clients.used:
            live = self._admitted(waiting, answers)
        origins = [self._origin(self._desk, record) for record in live]
        called = started
        requests: list[InferenceRequest] = []
        try:
            requests = [self._request(origin) for origin in origins]
            called = time.monotonic_ns()
            responses = self._call(requests, origins) if live else []
            # The frame of this call would hold the requests, and so their memory.
            requests = []
            if self.shared_inputs.watched:
                self.shared_inputs.learn()
        except BaseException as error:
            requests = []
            responses = self.refusals(error, origins)
        self.ended_at = time.monotonic_ns()
        answers += [self.answered(origin, responses, i) for i, origin in enumerate(origins)]
        if len(waiting) != len(batch.records):
            answers += self._skip(batch.records, waiting)
        copied = self.take_copied() + self._private_bytes
        return encode_result_batch(
            batch.sequence, (started, called, self.ended_at), copied, answers
        )

    def arrived(self, message: bytes, at: int) -> RequestOrigin:
        """Make the origin of the request whose record begins there in an EXECUTE message."""
        (record,), _ = self._reader.read(message, at, 1, True)
        return self._origin(self._desk, record)

    def controls(self, told: str) -> list[Tensor]:
        """Make the control inputs that the JSON of a context says."""
        return [_control(*control) for control in json.loads(told)]

    def use(self, loop: NativeStubLoop) -> None:
        """Let the compiled loop send the responses that a model sends by itself."""
        if self.plain:
            self._desk.loop = loop

    def answered(self, origin: RequestOrigin, responses: list[Any], index: int) -> bytes:
        """Encode the answer of a request, and take it off the list."""
        record = origin.record
        if responses[index] is None:
            flags = _COMES_BACK if origin.comes_back() else _GOES_ON
            return self._answers.nothing(record.ticket, flags)
        if record.context.shared:
            self.shared_inputs.note_response(responses[index])
        answer = self._answers.returned(record, responses, index)
        # The ticket will be another request's; the model may have kept this one.
        origin.over = self._control.cancelled[record.ticket] != 0
        if self._clients.used:
            self._clients.note_kept(record)
        return answer

    def take_copied(self) -> int:
        """Return how many bytes were copied for requests and answers since this was asked last."""
        copied = self._outputs.take_copied() + self.shared_inputs.take_copied()
        return copied + self._clients.take_copied() if self._clients.used else copied

    def refusals(self, error: BaseException, origins: Sequence[RequestOrigin]) -> list[Any]:
        """Return what ended a batch as the answer of each request that has none."""
        ours = error if isinstance(error, BridgeError) else self.identity.failure(error)
        refusal = error_context(ours)
        if self._clients.used:
            self._clients.note_error(error)
        self.shared_inputs.note_error(error)
        # The frames of a traceback hold the requests, and so their memory.
        error.__traceback__ = None
        return [self._close_sender(origin, refusal) for origin in origins]

    @staticmethod
    def start_thread(run: Callable[[], None]) -> None:
        """Start the thread that sends results which wait for a slow batch."""
        threading.Thread(target=run, name="gpubridge-results", daemon=True).start()

    def close(self) -> None:
        """Stop the loop that coroutines ran on, if there is one."""
        if self._coroutines is not None:
            self._coroutines.close()

    def _request(self, origin: RequestOrigin) -> InferenceRequest:
        record = origin.record
        signature = record.signature
        context: RequestContext = record.context
        device = self._device_inputs
        inputs = None if device is None else device.taken(record.ticket)
        if inputs is None:
            if not self._handed_on:
                inputs = self._copied_inputs(record)
            elif context.shared:
                inputs = self.shared_inputs.tensors(record)
            else:
                inputs = self._borrowed.tensors(
                    record.refs, signature.tensors, record.shapes, Tensor
                )
            if device is not None:
                inputs = device.placed(inputs, record, private=self.identity.iterative)
        if context.client is not None:
            self._clients.protect(inputs, context.client)
        if context.controls is not None:
            inputs += [_control(*control) for control in context.controls]
        if self._states is not None:
            inputs += self._states.inputs(context.state)
        return InferenceRequest._received(
            inputs,
            record.identifier,
            context.correlation,
            signature.wanted or self.identity.outputs,
            context.flags,
            context.timeout,
            context.parameters or "{}",
            self.identity.name,
            self.identity.version,
            origin,
            InferenceTrace._of(context.trace) if context.trace else _NO_TRACE,
        )

    def _admitted(self, records: Sequence[Record], answers: list[bytes]) -> list[Record]:
        """Return the requests whose clients' memory is as it should be; answer the others."""
        admitted = []
        for record in records:
            error = self._clients.refusal(record)
            if error is None:
                admitted.append(record)
            else:
                self._let_go(record.ticket)
                answers.append(self._answers.answer(record, error_context(error)))
        return admitted

    def _copied_inputs(self, record: Record) -> list[Tensor]:
        """Return inputs whose memory need not be lent, those on a device excepted."""
        if self._crowded and not self._keeps:
            self._keeps = True
            self._fall_back(
                "inputs_kept",
                f"model '{self.identity.instance}' keeps more than {LIMITS.kept_leases} inputs or "
                f"{LIMITS.kept_bytes} bytes of them, so that the server would run out of memory to lend: "
                "it gets copies from now on while it does",
            )
        tensors = self._borrowed.tensors(
            record.refs, record.signature.tensors, record.shapes, Tensor, False
        )
        device = self._device_inputs
        for tensor, ref in zip(tensors, record.refs):
            if device is None or not device.has(ref[0]):
                self._private_bytes += ref[2]
                tensor._source = memoryview(bytearray(tensor._source))
        return tensors

    def _call(
        self, requests: list[InferenceRequest], origins: Sequence[RequestOrigin]
    ) -> list[Any]:
        """Call the model and check the form of what it returns."""
        return self.finished(self.execute(requests), origins)

    def finished(self, responses: Any, origins: Sequence[RequestOrigin]) -> list[Any]:
        """Wait for what ``execute`` returned, if a coroutine; ContractError for a wrong form.

        A response is None where the model sends by itself.
        """
        if type(responses) is not list and inspect.iscoroutine(responses):
            # Whether a request comes back is known when the coroutine has ended.
            if self.identity.decoupled and not self.identity.iterative:
                self._start(responses, list(origins))
                return [None] * len(origins)
            responses = self.run_coroutine(responses)
        return self._checked(responses, origins)

    def _checked(self, responses: Any, origins: Sequence[RequestOrigin]) -> list[Any]:
        """Check the form of what ``execute`` returned."""
        count = len(origins)
        if self.identity.decoupled:
            if responses is not None:
                raise ContractError(
                    f"Python model '{self.identity.instance}' is using the decoupled mode and the "
                    "execute function must return None."
                )
            return [None] * count
        if not isinstance(responses, list):
            error = ContractError(
                f"Expected a list in the execute return, found type '{type(responses)}'."
            )
            left = [origin for origin in origins if origin.sender is None]
            if responses is not None or len(left) == count:
                raise error
            # The others answer through their senders, now or later.
            refused = self.refusals(error, left) if left else []
            return [refused.pop() if each.sender is None else None for each in origins]
        if len(responses) != count:
            raise ContractError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{count}, and InferenceResponse(s) size "
                f"is:{len(responses)}\n"
            )
        for response, origin in zip(responses, origins):
            if origin.rescheduled:
                if response is not None:
                    raise ContractError(
                        "Expected a None object in the execute function return list for reschduled "
                        f"request, found type '{type(response)}'."
                    )
            elif not isinstance(response, InferenceResponse) and (
                response is not None or origin.sender is None
            ):
                raise ContractError(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        # Where the sender has sent something, that is the answer.
        return [
            response
            if response is not None and (origin.sender is None or origin.take_back())
            else None
            for response, origin in zip(responses, origins)
        ]

    def _start(self, coroutine: Coroutine[Any, Any, Any], origins: list[RequestOrigin]) -> None:
        """Let a coroutine of a decoupled model run on its own; others may run beside it."""

        def done(result: Any, error: BaseException | None) -> None:
            if error is None and result is not None:
                error = ContractError(
                    f"Python model '{self.identity.instance}' is using the decoupled mode and the "
                    "execute function must return None."
                )
            if error is not None:
                failure = self.identity.failure(error)
                for origin in origins:
                    origin.fail(failure)
            # Senders that nobody holds any more end their requests.
            origins.clear()

        self._model_coroutines().start(coroutine, done)

    @staticmethod
    def _close_sender(origin: RequestOrigin, refusal: bytes) -> bytes | None:
        """Take a request back from a model that failed; None when that had answered it."""
        return refusal if origin.close() else None

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop that this model's coroutines share, and wait for it."""
        return self._model_coroutines().run(coroutine)

    def _model_coroutines(self) -> Coroutines:
        with self._first_coroutine:
            if self._coroutines is None:
                # asyncio takes 4 MiB and 30 ms, and few models have coroutines.
                from gpubridge.stub.coroutines import Coroutines  # noqa: PLC0415

                self._coroutines = Coroutines()
            return self._coroutines

    def _skip(self, records: Sequence[Record], live: Sequence[Record]) -> list[bytes]:
        """Answer for the requests that nobody waits for any more; their memory goes back."""
        run = {record.ticket for record in live}
        skipped = [record.ticket for record in records if record.ticket not in run]
        for ticket in skipped:
            self._let_go(ticket)
        return [self._answers.nothing(ticket, ResponseFlag.CANCELLED) for ticket in skipped]

    def _let_go(self, ticket: int) -> None:
        """Give back the memory of a request that no model has seen."""
        self._control.lent[ticket] = 0


def _control(name: str, datatype: str, shape: Sequence[int], value: Any) -> Tensor:
    """Make the input by which the scheduler tells the model where in its sequence a request is."""
    value = value.encode() if isinstance(value, str) else value
    return Tensor(name, np.full(shape, value, numpy_dtype(datatype)))


_GOES_ON = ResponseFlag.OPEN | ResponseFlag.EMPTY
_COMES_BACK = ResponseFlag.RESCHEDULED | ResponseFlag.EMPTY
_NO_TRACE = InferenceTrace()
