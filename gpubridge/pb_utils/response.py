"""Responses: made by models, sent by a sender, and iterated over by those who call a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.pb_utils.exceptions import (
    TritonError,
    TritonModelException,
    integer,
    json_parameters,
    sequence,
    wrong_type,
)
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.tensor.native import fields_type, native

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from gpubridge.pb_utils.host import ResponseSource

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

_NO_TENSORS: Any = ()


class ResponseFields:
    """Fields of an `InferenceResponse` in Python; the compiled module has the same as a C type."""

    __slots__ = ("_by_name", "_error", "_parameters", "_tensors")

    _by_name: tuple[list[Tensor], dict[str, Tensor]]
    _error: TritonError | None
    _parameters: str
    _tensors: list[Tensor]

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = _NO_TENSORS,
        error: TritonError | None = None,
        parameters: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        tensors = sequence(output_tensors, "output_tensors")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                _refuse_element(tensor)
        if error is not None and not isinstance(error, TritonError):
            raise wrong_type("error", "TritonError", error)
        self._tensors = tensors
        self._error = error
        self._parameters = "{}" if parameters is None else json_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors as a new list."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | Any:
        """Return the error or None; typed as "or Any", since models call ``has_error()`` before."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return self._parameters


def _refuse_element(element: object) -> None:
    if element is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    raise wrong_type("an element of output_tensors", "Tensor", element)


if TYPE_CHECKING:
    _Fields = ResponseFields
else:
    _Fields = fields_type(ResponseFields)


class InferenceResponse(_Fields):
    """The answer to one request: output tensors, or an error in their place.

    Parameters
    ----------
    output_tensors : list of Tensor, optional
    error : TritonError, optional
        If given, the tensors are not sent.
    parameters : dict of str to bool, int or str, optional

    Raises
    ------
    TypeError
        If an argument or an element is of another type.
    TritonModelException
        If an element is None, or a parameter of a type that has no counterpart.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    @classmethod
    def _received(cls, tensors: list[Tensor], parameters: str) -> InferenceResponse:
        """Wrap a received response, which takes over the list of tensors."""
        response = object.__new__(cls)
        response._tensors = tensors
        response._error = None
        response._parameters = parameters
        return response


_FEW = 8
"""The first lookup among more tensors builds an index."""


# The result is typed as "or Any" instead of "or None": models use it unchecked, as Triton's examples
# do, and a type checker still knows what it is otherwise.
def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | Any:
    """Return the response's output of that name, or None."""
    return find_tensor(inference_response, inference_response._tensors, name)


def find_tensor(owner: Any, tensors: list[Tensor], name: str) -> Tensor | None:
    """Return the tensor of that name, or None; ``owner``, a request or response, keeps the index."""
    if len(tensors) > _FEW and isinstance(name, str):
        index: dict[str, Tensor]
        indexed, index = getattr(owner, "_by_name", (None, {}))
        if indexed is not tensors:
            # Reversed: of two tensors of one name, the first is returned.
            index = {tensor._name: tensor for tensor in reversed(tensors)}
            owner._by_name = tensors, index
        return index.get(name)
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


if not TYPE_CHECKING:
    _compiled = native()
    if _compiled is not None:
        get_output_tensor_by_name = _compiled.output_by_name


class ResponseStream(Protocol):
    """Response stream of one request, as the process of a model implements it."""

    decoupled: bool

    def waits(self, response: InferenceResponse, for_client: bool, /) -> Iterator[float]:
        """Yield seconds to wait until the server has the responses before, or the client has read them.

        Ends when the client is gone, or the stream is closed.
        """

    def close(self) -> None:
        """Close the stream: nothing will be sent any more."""

    def send(self, response: InferenceResponse | None, final: bool, /) -> None:
        """Send a response, the end of the stream (None and ``final``), or both."""

    def cancelled(self) -> bool:
        """Return whether the client no longer waits."""

    def sender_dropped(self, sent: int, /) -> None:
        """End the request: the model dropped the sender after ``sent`` responses, none of them final."""


class InferenceResponseSender:
    """Sends the responses of one request; made by ``InferenceRequest.get_response_sender()``.

    May be kept after ``execute`` has returned, and used in any thread. Dropping a sender without
    sending :data:`TRITONSERVER_RESPONSE_COMPLETE_FINAL` ends its request.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_closed", "_lock", "_sent", "_stream", "_turn")

    _closed: bool
    _lock: threading.Lock
    _sent: int
    _stream: ResponseStream
    _turn: threading.Lock

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def _on(cls, stream: ResponseStream, *, closed: bool = False) -> InferenceResponseSender:
        sender = object.__new__(cls)
        sender._stream = stream
        sender._closed = closed
        sender._sent = 0
        sender._lock = threading.Lock()
        sender._turn = threading.Lock()
        return sender

    def __del__(self) -> None:
        # A model may call this, too.
        if hasattr(self, "_stream") and not self._closed:
            self._closed = True
            self._stream.sender_dropped(self._sent)

    def send(
        self, response: InferenceResponse | None = None, flags: int = 0, *, wait: bool = False
    ) -> None:
        """Send a response, the final flag, or both at once.

        Does not wait for the client: what it has not read is stored, within limits. A client that
        reads so slowly that they are reached gets an error in place of the rest, and the request is
        cancelled.

        Parameters
        ----------
        response : InferenceResponse, optional
            Required unless `flags` is the final flag. An error response does not end the request
            by itself.
        flags : int, optional
            0, or ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` with or after the last response.
        wait : bool, optional
            Block before a response that is not the last while the client has yet to read 64
            responses, or 1 MiB of them. In a coroutine, await :meth:`async_send` instead.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If `flags` is another number, there is nothing to send, the sender is closed, or a model
            that is not decoupled sends none or several responses.
        """
        final = _is_final(response, flags)
        # One at a time: after the final flag the server may reuse the request's number for another
        # request, whose client must not get responses that another thread still sends here.
        with self._turn:
            self._check(response, final)
            if response is not None and not final:
                # Without the lock, so that closing the sender does not wait for a slow client.
                for pause in self._stream.waits(response, wait):
                    time.sleep(pause)
            self._pass_on(response, final)

    async def async_send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send as ``send(..., wait=True)`` does, but let the event loop go on while the client reads.

        Parameters and exceptions are those of :meth:`send`. Responses of one request are sent in the
        order in which they no longer wait, so await each before the next.
        """
        final = _is_final(response, flags)
        self._check(response, final)
        if response is not None and not final:
            # A coroutine runs, so that asyncio is loaded.
            from asyncio import sleep  # noqa: PLC0415

            for pause in self._stream.waits(response, True):
                await sleep(pause)
        # Not in turn: a thread that waits for the client has that.
        self._pass_on(response, final)

    def _pass_on(self, response: InferenceResponse | None, final: bool) -> None:
        """Send what need not wait, or has waited, for its client."""
        with self._lock:
            self._check(response, final)
            self._sent += response is not None
            self._closed = final
            self._stream.send(response, final)

    def _check(self, response: Any, final: bool) -> None:
        if not self._stream.decoupled:
            if response is not None and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and final and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before "
                    "sending a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _close(self, *, unless_sent: bool = False) -> bool:
        """Close the sender; returns whether it was open (``unless_sent``: and had sent nothing)."""
        with self._lock:
            if self._closed or (unless_sent and self._sent):
                return False
            self._closed = True
        self._stream.close()
        return True

    def is_cancelled(self) -> bool:
        """Return whether the client no longer waits for responses."""
        return self._stream.cancelled()


def _is_final(response: Any, flags: Any) -> bool:
    """Return whether the arguments of a sender's method send its last response; raises as that does."""
    if response is not None and not isinstance(response, InferenceResponse):
        raise wrong_type("response", "InferenceResponse", response)
    if not isinstance(flags, int):
        flags = integer(flags, "flags")
    if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
        raise TritonModelException("Unable to send response. Unsupported flag provided.")
    final: bool = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if response is None and not final:
        raise TritonModelException(
            "Inference Response object must be provided when the response flags is set to zero."
        )
    return final


_NOT_YET = object()


class ResponseIterator:
    """The responses to a call with ``decoupled=True``.

    Iterates, also with ``async for``, over the responses in order; the last one is empty where the
    model sent its final flag alone. Iterating again begins with the first response.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_at", "_ended", "_lock", "_source", "_taken")

    _at: int
    _ended: bool
    _lock: threading.RLock
    _source: ResponseSource
    _taken: list[InferenceResponse]

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.ResponseIterator: No constructor defined!")

    @classmethod
    def _of(cls, source: ResponseSource) -> ResponseIterator:
        iterator = object.__new__(cls)
        iterator._source = source
        iterator._taken = []
        iterator._at = 0
        iterator._ended = False
        # Reentrant: a signal handler of the model may iterate, too.
        iterator._lock = threading.RLock()
        return iterator

    def __iter__(self) -> Iterator[InferenceResponse]:
        with self._lock:
            if self._ended and self._at == len(self._taken):
                self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        while (response := self._take_ready()) is _NOT_YET:
            self._source.wait()
        if response is None:
            raise StopIteration("Iteration is done for the responses.")
        return response

    def _take_ready(self) -> InferenceResponse | Any:
        """Take the next response without waiting; None at the end, `_NOT_YET` if it has not come.

        Several threads and tasks may wait for it, of which one takes it.
        """
        with self._lock:
            if self._at == len(self._taken) and not self._ended:
                if not self._source.ready:
                    return _NOT_YET
                response = self._source.next()
                if response is None:
                    self._ended = True
                else:
                    self._taken.append(response)
            if self._at == len(self._taken):
                return None
            self._at += 1
            return self._taken[self._at - 1]

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        iter(self)
        return self

    async def __anext__(self) -> InferenceResponse:
        while (response := self._take_ready()) is _NOT_YET:
            # A coroutine runs, so that asyncio is loaded.
            from gpubridge.pb_utils.answers import until_ready  # noqa: PLC0415

            await until_ready(self._source)
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Ask the called model to stop sending responses; it may still send some.

        Does nothing once the last response has been received.
        """
        self._source.cancel()
