"""Requests as models receive them, and construct them to call other models."""

from __future__ import annotations

import enum
import functools
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from gpubridge.pb_utils import host
from gpubridge.pb_utils.datatypes import OutputForm, output_form, wants_device
from gpubridge.pb_utils.exceptions import (
    NamedEnum,
    TritonModelException,
    integer,
    json_parameters,
    sendable,
    sequence,
    truth,
    wrong_type,
)
from gpubridge.pb_utils.response import (
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
    find_tensor,
)
from gpubridge.pb_utils.spans import Span
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.pb_utils.trace import NO_TRACE, InferenceTrace
from gpubridge.tensor.native import fields_type, native

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Union

    import numpy as np

    Parameters = Mapping[str, Union[bool, int, str]]
    Names = Union[Sequence[str], set[str], frozenset[str]]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(NamedEnum):
    """Kind of memory for the outputs of a called model."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


MemoryType.__module__ = "c_python_backend_utils"


class PreferredMemory:
    """Memory in which the caller wants the outputs of a called model.

    - ``preferred_memory_type``: ``TRITONSERVER_MEMORY_GPU`` or ``TRITONSERVER_MEMORY_CPU``.
    - ``preferred_device_id``: the GPU's ordinal.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise wrong_type("preferred_memory_type", "a MemoryType", preferred_memory_type)
        self._memory_type = preferred_memory_type
        self._device_id = integer(preferred_device_id, "preferred_device_id")


class _Required(enum.Enum):
    """Default of required parameters that follow optional ones."""

    REQUIRED = enum.auto()


_REQUIRED: Any = _Required.REQUIRED
MOST_FLAGS = (1 << 32) - 1
_MOST_UNSIGNED = (1 << 64) - 1


class RequestHandle(Protocol):
    """A received request in the process of the model: its client, outputs and response stream."""

    def cancelled(self) -> bool:
        """Tell whether the client no longer waits."""

    def on_cancel(self, react: Callable[[], object], /) -> AbstractContextManager[None]:
        """Call ``react`` on the running event loop once the open request is cancelled, in a block."""

    def output(
        self, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in host memory that is sent without a copy."""

    def output_on_device(self, form: OutputForm, /) -> Tensor:
        """Make an output tensor on the instance's GPU that is sent without a copy."""

    def reschedule(self, wanted: bool, /) -> None:
        """Set whether the model gets the request again."""

    def response_sender(self) -> InferenceResponseSender:
        """Return the request's response sender, the same each time."""


class RequestFields:
    """Fields of an `InferenceRequest` in Python; the compiled module has the same as a C type."""

    __slots__ = (
        "_by_name",
        "_correlation_id",
        "_flags",
        "_handle",
        "_inputs",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_timeout",
        "_trace",
    )

    _by_name: tuple[list[Tensor], dict[str, Tensor]]
    _correlation_id: int | str
    _flags: int
    _inputs: list[Tensor]
    _model_name: str
    _model_version: int
    _handle: RequestHandle | None
    _parameters: str
    _preferred_memory: PreferredMemory | None
    _release_flags: int
    _request_id: str
    _requested_output_names: Iterable[str]
    _timeout: int
    _trace: InferenceTrace

    # For type checkers: three arguments are required although some before them are not.
    @overload
    def __init__(
        self,
        request_id: str = ...,
        correlation_id: int | str = ...,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Names,
        model_name: str,
        model_version: int = ...,
        flags: int = ...,
        timeout: int = ...,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: Parameters | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        request_id: str,
        correlation_id: int | str,
        inputs: Sequence[Tensor],
        requested_output_names: Names,
        model_name: str,
        model_version: int = ...,
        flags: int = ...,
        timeout: int = ...,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: Parameters | None = ...,
    ) -> None: ...
    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Names = _REQUIRED,
        model_name: str = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _REQUIRED,
        trace: InferenceTrace = NO_TRACE,
        parameters: Parameters | None = None,
    ) -> None:
        # Common values are checked inline: models construct a request for each call, and calls of the
        # checking functions would take longer than the checks.
        if type(request_id) is not str or not request_id.isascii():
            request_id = sendable(request_id, "request_id")
        self._request_id = request_id
        if type(model_name) is not str or not model_name.isascii():
            model_name = sendable(model_name, "model_name")
        self._model_name = model_name
        if type(model_version) is not int or not -1 <= model_version <= MOST_FLAGS:
            model_version = integer(model_version, "model_version", -(1 << 63), (1 << 63) - 1)
        self._model_version = model_version
        if type(flags) is not int or not 0 <= flags <= MOST_FLAGS:
            flags = integer(flags, "flags", 0, MOST_FLAGS)
        self._flags = flags
        if type(timeout) is not int or not 0 <= timeout <= _MOST_UNSIGNED:
            timeout = integer(timeout, "timeout", 0, _MOST_UNSIGNED)
        self._timeout = timeout
        if preferred_memory is not _REQUIRED and not isinstance(preferred_memory, PreferredMemory):
            raise wrong_type("preferred_memory", "PreferredMemory", preferred_memory)
        # None: no preference, for which Triton has no public name.
        self._preferred_memory = None if preferred_memory is _REQUIRED else preferred_memory
        if not isinstance(trace, InferenceTrace):
            raise wrong_type("trace", "InferenceTrace", trace)
        self._trace = trace
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._inputs = _checked_inputs(self, inputs)
        self._requested_output_names = _checked_names(self, requested_output_names)
        self._parameters = "{}" if parameters is None else json_parameters(parameters)
        self._release_flags = 0
        self._handle = None

    def inputs(self) -> list[Tensor]:
        """Return the input tensors as a new list."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the id that the client chose, or an empty str."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the sequence's id; 0 is none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the ``TRITONSERVER_REQUEST_FLAG_...`` bits."""
        return self._flags

    def timeout(self) -> int:
        """Return the timeout in microseconds; 0 is none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        """Return the trace, for the requests that the model sends because of this one."""
        return self._trace

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs as a new set."""
        return set(self._requested_output_names)


def _checked_correlation_id(value: Any) -> int | str:
    if type(value) is int and 0 <= value <= _MOST_UNSIGNED:
        return value
    if value is None:
        raise wrong_type("correlation_id", "int or str", value)
    if isinstance(value, str):
        return sendable(value, "correlation_id")
    if isinstance(value, int) and 0 <= value <= _MOST_UNSIGNED:
        return int(value)
    raise TritonModelException("Correlation ID must be integer or string")


def _checked_inputs(request: RequestFields, inputs: Any) -> list[Tensor]:
    tensors = sequence(inputs, "inputs")
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise wrong_type("an element of inputs", "Tensor", tensor)
        if tensor is not None and not tensor._name.isascii():
            sendable(tensor._name, "the name of an input")
    if None in tensors:
        raise TritonModelException(f"Input tensor for {_described(request)} should not be empty.")
    return tensors


def _checked_names(request: RequestFields, names: Any) -> frozenset[str]:
    # Sets are accepted, so that the result of requested_output_names() can be passed.
    given = list(names) if isinstance(names, (set, frozenset)) else names
    checked = [
        name
        if type(name) is str and name.isascii()
        else sendable(name, "an element of requested_output_names")
        for name in sequence(given, "requested_output_names")
    ]
    if "" in checked:
        raise TritonModelException(
            f"Requested output name for {_described(request)} should not be empty."
        )
    return frozenset(checked)


def _described(request: RequestFields) -> str:
    return f"request with id '{request._request_id}' and model name '{request._model_name}'"


_RELEASE_FLAGS = TRITONSERVER_REQUEST_RELEASE_ALL | TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


if TYPE_CHECKING:
    _Fields = RequestFields
else:
    _Fields = fields_type(RequestFields)


class InferenceRequest(_Fields):
    """A request that ``execute`` receives, or that a model sends to another model.

    Parameters
    ----------
    request_id : str, optional
    correlation_id : int or str, optional
        Id of the request's sequence; 0 is none.
    inputs : list of Tensor
    requested_output_names : list of str
    model_name : str
    model_version : int, optional
        -1 lets the server choose.
    flags : int, optional
        ``TRITONSERVER_REQUEST_FLAG_...``.
    timeout : int, optional
        Microseconds; 0 is none.
    preferred_memory : PreferredMemory, optional
    trace : InferenceTrace, optional
    parameters : dict of str to bool, int or str, optional

    Raises
    ------
    TypeError
        If an argument is missing, None (`parameters` excepted) or of another type.
    TritonModelException
        If an element is None or an empty name, or the correlation id or a parameter is of a type
        that has no counterpart.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    @classmethod
    def _received(
        cls,
        inputs: list[Tensor],
        request_id: str,
        correlation_id: int | str,
        requested_output_names: Iterable[str],
        flags: int,
        timeout: int,
        parameters_json: str,
        model_name: str,
        model_version: int,
        handle: RequestHandle,
        trace: InferenceTrace = NO_TRACE,
    ) -> InferenceRequest:
        """Wrap a received request, which takes over the list of inputs."""
        request = object.__new__(cls)
        request._inputs = inputs
        request._request_id = request_id
        request._correlation_id = correlation_id
        request._requested_output_names = requested_output_names
        request._flags = flags
        request._timeout = timeout
        request._parameters = parameters_json
        request._model_name = model_name
        request._model_version = model_version
        request._handle = handle
        request._trace = trace
        request._preferred_memory = None
        request._release_flags = 0
        return request

    def set_flags(self, flags: int) -> None:
        """Set the ``TRITONSERVER_REQUEST_FLAG_...`` bits of a request to send."""
        self._flags = integer(flags, "flags", 0, MOST_FLAGS)

    def is_cancelled(self) -> bool:
        """Return whether the client no longer waits; False for a request that a model constructed."""
        return self._handle is not None and self._handle.cancelled()

    def span(
        self, name: str, attributes: Mapping[str, bool | int | float | str] | None = None
    ) -> Span:
        """Return a context manager whose time is a span of the request's trace.

        Its ``set_attribute(key, value)`` adds attributes. Nothing is recorded for a request that is not
        traced by OpenTelemetry.

        Raises
        ------
        TypeError
            If `name` or a key is not a str, or a value neither bool, int, float nor str.
        """
        return Span(self.trace(), name, attributes)

    def set_release_flags(self, flags: int, /) -> None:
        """Set what happens to the request after ``execute``: ``TRITONSERVER_REQUEST_RELEASE_...``.

        With ``RESCHEDULE`` the model gets it again, as the next request of its sequence. ``execute``
        then returns None in its place, and sends no final response.

        Raises
        ------
        TypeError
            If `flags` is not an int.
        TritonModelException
            If there is no such flag, or the model has no ``iterative_sequence``.
        """
        flags = integer(flags, "flags", least=0)
        if flags & ~_RELEASE_FLAGS:
            raise TritonModelException(
                "set_release_flags(): expected TRITONSERVER_REQUEST_RELEASE_ALL or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags}"
            )
        if self._handle is not None:
            self._handle.reschedule(bool(flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE))
        self._release_flags = flags

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of this request's responses, the same at each call.

        A decoupled model sends any number of responses with it; another model sends one, and returns
        None for this request: before that, or later, where it keeps the request.

        Raises
        ------
        TritonModelException
            If the model constructed this request.
        """
        if self._handle is None:
            raise TritonModelException(
                "get_response_sender(): expected a request that the model got in execute, got one "
                "that was constructed: no client waits for its responses"
            )
        return self._handle.response_sender()

    def output(self, name: str, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        """Make a tensor for an output of this request, in memory from which it is sent without a copy.

        That is the client's shared memory if the client requested this output there and it fits;
        else memory from which the server sends it, or passes it to the next model. It is sent
        uncopied in the response to this request, and as any other tensor in another response or a
        second time. An extension of gpubridge; Triton's requests have no such method.

        Parameters
        ----------
        name : str
            Name of the output.
        shape : sequence of int
            Including the batch dimension.
        dtype : data-type
            NumPy's, a framework's, or a KServe name such as ``"BF16"``; of elements of a fixed size.
        device : str, int or object, optional
            Where the model writes it: None or ``"cpu"`` for host memory; ``"cuda"``, ``"cuda:0"``, 0
            or a framework's device for the GPU of the model's instance.

        Returns
        -------
        Tensor
            Its contents are undefined. On the host its ``as_numpy()`` is writable; on the GPU fill
            the result of ``torch.from_dlpack(tensor)``, for example. Do not write to it once the
            response was sent.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If the name is empty, a dimension negative, the dtype has no counterpart or no fixed
            size, the device is not the instance's, or its memory is full.
        """
        if self._handle is None:
            return Tensor.empty(name, shape, dtype, device)
        form = output_form(name, shape, dtype)
        if wants_device(device):
            return self._handle.output_on_device(form)
        return self._handle.output(form.name, form.datatype, form.shape, form.known_dtype())

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    @overload
    def exec(self, decoupled: bool) -> InferenceResponse | ResponseIterator: ...
    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request to its model and wait for the response; any thread may.

        Inputs that were received from the server, as inputs or as outputs of another call, are passed
        without a copy; others are copied once.

        Parameters
        ----------
        decoupled : bool, optional
            Whether the model may send none or several responses.

        Returns
        -------
        InferenceResponse or ResponseIterator
            With `decoupled` the iterator, immediately. Failures are responses with an error.

        Raises
        ------
        TypeError
            If `decoupled` is None or text.
        TritonModelException
            Outside of a server, in ``initialize`` and in ``finalize``.
        """
        if decoupled is not False:
            decoupled = truth(decoupled, "decoupled")
        caller = self._caller()
        if decoupled:
            return ResponseIterator._of(caller.call(self, True))
        response: InferenceResponse = caller.exec(self)
        return response

    @overload
    def async_exec(
        self, decoupled: Literal[False] = False
    ) -> asyncio.Future[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> asyncio.Future[ResponseIterator]: ...
    @overload
    def async_exec(self, decoupled: bool) -> asyncio.Future[Any]: ...
    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:
        """Send the request to its model as :meth:`exec`; awaiting returns with the first response.

        The model gets the request whether the future is awaited or not; cancelling it cancels the call.

        Raises
        ------
        RuntimeError
            If there is no running event loop.
        TritonModelException
            Outside of a server, in ``initialize`` and in ``finalize``.
        """
        if decoupled is not False:
            decoupled = truth(decoupled, "decoupled")
        caller = self._caller()
        answers = _answers()
        loop = answers.get_running_loop()
        source = caller.call(self, decoupled, loop)
        taken = ResponseIterator._of if decoupled else _first
        future: asyncio.Future[Any] = answers.Answer(source, taken, loop)
        return future

    @staticmethod
    def _caller() -> host.ModelCaller:
        server = host.current()
        if server is None or server.caller is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        return server.caller


_first = methodcaller("next")


@functools.cache
def _answers() -> Any:
    """Return the module of awaited answers; only models that call others so load asyncio."""
    from gpubridge.pb_utils import answers  # noqa: PLC0415

    return answers


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | Any:
    """Return the request's input of that name, or None."""
    return find_tensor(inference_request, inference_request._inputs, name)


if not TYPE_CHECKING:
    _compiled = native()
    if _compiled is not None:
        get_input_tensor_by_name = _compiled.input_by_name
