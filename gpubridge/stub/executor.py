"""Runs batches: builds requests over borrowed memory, calls ``execute``, places the answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Logger, Tensor
from gpubridge.stub.loader import model_error_text
from gpubridge.stub.outputs import OutputMemory
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import Batch, ResponseFlag, encode_result_batch
from gpubridge.transport.records import Record, record_encoder
from gpubridge.transport.signatures import encode_signature

__all__ = ["Executor", "ModelIdentity"]


class ModelIdentity:
    """Which model and instance this process runs, for requests and error texts."""

    __slots__ = ("instance", "name", "outputs", "path", "version")

    def __init__(
        self, name: str, version: int, instance: str, path: str, outputs: frozenset[str]
    ) -> None:
        self.name = name
        self.version = version
        self.instance = instance
        self.path = path
        self.outputs = outputs


class Executor:
    """Turns a batch that came into the result that goes back.

    Parameters
    ----------
    model : object
        The initialized ``TritonPythonModel``.

    Attributes
    ----------
    ended_at : int
        CLOCK_MONOTONIC nanoseconds at which the last ``execute`` ended.
    """

    def __init__(
        self,
        model: Any,
        identity: ModelIdentity,
        borrowed: BorrowedMemory,
        outputs: OutputMemory,
        control: ControlPage,
    ) -> None:
        self._execute = getattr(model, "execute", None)
        self._identity = identity
        self._borrowed = borrowed
        self._outputs = outputs
        self._control = control
        self._encode_record = record_encoder()
        self._signatures: dict[Any, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeps = False
        self._private_bytes = 0
        self._views = borrowed.views
        self.ended_at = 0

    def run(self, batch: Batch) -> bytes:
        """Execute one batch; returns its encoded result. Never raises for what the model does."""
        cancelled = self._control.cancelled
        live = [record for record in batch.records if not cancelled[record.ticket]]
        copied = self._outputs.copied
        self._private_bytes = 0
        borrowed = self._borrowed
        crowded = borrowed.held > _KEPT_LEASES or borrowed.held_bytes > _KEPT_BYTES
        self._views = self._private_views if crowded else borrowed.views
        started = self._control.start(batch.sequence)
        answers: list[bytes] = []
        called = started
        try:
            requests = [self._request(record) for record in live]
            called = time.monotonic_ns()
            responses = self._call(requests) if live else []
            # The frame of this call would hold the requests, and so their memory.
            del requests
        except BaseException as error:
            refusal = _failure(self._batch_error(error))
            # The frames of a traceback hold the requests, and so their memory.
            error.__traceback__ = None
            responses = [refusal] * len(live)
        self.ended_at = time.monotonic_ns()
        for i, record in enumerate(live):
            answers.append(self._answer(record, responses[i]))
            # Memory of the request that only its response still looked at goes back here.
            responses[i] = None
        if len(live) != len(batch.records):
            answers += self._skip(batch.records, live)
        copied = self._outputs.copied - copied + self._private_bytes
        return encode_result_batch(
            batch.sequence, (started, called, self.ended_at), copied, answers
        )

    def close(self) -> None:
        """Stop the loop that coroutines ran on, if there is one."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _request(self, record: Record) -> InferenceRequest:
        signature = record.signature
        received = Tensor._received
        inputs = [
            received(spec[0], spec[1], spec[2], view)
            for spec, view in zip(signature.tensors, self._views(record.refs))
        ]
        extras = record.extras or _NO_EXTRAS
        if "controls" in extras:
            inputs += [_control(*control) for control in extras["controls"]]
        ticket = record.ticket
        cancelled = self._control.cancelled
        return InferenceRequest._received(
            inputs,
            record.identifier,
            extras.get("correlation_id", 0),
            signature.requested or self._identity.outputs,
            extras.get("flags", 0),
            extras.get("timeout", 0),
            extras.get("parameters", "{}"),
            self._identity.name,
            self._identity.version,
            lambda: cancelled[ticket] != 0,
        )

    def _private_views(self, refs: Sequence[tuple[int, int, int, int]]) -> list[memoryview]:
        """Copy inputs: this model keeps so many that the server would run out of memory to lend."""
        if not self._keeps:
            self._keeps = True
            Logger.log_warn(
                f"model '{self._identity.instance}' keeps more than {_KEPT_LEASES} inputs or "
                f"{_KEPT_BYTES} bytes of them: it gets copies from now on while it does"
            )
        self._private_bytes += sum(ref[2] for ref in refs)
        return [memoryview(bytearray(view)) for view in self._borrowed.views(refs)]

    def _call(self, requests: list[InferenceRequest]) -> list[Any]:
        """Call the model and check the form of what it returns."""
        execute = self._execute
        if execute is None:
            raise _ContractError(
                f"Python model {self._identity.path} does not implement `execute` method."
            )
        count = len(requests)
        responses = execute(requests)
        if type(responses) is not list and inspect.iscoroutine(responses):
            responses = self._await(responses)
        if not isinstance(responses, list):
            raise _ContractError(
                f"Expected a list in the execute return, found type '{type(responses)}'."
            )
        if len(responses) != count:
            raise _ContractError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{count}, and InferenceResponse(s) size "
                f"is:{len(responses)}\n"
            )
        for response in responses:
            if not isinstance(response, InferenceResponse):
                raise _ContractError(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        return list(responses)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop that this model's coroutines share, and wait for it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="model-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _answer(self, record: Record, response: Any) -> bytes:
        """Encode a response, its tensors placed in output memory; an error instead of it if need be."""
        if type(response) is not bytes:
            try:
                return self._encode(record, response)
            except BridgeError as error:
                response = _failure(error)
            except Exception as error:
                response = _failure(self._batch_error(error))
        return self._encode_record(record.ticket, _NOTHING, (), ResponseFlag.ERROR, extras=response)

    def _encode(self, record: Record, response: InferenceResponse) -> bytes:
        error = response._error
        if error is not None:
            raise BridgeError(error.message(), ErrorCode(int(error.code())))
        tensors: Sequence[Tensor] = response._tensors
        # Outputs that nobody asked for, or that the configuration does not know, are dropped.
        wanted = record.signature.requested or self._identity.outputs
        tensors = [tensor for tensor in tensors if tensor._name in wanted]
        key = tuple([(tensor._name, tensor._datatype, tensor._shape) for tensor in tensors])
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _SIGNATURES:
                self._signatures.clear()
            signature = self._signatures[key] = encode_signature(key)
        parameters = response._parameters
        extras = b"" if parameters == "{}" else f'{{"parameters":{parameters}}}'.encode()
        refs = self._outputs.place([tensor._payload() for tensor in tensors])
        return self._encode_record(record.ticket, signature, refs, extras=extras)

    def _skip(self, records: Sequence[Record], live: Sequence[Record]) -> list[bytes]:
        """Answer for the requests that nobody waits for any more; their memory goes back."""
        run = {record.ticket for record in live}
        skipped = [record.ticket for record in records if record.ticket not in run]
        for ticket in skipped:
            self._control.lent[ticket] = 0
        return [self._encode_record(t, _NOTHING, (), ResponseFlag.CANCELLED) for t in skipped]

    def _batch_error(self, error: BaseException) -> BridgeError:
        text = str(error) if isinstance(error, _ContractError) else model_error_text(error)
        return BridgeError(
            f"Failed to process the request(s) for model '{self._identity.instance}', "
            f"message: {text}"
        )


def _control(name: str, datatype: str, shape: Sequence[int], value: Any) -> Tensor:
    """Make the input by which the scheduler tells the model where in its sequence a request is."""
    value = value.encode() if isinstance(value, str) else value
    return Tensor(name, np.full(shape, value, numpy_dtype(datatype)))


class _ContractError(Exception):
    """The model broke a rule of ``execute``; its text is the answer."""


_NO_EXTRAS: dict[str, Any] = {}
_SIGNATURES = 4096
_KEPT_LEASES = 1024
_KEPT_BYTES = 64 << 20
_NOTHING = encode_signature(())


def _failure(error: BridgeError) -> bytes:
    return json.dumps({"error": error.message, "code": int(error.code)}).encode()
