"""Encodes a model's responses: places their tensors and writes their records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Logger, Tensor
from gpubridge.stub.error_text import model_error_text
from gpubridge.stub.memory.output_aliasing import OutputAliasing, is_worthwhile
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.stub.memory.placement import Placement
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record, record_encoder
from gpubridge.transport.signatures import encode_dims, encode_signature
from gpubridge.transport.stub_settings import StubSettings

_SIGNATURES = 4096
_NOTHING = encode_signature(())
_PLAIN = ResponseContext()
_MOST_WARNINGS = 256
_OF_CONFIG = {entry.config_name: entry.name for entry in DATATYPES.values()}


class OutputCheck:
    """Compares the first response of each form with the configuration; warns once for each output.

    Triton accepts such outputs silently. ``warn`` gets the output's name and a message for the log.
    """

    def __init__(self, settings: StubSettings, warn: Callable[[str, str], None]) -> None:
        config = json.loads(settings.arguments["model_config"])
        batched = int(config.get("max_batch_size", 0) > 0)
        self._warn = warn
        self._decoupled = settings.model.decoupled
        # Responses for OpenAI's API have some of the convention's outputs.
        self._partial = "OPENAI" in config.get("parameters", {})
        self._names = frozenset(settings.model.outputs)
        self._states = {state.output_name for state in settings.model.states}
        # Datatype and rank.
        self._forms: dict[str, tuple[str, int]] = {}
        for output in config.get("output", ()):
            dims = output["reshape"].get("shape", ()) if output.get("reshape") else output["dims"]
            datatype = _OF_CONFIG.get(output["data_type"], "")
            self._forms[output["name"]] = datatype, len(dims) + batched
        self._warned: set[str] = set()

    def encode(
        self, described: Sequence[tuple[str, str, int]], wanted: Collection[str] | None
    ) -> bytes:
        """Return the signature of tensors (name, datatype, rank), the first ones of their form.

        ``wanted``: the outputs that the request asks for; None for an empty response.
        """
        for name, datatype, rank in described:
            expected = self._forms.get(name, (datatype, rank))
            if expected != (datatype, rank):
                self._tell(
                    name,
                    f"output '{name}' of a response is {datatype} with {rank} dimensions, the "
                    f"configuration says {expected[0]} with {expected[1]}",
                )
        if wanted is not None and not self._partial and (described or not self._decoupled):
            returned = [name for name, *_ in described]
            for name in self._names.intersection(wanted).difference(returned):
                self._tell(
                    name,
                    f"a response has no output '{name}', which the configuration has; it has "
                    f"{_listed(returned)}",
                )
        return encode_signature(described)

    def dropped(self, name: str) -> None:
        """Check the name of an output that is not sent."""
        if name not in self._names and name not in self._states:
            self._tell(
                name,
                f"a response has an output '{name}', which is not sent: the configuration has "
                f"{_listed(sorted(self._names))}",
            )

    def _tell(self, name: str, text: str) -> None:
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            self._warn(name, text)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


class ModelIdentity:
    """Model and instance that this process runs.

    - ``note``: gets the model's exceptions instead of the log.
    - ``warn``: gets the name of an output that is not as configured, and a message.
    """

    def __init__(
        self,
        settings: StubSettings,
        note: Callable[[BaseException], None] | None,
        warn: Callable[[str, str], None],
    ) -> None:
        self._note = note
        self.check = OutputCheck(settings, warn)
        model = settings.model
        self.name = model.name
        self.version = model.version
        self.instance = settings.instance
        self.path = model.path
        self.outputs = frozenset(model.outputs)
        self.decoupled = model.decoupled
        self.iterative = model.iterative
        self.coroutines = model.coroutines

    @property
    def overlaps(self) -> bool:
        """Return whether its coroutines outlive their ``execute``; not those that run again and again."""
        return (self.decoupled or self.coroutines > 1) and not self.iterative

    def known(self, error: BaseException) -> BridgeError:
        """Return an error as clients get it; logs one of the model."""
        return error if isinstance(error, BridgeError) else self.failure(error)

    def failure(self, error: BaseException) -> BridgeError:
        """Return an exception of the model as Triton's error, and log it."""
        text = str(error) if isinstance(error, ContractError) else model_error_text(error)
        message = f"Failed to process the request(s) for model '{self.instance}', message: {text}"
        if self._note is not None:
            self._note(error)
        else:
            Logger.log_error(message)
        return BridgeError(message)


class ContractError(Exception):
    """Violation of a rule of ``execute`` by the model; its text becomes the error response."""


def error_context(error: BridgeError) -> bytes:
    """Encode an error as the context of a record."""
    return ResponseContext(error=error.message, code=int(error.code)).encoded()


class ResponseEncoder:
    """Encodes responses as records; any thread may.

    - ``placement``: places outputs where clients or models chose.
    - ``outputs``: memory for all other outputs.
    - ``lent``: the lease bytes of requests' memory.
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
        self._output_aliasing = OutputAliasing(outputs, borrowed)
        self._outputs = outputs
        self.placement = placement
        self._states = states
        self._encode_record = record_encoder()
        self._signatures: dict[Any, bytes] = {}

    def encode_returned(self, record: Record, responses: list[Any], index: int) -> bytes:
        """Encode a response that ``execute`` returned, as `encode` does, and remove it from the list.

        Input memory that only the response still referred to is released, or sent as an output
        without a copy.
        """
        response = responses[index]
        responses[index] = None
        if type(response) is bytes or not is_worthwhile(record) or not self._plain(record):
            return self.encode(record, response)
        try:
            tensors, signature, dims, context = self._form(record, response)
            passed = self._output_aliasing.place(record, tensors)
            if passed is not None:
                response = None
                del tensors
                fields, free = self._output_aliasing.finish(
                    *passed, record.context.outputs_for, self._lent
                )
                if free:
                    context = context.changed(passed_on=True)
                return self._encode_record(
                    record.ticket, signature, dims, fields, 0, context=context.encoded()
                )
        except Exception as error:
            response = self._error(error)
        return self.encode(record, response)

    def encode(self, record: Record, response: Any, flags: int = 0) -> bytes:
        """Encode a response or an encoded error context; a response that fails becomes an error."""
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

    def encode_empty(self, ticket: int, flags: int) -> bytes:
        """Encode a record without a response."""
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
        """Return whether all outputs are copied to the output memory."""
        return (
            record.context.client is None
            and not self._outputs.exposed
            and not self.placement.on_device
        )

    def _form(
        self, record: Record, response: InferenceResponse
    ) -> tuple[Sequence[Tensor], bytes, bytes, ResponseContext]:
        """Return the requested tensors, signature, dims and context; raises an error response."""
        error = response._error
        if error is not None:
            raise BridgeError(error.message(), ErrorCode(int(error.code())))
        tensors: Sequence[Tensor] = response._tensors
        if self._states is not None:
            self._states.keep(record.context, tensors)
        # Outputs that were not requested, or are not in the configuration, are dropped.
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
