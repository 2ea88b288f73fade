"""Encodes a model's calls of other models as records, and decodes the responses to them.

The compiled module handles plain calls; this module handles all others, and all without the
compiled module.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor, TritonError
from gpubridge.pb_utils.request import MemoryType
from gpubridge.pb_utils.spans import enclosing_span
from gpubridge.pb_utils.tensor import SharedTensor
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor.native import native
from gpubridge.transport.calls import CallKind, decode_records
from gpubridge.transport.channel import MalformedMessage, close_all
from gpubridge.transport.context import CallContext, ResponseContext, correlated
from gpubridge.transport.leases import BorrowedMemory, is_read_only
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record, record_encoder, record_reader
from gpubridge.transport.signatures import encode_dims, encode_signature, parse_signature

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.placement import DevicePlacement, Placed

CallResponse = tuple[int, int, Optional[InferenceResponse]]
"""Number of a call, flags of `ResponseFlag`, and the response or None."""


class BlsRecords:
    """Encodes calls, decodes the responses to them, and maps the memory of these.

    - ``borrowed``: the memory of responses.
    - ``outputs``: memory for inputs of calls that are not in shared memory already.
    - ``reader``: the compiled reader of plain responses, where there is one.
    - ``send``: sends a plain call at once; gets the outbox, the dict of the calls under way, the call, its
      request, whether that may have several responses, and the number of its batch. Returns no bytes if it
      is sent; its record if it has to wait; None for a call that `encode` has to look at. None where there is
      no compiled module.
    """

    def __init__(self, borrowed: BorrowedMemory, outputs: OutputMemory) -> None:
        self._borrowed = borrowed
        self._outputs = outputs
        # Regions that could not be mapped, and why.
        self._lost: dict[int, BridgeError] = {}
        self._device: StubDevice | None = None
        self._placement: DevicePlacement | None = None
        self._encode = record_encoder()
        self._reader = record_reader(ResponseContext)
        self._writer: Any = None
        self.reader: Any = None
        self.send: Callable[..., bytes | None] | None = None
        compiled = native()
        if compiled is not None:
            self._writer = compiled.CallWriter(_described, self._place, Tensor, outputs.pool)
            self.send = self._writer.send
            self.reader = compiled.CallResponseReader(
                parse_signature, Tensor, InferenceResponse, borrowed.book, self._response_at
            )

    def use_device(self, device: StubDevice, placement: DevicePlacement) -> None:
        """Send and receive tensors in the memory of a GPU as well."""
        # Most stubs have no GPU and do not load this module.
        from gpubridge.stub.device.inputs import received_on_device  # noqa: PLC0415

        self._received = partial(received_on_device, device)
        self._device = device
        self._placement = placement
        self.drop_compiled()
        device.add_lease_book(self._borrowed)

    def drop_compiled(self) -> None:
        """Go on in Python, without the compiled objects, which refer to this one."""
        self._writer = self.send = self.reader = None

    def map(self, kind: int, fields: dict[str, Any], fds: list[int]) -> None:
        """Map or unmap a region; responses in memory that cannot be mapped are errors."""
        region = fields["region"]
        if kind == CallKind.REGION:
            try:
                self._borrowed.announce(region, fds.pop(), fields["size"])
            except BridgeError as error:
                self.lose(region, error)
        elif kind == CallKind.DROP_REGION:
            self._lost.pop(region, None)
            self._borrowed.drop(region)
        elif self._device is None:
            close_all(fds)
        else:
            self._borrowed.add_segment(self._device.regions.announce(fields, fds))

    def lose(self, region: int, why: BridgeError) -> None:
        """Note why a region cannot be mapped: responses there are this error."""
        self._lost[region] = why.copy()

    def encode(self, number: int, request: InferenceRequest, decoupled: bool) -> bytes:
        """Return the record of a call; inputs outside of shared memory are copied there.

        Raises ValueError for fields that cannot be encoded, and BridgeError: UNAVAILABLE when there is
        no memory for its inputs.
        """
        if self._writer is not None:
            record: bytes | None = self._writer.write(number, request, decoupled)
            if record is not None:
                return record
        signature, context = _described(request, decoupled)
        context.encoded()
        refs, event = self._references(request._inputs, request._model_name)
        if event is not None:
            context = context.changed(event=event[0], event_lease=event[1])
        identifier = request._request_id.encode()
        dims = encode_dims([tensor._shape for tensor in request._inputs])
        return self._encode(number, signature, dims, refs, 0, identifier, context.encoded())

    def decode(self, message: bytes) -> Sequence[CallResponse]:
        """Decode a CALL_RESPONSES message; the tensors are views of borrowed memory.

        Raises MalformedMessage.
        """
        if self.reader is None:
            records = decode_records(message, self._reader)
            return [
                (
                    record.ticket,
                    record.word,
                    None if record.word & ResponseFlag.EMPTY else self._response(record),
                )
                for record in records
            ]
        try:
            responses: list[CallResponse] = self.reader.read(message)
            return responses
        except ValueError as error:
            raise MalformedMessage(f"message of calls: {error}") from error

    def _references(self, tensors: Sequence[Tensor], model: str) -> Placed:
        """Return the tensors' locations in shared memory, and the event that device tensors wait for."""
        if self._placement is not None:
            return self._placement.references(tensors, model)
        return self._place(tensors, model), None

    def _place(self, tensors: Sequence[Tensor], model: str) -> list[int]:
        """Return the tensors' locations in shared memory; others are copied to the output memory."""
        refs: list[Any] = [tensor._place for tensor in tensors]
        if None in refs:
            own = [tensor for tensor, ref in zip(tensors, refs) if ref is None]
            placed = iter(self._outputs.place([tensor._payload() for tensor in own], model))
            refs = [tuple(itertools.islice(placed, 4)) if ref is None else ref for ref in refs]
        return [field for ref in refs for field in ref]

    def _response_at(self, message: bytes, at: int) -> InferenceResponse:
        (record,), _ = self._reader.read(message, at, 1, False)
        return self._response(record)

    def _response(self, record: Record) -> InferenceResponse:
        """Decode the response or error of a record."""
        context: ResponseContext = record.context
        if record.word & ResponseFlag.ERROR:
            code = ErrorCode.INTERNAL if context.code is None else context.code
            return InferenceResponse([], TritonError(context.error, error_code(code)))
        try:
            tensors = self._tensors(record)
            if self._device is not None:
                tensors = self._received(tensors, record)
        except BridgeError as error:
            # Its traceback has this frame: a variable here would keep both, and all that is read with it.
            return self._refused(record, error)
        return InferenceResponse._received(tensors, context.parameters or "{}")

    def _refused(self, record: Record, error: BridgeError) -> InferenceResponse:
        """Return the error of a response whose memory cannot be used, and end its leases."""
        lost = (self._lost[ref[0]] for ref in record.refs if ref[0] in self._lost)
        failure = next(lost, error)
        self._borrowed.release(record.refs)
        if self._device is not None:
            self._device.note_error(failure)
        return InferenceResponse([], TritonError(failure.message, error_code(failure.code)))

    def _tensors(self, record: Record) -> list[Any]:
        refs, specs, shapes = record.refs, record.signature.tensors, record.shapes
        if not any(is_read_only(ref[0]) for ref in refs):
            return self._borrowed.tensors(refs, specs, shapes, Tensor)
        tensors = self._borrowed.tensors(refs, specs, shapes, SharedTensor, True, True)
        for tensor in tensors:
            # Shared memory is copied when the model reads it.
            tensor._belongs_to(self._outputs.copied)
        return tensors


def _described(request: InferenceRequest, decoupled: bool) -> tuple[bytes, CallContext]:
    """Return the encoded signature of a call, and its context."""
    tensors = [(each._name, each._datatype, len(each._shape)) for each in request._inputs]
    preferred = request._preferred_memory
    parameters = ""
    if request._parameters != "{}":
        # Triton writes no blanks in the parameters that the called model reads.
        parameters = json.dumps(json.loads(request._parameters), separators=(",", ":"))
    context = CallContext(
        model=request._model_name,
        version=request._model_version,
        decoupled=decoupled,
        # Copies that are made for the call are not shared.
        handed_on=any(
            tensor._place is not None or tensor._device_bytes is not None
            for tensor in request._inputs
        ),
        host_outputs=preferred is not None
        and preferred._memory_type is MemoryType.TRITONSERVER_MEMORY_CPU,
        **correlated(request._correlation_id or 0),
        flags=request._flags,
        timeout=request._timeout,
        parameters=parameters,
        trace=request._trace._identifier,
        span=enclosing_span(request._trace),
    )
    return encode_signature(tensors, tuple(request._requested_output_names)), context


def error_code(number: int) -> Any:
    """Return the class attribute of `TritonError` for a number."""
    try:
        return TritonError.__dict__[ErrorCode(number).name]
    except (ValueError, KeyError):
        return TritonError.UNKNOWN
