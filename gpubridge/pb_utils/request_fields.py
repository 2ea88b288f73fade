"""Fields of a request in Python; the compiled module has the same as a C type."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol, overload

from gpubridge.pb_utils.arguments import integer, json_parameters, sendable, sequence, wrong_type
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.output_form import PreferredMemory
from gpubridge.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Union

    import numpy as np

    from gpubridge.pb_utils.output_form import OutputForm
    from gpubridge.pb_utils.response_sender import InferenceResponseSender

    Parameters = Mapping[str, Union[bool, int, str]]
    Names = Union[Sequence[str], set[str], frozenset[str]]


class InferenceTrace:
    """The trace a request belongs to; passed on to the requests that it causes."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_context", "_identifier")

    def __init__(self, context: str | None = None, /) -> None:
        self._context = context
        # The server's number for it; 0 for none.
        self._identifier = 0

    @classmethod
    def _of(cls, identifier: int) -> InferenceTrace:
        trace = cls()
        trace._identifier = identifier
        return trace

    def get_context(self) -> str | None:
        """Give the OpenTelemetry context as JSON, or None where there is no trace."""
        return self._context


class _Required(enum.Enum):
    """Stands for the arguments that must be given although some before them need not."""

    REQUIRED = enum.auto()


_REQUIRED: Any = _Required.REQUIRED
NO_TRACE = InferenceTrace()
MOST_FLAGS = (1 << 32) - 1
_MOST_UNSIGNED = (1 << 64) - 1


class RequestOrigin(Protocol):
    """Connection of a received request; injected by the process that runs the model."""

    def cancelled(self) -> bool:
        """Tell whether the client no longer waits."""

    def output(
        self, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in its final place."""

    def output_on_device(self, form: OutputForm, /) -> Tensor:
        """Make an output tensor in its final place on the instance's GPU, which it has."""

    def reschedule(self, wanted: bool, /) -> None:
        """Note whether the model wants to get the request again."""

    def response_sender(self) -> InferenceResponseSender:
        """Return the request's response sender, the same each time."""


class RequestFields:
    """The fields of a request; :class:`~gpubridge.pb_utils.InferenceRequest` says what they are."""

    __slots__ = (
        "_by_name",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_origin",
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
    _origin: RequestOrigin | None
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
        # Each of these is checked here where that can be seen at a glance: models make a request for
        # each call, and to ask a function takes longer than its answer.
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
        # None is "wherever the called model puts it", which has no public name.
        self._preferred_memory = None if preferred_memory is _REQUIRED else preferred_memory
        if not isinstance(trace, InferenceTrace):
            raise wrong_type("trace", "InferenceTrace", trace)
        self._trace = trace
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._inputs = _checked_inputs(self, inputs)
        self._requested_output_names = _checked_names(self, requested_output_names)
        self._parameters = "{}" if parameters is None else json_parameters(parameters)
        self._release_flags = 0
        self._origin = None

    def inputs(self) -> list[Tensor]:
        """Give the input tensors as a new list."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Give the id the client chose, or an empty str."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Give the sequence's id; 0 is none."""
        return self._correlation_id

    def flags(self) -> int:
        """Give the ``TRITONSERVER_REQUEST_FLAG_...`` bits."""
        return self._flags

    def timeout(self) -> int:
        """Give the time limit in microseconds; 0 is none."""
        return self._timeout

    def parameters(self) -> str:
        """Give the parameters as JSON text."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        """Give the trace, for the requests that this one causes."""
        return self._trace

    def requested_output_names(self) -> set[str]:
        """Give the names of the outputs asked for, as a new set."""
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
    # A set has no duplicates to lose: what requested_output_names() gives can be passed on.
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
