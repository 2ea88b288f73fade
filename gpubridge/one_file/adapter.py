"""Turns a declared function or class into the class of a Python model."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import invalid
from gpubridge.one_file.declare import Declaration, declaration_of
from gpubridge.pb_utils import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    Batch,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
)
from gpubridge.stub.loader import FreshLoader
from gpubridge.tensor.dtypes import numpy_dtype

if TYPE_CHECKING:
    from gpubridge.pb_utils.response import InferenceResponseSender

_UNTYPED = frozenset((bool, int, float, str, bytes, list))
_CANCELLED = TritonError.CANCELLED
_loading: list[str] = []


def loading_file() -> str:
    """Return the file that is imported for its models; empty if there is none."""
    return _loading[-1] if _loading else ""


def load_file(path: str) -> dict[str, Declaration]:
    """Import a Python file; return the models that it declares, by name.

    Raises BridgeError: INVALID_ARG for two of one name; whatever the file raises.
    """
    name = Path(path).stem
    sys.path.append(str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=FreshLoader(name, path))
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        _loading.pop()
    found: dict[str, Declaration] = {}
    for value in vars(module).values():
        declared = declaration_of(value)
        if declared is not None and found.setdefault(declared.name, declared) is not declared:
            raise invalid(f"{path} declares two models '{declared.name}'")
    return found


def model_class(path: str, name: str) -> type:
    """Return the ``TritonPythonModel`` of a model that a file declares."""
    declared = load_file(path).get(name)
    if declared is None:
        raise invalid(f"{path} no longer declares a model '{name}'")
    is_async = inspect.iscoroutinefunction(declared.function)
    if inspect.isasyncgenfunction(declared.function):
        kind: type = _AsyncStream
    elif declared.is_stream:
        kind = _Stream
    elif declared.is_batched:
        kind = _AsyncBatches if is_async else _Batches
    else:
        kind = _AsyncRequests if is_async else _Requests
    return type("TritonPythonModel", (kind,), {"declared": declared})


class _Model:
    declared: Declaration

    def initialize(self, args: dict[str, str]) -> None:
        target = self.declared.target
        # `call` is no method: the function gets no self.
        self.call = target() if isinstance(target, type) else target
        if isinstance(target, type) and hasattr(self.call, "initialize"):
            self.call.initialize(args)

    def finalize(self) -> None:
        if isinstance(self.declared.target, type) and hasattr(self.call, "finalize"):
            self.call.finalize()

    def arguments(self, request: InferenceRequest) -> dict[str, Any]:
        given: dict[str, Any] = {
            tensor.name(): tensor.as_numpy() if tensor._device_bytes is None else tensor
            for tensor in request.inputs()
        }
        if self.declared.context:
            given[self.declared.context] = request
        return given

    def outputs(self, returned: Any) -> dict[str, Any]:
        """Return the outputs by name; what has no dtype of its own gets the declared one."""
        specs = self.declared.outputs
        if type(returned) is tuple and len(returned) == len(specs):
            outputs = dict(zip(specs, returned))
        elif isinstance(returned, (dict, Mapping)):
            outputs = dict(returned)
        elif len(specs) == 1 and returned is not None and not isinstance(returned, tuple):
            outputs = {next(iter(specs)): returned}
        else:
            raise TritonModelException(
                f"expected model '{self.declared.name}' to return a dict, or a tuple of {len(specs)} "
                f"outputs, got {type(returned).__name__}"
            )
        for name, value in outputs.items():
            if type(value) in _UNTYPED and name in specs:
                outputs[name] = np.asarray(value, numpy_dtype(specs[name].datatype))
            elif isinstance(value, (np.ndarray, np.generic)):
                # NumPy's scalars are no arrays, and its texts no tensors.
                outputs[name] = np.asarray(value, object if value.dtype.kind == "U" else None)
        return outputs

    def response(self, returned: Any) -> InferenceResponse:
        if isinstance(returned, TritonError):
            return InferenceResponse(error=returned)
        return InferenceResponse(
            [
                Tensor(name, value)
                if isinstance(value, np.ndarray)
                else Tensor.from_dlpack(name, value)
                for name, value in self.outputs(returned).items()
            ]
        )


class _Requests(_Model):
    def execute(self, requests: list[InferenceRequest]) -> list[InferenceResponse]:
        return [self.response(self.call(**self.arguments(request))) for request in requests]


class _AsyncRequests(_Model):
    async def execute(self, requests: list[InferenceRequest]) -> list[InferenceResponse]:
        return [self.response(await self.call(**self.arguments(request))) for request in requests]


class _Batches(_Model):
    def batch_arguments(self, batch: Batch) -> dict[str, Any]:
        given = {name: batch[name] for name in batch.names}
        if self.declared.context:
            given[self.declared.context] = batch
        return given

    def stacked(self, batch: Batch, returned: Any) -> dict[str, Any]:
        if isinstance(returned, TritonError):
            batch.errors = dict.fromkeys(range(len(batch.requests)), returned)
            return {}
        return self.outputs(returned)

    def execute_batch(self, batch: Batch) -> Any:
        return self.stacked(batch, self.call(**self.batch_arguments(batch)))


class _AsyncBatches(_Batches):
    async def execute_batch(self, batch: Batch) -> Any:
        return self.stacked(batch, await self.call(**self.batch_arguments(batch)))


class _Stream(_Model):
    def execute(self, requests: list[InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            # Closed here: who keeps an exception, and so the generator, does not keep it open.
            with closing(self.call(**self.arguments(request))) as answers:
                for returned in answers:
                    if request.is_cancelled():
                        break
                    sender.send(self.response(returned))
            _end(request, sender)


class _AsyncStream(_Model):
    async def execute(self, requests: list[InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            answers: AsyncGenerator[Any, None] = self.call(**self.arguments(request))
            try:
                await self._send_all(request, answers, sender)
            finally:
                await answers.aclose()
            _end(request, sender)

    async def _send_all(
        self,
        request: InferenceRequest,
        answers: AsyncGenerator[Any, None],
        sender: InferenceResponseSender,
    ) -> None:
        """Send what a generator yields, until its client leaves, whatever it then waits for.

        While a client reads too slowly, only its own generator waits.
        """
        # Few models are such, and asyncio takes 4 MiB.
        from asyncio import CancelledError, current_task  # noqa: PLC0415

        task, handle = current_task(), request._handle
        assert task is not None
        assert handle is not None
        left = False

        def leave() -> None:
            nonlocal left
            left = task.cancel()

        try:
            # The generator runs in this task alone: scopes that it enters belong to a task.
            with handle.on_cancel(leave):
                async for returned in answers:
                    if request.is_cancelled():
                        break
                    await sender.async_send(self.response(returned))
        except CancelledError:
            if not left:
                raise
        finally:
            # Also where the generator took the cancellation: the task goes on with the next request.
            if left and sys.version_info >= (3, 11):
                task.uncancel()


def _end(request: InferenceRequest, sender: InferenceResponseSender) -> None:
    """End a stream; with an error if it was broken off while its client may still read."""
    error = None
    if request.is_cancelled():
        error = InferenceResponse(error=TritonError("the request was cancelled", _CANCELLED))
    sender.send(error, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
