"""The open requests of a ModelStreamInfer, and its responses that wait to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gpubridge.dataplane import MessageResponseTemplate, RequestRecord
from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc.status import Status, grpc_status
from gpubridge.protocol.grpc.infer_request import KnownRequest
from gpubridge.protocol.grpc.infer_response import FrameSegments
from gpubridge.request import InferRequest, Outcome
from gpubridge.transport.signatures import Signature


@dataclass(slots=True, eq=False)
class OrderedRequest:
    """A request with one response, in the order of its stream.

    - ``record``: of the access log, if there is one.
    - ``status``: of the request, once there is its frame.
    """

    record: RequestRecord | None
    known: KnownRequest | None = None
    request: InferRequest | None = None
    frame: FrameSegments | None = None
    status: int = Status.OK


@dataclass(slots=True, eq=False)
class DecoupledRequest:
    """A request for a decoupled model, whose responses are sent as they arrive.

    ``unsent``: responses that the client has not read yet and the model has no credit for.
    """

    known: KnownRequest
    request: InferRequest
    record: RequestRecord | None
    unsent: int = 0


class DecoupledRequests(set[DecoupledRequest]):
    """The open requests for decoupled models.

    Attribute ``unread``: those with unsent responses, first the one that has waited longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unread: dict[DecoupledRequest, None] = {}


@dataclass(slots=True, eq=False)
class QueuedResponse:
    """A queued response.

    - ``record``: of its request in the access log; ``status``: of the request whose last response it is.
    - ``frame``: None while a worker encodes it; an error ends the stream.
    """

    record: RequestRecord | None = None
    status: int | None = None
    frame: FrameSegments | BridgeError | None = None
    nbytes: int = 0

    def sent(self, frame: FrameSegments | BridgeError) -> None:
        """Note in the access log that this is sent."""
        if self.record is None:
            return
        if isinstance(frame, BridgeError):
            self.record.answer(0, grpc_status(frame.code))
        else:
            self.record.answer(sum(map(len, frame)), self.status)


class StreamHooks(NamedTuple):
    """Objects that the compiled `StreamResponses` of a request uses.

    - ``parameters``: the encoded parameters of a response that is not the last.
    - ``most_unsent``: from so many unsent bytes of the stream on, the model gets no credit.
    - ``outgoing``: the stream's queued responses; while there are any, all are left to ``respond``.
    - ``template_of``: returns the template of plain responses with a signature; None if they are not plain.
    - ``respond``: sends any other response.
    - ``flush_soon``: has the connection send what is queued.
    - ``leave_unread``: notes a response that was sent, and for which the model gets no credit yet.
    - ``record``: of the access log, if there is one.
    """

    parameters: bytes
    most_unsent: int
    outgoing: deque[QueuedResponse]
    template_of: Callable[[Signature], MessageResponseTemplate | None]
    respond: Callable[[Outcome], None]
    flush_soon: Callable[[], None]
    leave_unread: Callable[[], None]
    record: RequestRecord | None
