"""Client of the call channel: a model's calls of other models, and control requests to the server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, TritonError
from gpubridge.stub.bls.calls import Call, CallResponses, ControlRequest, Outcome
from gpubridge.stub.bls.execute_waits import ExecuteWaits
from gpubridge.stub.bls.outbox import Outbox
from gpubridge.stub.bls.reader import ChannelReader
from gpubridge.stub.bls.records import BlsRecords, CallResponse, error_code
from gpubridge.stub.bls.scope import BATCH
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.transport.calls import BLOCKS, CallKind
from gpubridge.transport.channel import (
    Channel,
    ChannelClosed,
    DescriptorsLost,
    MalformedMessage,
    close_all,
)
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import (
    LONGEST_CONTROL,
    ResponseFlag,
    control_message,
    decode_control,
)
from gpubridge.transport.wait_predictor import WaitPredictor

if TYPE_CHECKING:
    import asyncio

    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.placement import DevicePlacement

_FOREIGN = (
    "expected the process that the server has started, got a child that the model forked; {} in the "
    "model's own process"
)
_U32 = 0xFFFF_FFFF
_UNSENT = -1
"""Number of a call that has none yet."""
_CLOSED = "the server is gone, and answers no more"


class BlsClient:
    """Sends calls and receives their responses; owns the call channel, and each call until its outcome.

    - ``channel``: a non-blocking channel.
    - ``lent``: the lease bytes of memory that is lent to this stub.
    - ``outputs``: memory for inputs of calls that are not in shared memory already.
    - ``requests``: the wait predictor of requests; tells whether the model has one at a time.
    - ``awake_ns``: how long to poll for a response.

    ``on_given_up`` is called in the thread that reads, once the server has given up all requests;
    ``waits`` knows in which calls an ``execute`` is blocked.
    """

    def __init__(
        self,
        channel: Channel,
        lent: memoryview,
        outputs: OutputMemory,
        requests: WaitPredictor,
        awake_ns: int,
    ) -> None:
        self._channel = channel
        # Whoever waits for a call is reachable from it: asyncio holds no task that waits.
        self._calls: dict[int, Call] = {}
        self._records = BlsRecords(BorrowedMemory(lent), outputs)
        self._outbox = Outbox(channel, self._lose)
        self._reader = ChannelReader(
            channel, self._take, self._lose_memory, self._end_all, requests, awake_ns
        )
        self._reader.use(self._records.reader, self._outbox, self._calls, self._deliver)
        self._numbers = itertools.count(1)
        self._control_requests: dict[int, ControlRequest] = {}
        self._process = os.getpid()
        self.waits = ExecuteWaits()
        self.on_given_up: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the channel, end all calls, and drop compiled objects, whose references no collector sees."""
        self._reader.close()
        self._outbox.close()
        self._channel.close()
        self._end_all()
        self._records.drop_compiled()

    def disown(self) -> None:
        """Leave the calls of the parent alone: in a forked child.

        They are still held: nothing that waits for one ends here.
        """
        self._outbox.disown()
        self._reader.drop_compiled()
        self._channel.close()

    def use_device(self, device: StubDevice, placement: DevicePlacement) -> None:
        """Send and receive tensors in the memory of a GPU as well."""
        self._reader.drop_compiled()
        self._records.use_device(device, placement)

    # -- sending -----------------------------------------------------------------------------------

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Send a request to another model that is not decoupled, and wait for its response.

        Raises ChannelClosed when the server is gone.
        """
        call = Call(_UNSENT, list(request._inputs), False)
        try:
            self._send(call, request, None)
            if not call.ended:
                self.wait(call)
            response = call.take()
        except BaseException:
            if not call.ended:
                self.abandon(call)
            raise
        assert response is not None
        return response

    def call(
        self,
        request: InferenceRequest,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> CallResponses:
        """Send a request to another model: now, or with others of this turn of ``loop``.

        One with a timeout is sent now: the timeout counts from its arrival at the server.

        Raises ChannelClosed when the server is gone.
        """
        call = Call(_UNSENT, list(request._inputs), decoupled)
        responses = CallResponses(self, call)
        self._send(call, request, loop)
        return responses

    def _send(
        self, call: Call, request: InferenceRequest, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        number = next(self._numbers) & _U32
        while number in self._calls:
            # So many calls later, one is still open.
            number = next(self._numbers) & _U32
        call.number = number
        decoupled = call.credit is not None
        batch = BATCH.get()
        if batch and loop is None and not decoupled and self.waits.by_this_thread():
            batch |= BLOCKS
        try:
            send, record = self._records.send, None
            if loop is None and send is not None:
                record = send(self._outbox, self._calls, call, request, decoupled, batch)
            if record == b"":
                return
            if record is None:
                # Before memory for its inputs is allocated, which is announced to the server.
                _check_length(len(request._model_name))
                record = self._records.encode(number, request, decoupled)
            if len(record) > LONGEST_CONTROL:
                # The server does not parse long parameters.
                _check_length(len(record) - len(request._parameters.encode(errors="replace")))
        except ValueError as error:
            text = (
                "the request's correlation id, flags, timeout or parameters cannot be passed on: "
                f"{error}"
            )
            _refuse(call, request, text, TritonError.INVALID_ARG)
            return
        except ChannelClosed:
            raise
        except BridgeError as error:
            # There is no memory for its inputs.
            _refuse(call, request, error.message, error_code(error.code))
            return
        self._calls[number] = call
        self._outbox.add(call, record, batch, loop, bool(request._timeout))

    def tell(self, kind: int, /, **fields: Any) -> None:
        """Send a message with fields in JSON; takes no lock, so that finalizers may use it."""
        if os.getpid() == self._process:
            self._outbox.send(control_message(kind, **fields))

    def give_credit(self, call: Call) -> None:
        """Tell the server how many responses to a call it may send, when it is time."""
        responses = 0 if call.credit is None or call.ended else call.credit.take()
        if responses:
            self.tell(CallKind.TAKEN, call=call.number, responses=responses)

    def ask(self, about: str, fds: Sequence[int] = (), **fields: Any) -> ControlRequest:
        """Send a control request and wait for its answer; any thread may, at any time.

        Raises BridgeError: the server's error, or UNAVAILABLE if it is gone; INVALID_ARG for names and
        texts that are too long.
        """
        if os.getpid() != self._process:
            raise BridgeError(_FOREIGN.format("ask"))
        number = next(self._numbers)
        request = self._control_requests[number] = ControlRequest()
        try:
            message = control_message(CallKind.ASK, question=number, about=about, **fields)
            try:
                _check_length(len(message))
            except ValueError as error:
                raise BridgeError(str(error), ErrorCode.INVALID_ARG) from error
            self._outbox.flush()
            self._outbox.send(message, fds)
            self.wait(request)
        finally:
            self._control_requests.pop(number, None)
        request.check()
        return request

    def cancel(self, call: Call) -> None:
        """Ask the called model to stop; responses that it still sends are received."""
        if os.getpid() == self._process:
            self._outbox.flush()
            self.tell(CallKind.CANCEL, call=call.number, still_read=True)

    def abandon(self, call: Call) -> None:
        """Let go of a call: its model is cancelled, and its responses are discarded.

        Any thread may, at any time, finalizers too. In a forked child the parent's call goes on.
        """
        if os.getpid() != self._process or self._calls.pop(call.number, None) is None:
            return
        call.deliver(None, ended=True)
        self._outbox.drop(call)

    def _lose(self, call: Call, why: str) -> None:
        """End a call of which it is unknown whether it was sent; whoever waits for it gets the reason."""
        if self._calls.pop(call.number, None) is not None:
            call.fail(f"expected the answer of another model, got none: the call was {why}")
            call.sent = True
            self._outbox.drop(call)

    # -- receiving ---------------------------------------------------------------------------------

    def wait(self, outcome: Outcome) -> None:
        """Wait until a call or control request is ready."""
        compiled = self._reader.compiled
        if compiled is not None and compiled.wait(outcome):
            return
        if os.getpid() != self._process:
            raise ChannelClosed(_FOREIGN.format("take its responses"))
        if self._outbox.unsent:
            self._outbox.flush()
        if type(outcome) is Call and outcome.credit is not None and BATCH.get():
            with self.waits.during(outcome):
                self._reader.wait(outcome)
        else:
            self._reader.wait(outcome)

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from a running event loop whenever the channel is readable."""
        if os.getpid() != self._process:
            raise ChannelClosed(_FOREIGN.format("take its responses"))
        self.waits.runs(loop)
        self._reader.read_on(loop)

    def catch_up(self) -> None:
        """Handle messages that arrived while no thread waits, such as dropped regions."""
        self._reader.catch_up()

    def _take(self, message: bytes, fds: list[int]) -> None:
        kind = message[0]
        if kind == CallKind.CALL_RESPONSES:
            self._deliver_all(self._records.decode(message))
        elif kind in (CallKind.REGION, CallKind.DEVICE_REGION, CallKind.DROP_REGION):
            self._records.map(kind, decode_control(message), fds)
        elif kind == CallKind.ANSWER:
            fields = decode_control(message)
            request = self._control_requests.get(fields["question"])
            if request is None:
                close_all(fds)
            else:
                request.deliver(fields, fds)
        elif kind == CallKind.ARE_BLOCKING:
            calls = [self._calls.get(number) for number in decode_control(message)["calls"]]
            blocking = [call.number for call in calls if call and self.waits.are_in(call)]
            self.tell(CallKind.BLOCKING, calls=blocking)
        elif kind == CallKind.GIVEN_UP:
            if self.on_given_up is not None:
                self.on_given_up()
        else:
            raise MalformedMessage(f"message of unknown kind {kind} from the server")

    def _lose_memory(self, lost: DescriptorsLost) -> None:
        """Handle a message without its descriptors: of whom they were gets the reason, nobody else."""
        if lost.datagram[0] == CallKind.ANSWER:
            request = self._control_requests.get(decode_control(lost.datagram)["question"])
            if request is not None:
                request.fail(lost.message)
        elif lost.datagram[0] == CallKind.REGION:
            self._records.lose(decode_control(lost.datagram)["region"], lost)
        else:
            raise lost

    def _deliver_all(self, responses: Sequence[CallResponse]) -> None:
        """Deliver the responses of a message, all of them.

        A signal handler of the model may raise at any point, which ends what its own thread waits for.
        """
        if len(responses) == 1:
            self._deliver(responses[0])
            return
        left = iter(responses)
        raised: BaseException | None = None
        while True:
            try:
                for response in left:
                    self._deliver(response)
                break
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _deliver(self, taken: CallResponse) -> None:
        number, flags, response = taken
        ended = not flags & ResponseFlag.OPEN
        call = self._calls.pop(number, None) if ended else self._calls.get(number)
        if call is not None:
            if response is None and ended:
                # As in Triton, the last response may be empty.
                response = InferenceResponse([])
            call.deliver(response, ended)
            if not ended:
                self.give_credit(call)

    def _end_all(self) -> None:
        """End everything that waits: nothing comes any more."""
        calls = list(self._calls.values())
        self._calls.clear()
        for outcome in (*calls, *list(self._control_requests.values())):
            outcome.fail(_CLOSED)


def _check_length(nbytes: int) -> None:
    """Raise ValueError for names, ids and texts that are longer than the server accepts."""
    if nbytes > LONGEST_CONTROL:
        raise ValueError(
            f"expected at most {LONGEST_CONTROL} bytes of names and texts, got {nbytes}"
        )


def _refuse(call: Call, request: InferenceRequest, why: str, code: Any) -> None:
    """Complete a call that cannot be sent with an error."""
    text = f"Model {request._model_name} - Error when running inference: {why}"
    call.deliver(InferenceResponse([], TritonError(text, code)), ended=True)
