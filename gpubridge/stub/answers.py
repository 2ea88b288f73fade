"""Responses on their way out of the model: their tensors placed, their records encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Logger, Tensor
from gpubridge.stub.loader import model_error_text
from gpubridge.stub.output_check import OutputCheck
from gpubridge.stub.outputs import OutputMemory
from gpubridge.stub.passing_on import PassingOn, is_worthwhile
from gpubridge.stub.placement import Placement
from gpubridge.stub.states import SequenceStates
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record, record_encoder
from gpubridge.transport.signatures import encode_dims, encode_signature

_SIGNATURES = 4096
_NOTHING = encode_signature(())
_PLAIN = ResponseContext()


class ModelIdentity:
    """Model and instance that this process runs; ``note`` gets its exceptions instead of the log.

    ``warn``: gets the name of an output that is not as configured, and a sentence.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        note: Callable[[BaseException], None] | None,
        warn: Callable[[str, str], None],
    ) -> None:
        self._note = note
        self.check = OutputCheck(settings, warn)
        self.name: str = settings["name"]
        self.version: int = settings["version"]
        self.instance: str = settings["instance"]
        self.path: str = settings["path"]
        self.outputs: frozenset[str] = frozenset(settings["outputs"])
        self.decoupled: bool = settings["decoupled"]
        self.iterative: bool = settings["iterative"]

    def failure(self, error: BaseException) -> BridgeError:
        """Say what a model did wrong in Triton's words, also to the log."""
        text = str(error) if isinstance(error, ContractError) else model_error_text(error)
        message = f"Failed to process the request(s) for model '{self.instance}', message: {text}"
        if self._note is not None:
            self._note(error)
        else:
            Logger.log_error(message)
        return BridgeError(message)


class ContractError(Exception):
    """The model broke a rule of ``execute``; its text is the answer."""


def error_context(error: BridgeError) -> bytes:
    """Write an error as the context of a record."""
    return ResponseContext(error=error.message, code=int(error.code)).encoded()


class AnswerEncoder:
    """Makes records of responses; used by every thread that answers.

    ``placement`` has the places that clients or models choose, ``outputs`` takes the other tensors.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        outputs: OutputMemory,
        placement: Placement,
        states: SequenceStates | None,
        borrowed: BorrowedMemory,
        lent: memoryview,
    ) -> None:
        self._identity = identity
        self._lent = lent
        self._passing_on = PassingOn(outputs, borrowed)
        self._outputs = outputs
        self.placement = placement
        self._states = states
        self._encode_record = record_encoder()
        self._signatures: dict[Any, bytes] = {}

    def returned(self, record: Record, responses: list[Any], index: int) -> bytes:
        """Encode a response that ``execute`` returned, as `answer` does, and take it off the list.

        Memory of the request that only its response still looked at goes back with that, or stays
        where it is as an output.
        """
        response = responses[index]
        responses[index] = None
        if type(response) is bytes or not is_worthwhile(record) or not self._plain(record):
            return self.answer(record, response)
        try:
            tensors, signature, dims, context = self._form(record, response)
            passed = self._passing_on.place(record, tensors)
            if passed is not None:
                response = None
                del tensors
                fields, free = self._passing_on.settle(
                    *passed, record.context.outputs_for, self._lent
                )
                if free:
                    context = context.changed(passed_on=True)
                return self._encode_record(
                    record.ticket, signature, dims, fields, 0, context=context.encoded()
                )
        except Exception as error:
            response = self._error(error)
        return self.answer(record, response)

    def answer(self, record: Record, response: Any, flags: int = 0) -> bytes:
        """Encode a response, or the encoded context of an error; an error instead of it if need be."""
        loss = self.placement.clients.loss(record)
        if loss is not None:
            response = error_context(loss)
        if type(response) is not bytes:
            try:
                return self._response(record, response, flags)
            except Exception as error:
                response = self._error(error)
        return self._encode_record(
            record.ticket, _NOTHING, b"", (), ResponseFlag.ERROR | flags, context=response
        )

    def nothing(self, ticket: int, flags: int) -> bytes:
        """Encode a record that holds no response."""
        return self._encode_record(ticket, _NOTHING, b"", (), flags)

    def _error(self, error: Exception) -> bytes:
        known = error if isinstance(error, BridgeError) else self._identity.failure(error)
        return error_context(known)

    def _response(self, record: Record, response: InferenceResponse, flags: int) -> bytes:
        tensors, signature, dims, context = self._form(record, response)
        if self._plain(record):
            refs = self._outputs.place(
                [tensor._payload() for tensor in tensors], record.context.outputs_for
            )
        else:
            refs, event = self.placement.place(record, tensors)
            if event is not None:
                context = context.changed(event=event[0], event_lease=event[1])
        return self._encode_record(
            record.ticket, signature, dims, refs, flags, context=context.encoded()
        )

    def _plain(self, record: Record) -> bool:
        """Say whether outputs simply go to the output memory."""
        return (
            record.context.client is None
            and not self._outputs.shown
            and not self.placement.on_device
        )

    def _form(
        self, record: Record, response: InferenceResponse
    ) -> tuple[Sequence[Tensor], bytes, bytes, ResponseContext]:
        """Return the wanted tensors, signature, dims and context; raises an error response."""
        error = response._error
        if error is not None:
            raise BridgeError(error.message(), ErrorCode(int(error.code())))
        tensors: Sequence[Tensor] = response._tensors
        if self._states is not None:
            self._states.keep(record.context, tensors)
        # Outputs that nobody asked for, or that the configuration does not know, are dropped.
        wanted = record.signature.wanted or self._identity.outputs
        check = self._identity.check
        returned = tensors
        tensors = [tensor for tensor in returned if tensor._name in wanted]
        if len(tensors) != len(returned):
            for tensor in returned:
                if tensor._name not in wanted:
                    check.dropped(tensor._name)
        key = tuple([(tensor._name, tensor._datatype, len(tensor._shape)) for tensor in tensors])
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _SIGNATURES:
                self._signatures.clear()
            signature = self._signatures[key] = check.encode(key, wanted)
        parameters = response._parameters
        context = _PLAIN if parameters == "{}" else ResponseContext(parameters=parameters)
        dims = encode_dims([tensor._shape for tensor in tensors])
        return tensors, signature, dims, context
