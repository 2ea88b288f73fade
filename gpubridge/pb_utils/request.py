"""Requests as models see them, and make them for calls of other models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from gpubridge.pb_utils import host
from gpubridge.pb_utils.arguments import integer, truth
from gpubridge.pb_utils.calls import ModelCaller, ResponseIterator, begun, first_response
from gpubridge.pb_utils.constants import (
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
)
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.output_form import output_form, wants_device
from gpubridge.pb_utils.request_fields import (
    MOST_FLAGS,
    NO_TRACE,
    InferenceTrace,
    RequestFields,
    RequestOrigin,
)
from gpubridge.pb_utils.response import InferenceResponse
from gpubridge.pb_utils.response_sender import InferenceResponseSender
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.tensor.native import fields_type

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

_RELEASE_FLAGS = TRITONSERVER_REQUEST_RELEASE_ALL | TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


if TYPE_CHECKING:
    _Fields = RequestFields
else:
    _Fields = fields_type(RequestFields)


class InferenceRequest(_Fields):
    """One request: what ``execute`` gets, or what a model sends to another.

    Parameters
    ----------
    request_id : str, optional
    correlation_id : int or str, optional
        The sequence the request belongs to; 0 is none.
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
        origin: RequestOrigin,
        trace: InferenceTrace = NO_TRACE,
    ) -> InferenceRequest:
        """Wrap a request that arrived; its list of inputs becomes the request's own."""
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
        request._origin = origin
        request._trace = trace
        request._preferred_memory = None
        request._release_flags = 0
        return request

    def set_flags(self, flags: int) -> None:
        """Set the ``TRITONSERVER_REQUEST_FLAG_...`` bits of a request to send."""
        self._flags = integer(flags, "flags", 0, MOST_FLAGS)

    def is_cancelled(self) -> bool:
        """Tell whether the client no longer waits; always False for a request a model made."""
        return self._origin is not None and self._origin.cancelled()

    def set_release_flags(self, flags: int, /) -> None:
        """Say what happens to the request after ``execute``: ``TRITONSERVER_REQUEST_RELEASE_...``.

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
        if self._origin is not None:
            self._origin.reschedule(bool(flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE))
        self._release_flags = flags

    def get_response_sender(self) -> InferenceResponseSender:
        """Give the sender of this request's responses, the same each time.

        A decoupled model sends any number of responses with it; another model one, and then returns
        None for this request.

        Raises
        ------
        TritonModelException
            If this is not a request that a server sent.
        """
        if self._origin is None:
            raise TritonModelException(
                "get_response_sender(): expected a request that the model got in execute, got one "
                "that was constructed: nobody waits for its responses"
            )
        return self._origin.response_sender()

    def output(self, name: str, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        """Give a tensor to write an output to, in the place where the bytes are wanted in the end.

        That is the client's shared memory, if the client wants this output there and it fits; else
        memory from which the server sends it, or which it hands to the next model. Returned in the response to this request, the tensor
        is not copied any more. Returned in another one, or twice, it is a tensor like others. This is
        gpubridge's own; Triton's requests have no such method.

        Parameters
        ----------
        name : str
            The output's.
        shape : sequence of int
            Also the batch's dimension.
        dtype : data-type
            NumPy's, a framework's, or a KServe name such as ``"BF16"``; of elements of a fixed size.
        device : str, int or object, optional
            Where the model can write: None or ``"cpu"`` is the host; ``"cuda"``, ``"cuda:0"``, 0 or
            a framework's device the GPU that the model's instance is on.

        Returns
        -------
        Tensor
            Its contents are undefined. On the host its ``as_numpy()`` is writable; on the GPU fill
            what ``torch.from_dlpack(tensor)`` gives, say. Do not write to it once the response was
            sent.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If the name is empty, a dimension negative, the dtype has no counterpart or no fixed
            size, the device is none of the instance's, or its memory is full.
        """
        if self._origin is None:
            # Outside a server there is no better place than any.
            return Tensor.empty(name, shape, dtype, device)
        form = output_form(name, shape, dtype)
        if wants_device(device):
            return self._origin.output_on_device(form)
        return self._origin.output(form.name, form.datatype, form.shape, form.known_dtype())

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    @overload
    def exec(self, decoupled: bool) -> InferenceResponse | ResponseIterator: ...
    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request to its model and wait; any thread may.

        Inputs that came from the server, as inputs or as outputs of another call, are handed on
        without a copy; others are copied once.

        Parameters
        ----------
        decoupled : bool, optional
            Whether the model may answer with other than one response.

        Returns
        -------
        InferenceResponse or ResponseIterator
            With `decoupled` the iterator, at once. Failures are responses with an error.

        Raises
        ------
        TypeError
            If `decoupled` is None or text.
        TritonModelException
            Outside of a server, in ``initialize`` and in ``finalize``.
        """
        decoupled = truth(decoupled, "decoupled")
        source = self._caller().call(self, decoupled)
        if decoupled:
            return ResponseIterator._of(source)
        response = source.next()
        assert response is not None
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
        """Send the request to its model; as :meth:`exec`, but awaited until the first response is there.

        Raises
        ------
        RuntimeError
            If there is no running event loop.
        TritonModelException
            Outside of a server, in ``initialize`` and in ``finalize``.
        """
        import asyncio  # noqa: PLC0415  (models that make no such calls need not load it)

        decoupled = truth(decoupled, "decoupled")
        caller = self._caller()
        loop = asyncio.get_running_loop()
        source = caller.call(self, decoupled, loop)
        return loop.create_task(begun(source) if decoupled else first_response(source))

    @staticmethod
    def _caller() -> ModelCaller:
        around = host.current()
        if around is None or around.caller is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        return around.caller
