"""Requests at a stub whose outcomes are encoded as every door would, and a ledger that has them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from gpubridge.engine.ledger import Ledger
from gpubridge.errors import BridgeError
from gpubridge.host_shm import HostArena, Segment
from gpubridge.protocol.generate import encode_generated
from gpubridge.protocol.grpc.infer_response import encode_response as encode_grpc
from gpubridge.protocol.grpc.stream import error_frame
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response as encode_http
from gpubridge.protocol.status import error_body
from gpubridge.request import InferRequest
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature
from tests.unit.model_configs import model_config

__all__ = ["Asked", "Desk", "record"]

_NOTHING = Signature((), ())
CONFIG = model_config("IN FP32 [1]", "OUT FP32 [-1]")
FORMS = [
    parse_request(
        b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}],'
        b'"parameters":{"binary_data_output":%b}}' % binary,
        CONFIG,
        0,
    )
    for binary in (b"true", b"false")
]


class Asked:
    """A request at a stub, and what its client was told."""

    def __init__(self, arena: HostArena) -> None:
        self.outcomes: list[object] = []
        self.partials: list[object] = []
        self.request = InferRequest(
            b"", arena.allocate(64), 0, [(0, 64)], lambda outcome: self.tell(self.outcomes, outcome)
        )
        self.request.on_partial = lambda outcome: self.tell(self.partials, outcome)

    @staticmethod
    def tell(told: list[object], outcome: object) -> None:
        """Do what doors do: encode the outcome, each in its way."""
        if isinstance(outcome, BridgeError):
            error_body(outcome)
            error_frame(outcome.message, "")
        elif outcome is not None:
            for encode in (
                lambda: encode_http(FORMS[0], outcome, CONFIG, 1),
                lambda: encode_http(FORMS[1], outcome, CONFIG, 1),
                lambda: encode_generated(FORMS[0], outcome, CONFIG, 1),
                lambda: encode_grpc(replace(FORMS[0], answer_for=None), "", outcome, CONFIG, 1),
            ):
                with suppress(BridgeError):
                    encode()
        told.append(outcome)


def record(ticket: int, flags: int = 0) -> Record:
    context = ResponseContext(error="wrong" if flags & ResponseFlag.ERROR else "")
    return Record(ticket, _NOTHING, (), context, flags, "", ())


class Desk:
    """A ledger with its memory, and batches of requests in it."""

    def __init__(self) -> None:
        self.arena = HostArena(0, 1 << 20)
        self.control = ControlPage(Segment.create(0, ControlPage.SIZE))
        self.ledger = Ledger(self.control, self.arena, BorrowedMemory(self.control.outputs))
        self.flights: dict[int, list[Asked]] = {}
        self.asked: list[Asked] = []
        self.landed: list[InferRequest] = []
        self.closed: list[InferRequest] = []

    def enter(self, size: int) -> None:
        batch = [Asked(self.arena) for _ in range(size)]
        sequence = len(self.asked) + 1
        self.ledger.enter(sequence, [asked.request for asked in batch], None)
        self.flights[sequence] = batch
        self.asked += batch

    def die(self, started_last: int) -> tuple[list[InferRequest], list[InferRequest]]:
        started, unstarted = self.ledger.close(started_last)
        for request in unstarted:
            self.arena.free(request.slot)
        return started, unstarted

    def close(self) -> None:
        self.control.close()
        self.arena.close()
