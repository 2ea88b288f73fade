"""A gRPC connection without a socket: a transport that keeps what is sent, models that answer at once."""

from __future__ import annotations

import asyncio
import threading

from hpack import Decoder, Encoder

from gpubridge.config import GrpcConnections
from gpubridge.dataplane import GrpcMethods, IdleConnections, TraceSampling
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.workers import _THREADS, Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.control import ControlTasks
from gpubridge.frontend.grpc.call import Opening, UnaryCall
from gpubridge.frontend.grpc.connection import GrpcConnection
from gpubridge.frontend.grpc.infer import InferCall, InferEndpoint
from gpubridge.frontend.grpc.packing import MessageCoder
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.frontend.grpc.stream import StreamCall
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.request import InferResponse
from gpubridge.telemetry.failed_requests import FailedRequests
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.unit.model_configs import model_config

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
CONFIG = model_config("A FP32 [-1];S STRING [1] optional: true", "OUT FP32 [-1]")
_DECOUPLED = model_config(
    "A FP32 [-1]", "OUT FP32 [-1]", "model_transaction_policy { decoupled: true }"
)
_OUT = Signature((TensorSpec("OUT", "FP32", 1, 4),), ())
_MESSAGE_LIMIT = 1 << 20
_CONTROL = 2
_UNTRACED = TraceSampling()
_WORKERS = Workers()
_SERVICE = b"/inference.GRPCInferenceService/"
_METHODS = GrpcMethods(
    [
        (_SERVICE + b"ModelInfer", 0, _MESSAGE_LIMIT),
        (_SERVICE + b"ModelStreamInfer", 1, _MESSAGE_LIMIT),
        (_SERVICE + b"ModelConfig", 2, _MESSAGE_LIMIT),
    ]
)


async def workers_are_idle() -> None:
    """Wait until the workers of all endpoints have done what they were given."""
    together = threading.Barrier(_THREADS)
    await asyncio.gather(*(_WORKERS.outcome(together.wait) for _ in range(_THREADS)))


def frame(kind, flags, stream_id, payload=b""):
    return (
        len(payload).to_bytes(3, "big")
        + bytes((kind, flags))
        + stream_id.to_bytes(4, "big")
        + payload
    )


def head(stream_id, method, *fields, end=False, verb="POST"):
    """The HEADERS of a call."""
    block = Encoder().encode(
        [
            (":method", verb),
            (":scheme", "http"),
            (":path", f"/inference.GRPCInferenceService/{method}"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            *fields,
        ]
    )
    return frame(1, 4 | end, stream_id, block)


def message(data, flag=0, length=None):
    """A gRPC message with its prefix."""
    return bytes((flag,)) + (len(data) if length is None else length).to_bytes(4, "big") + data


class Model:
    """Answers with the first element of A at once, or keeps requests until the test lets it."""

    version = 1

    def __init__(self, endpoint: GrpcEndpoint, config) -> None:
        self.endpoint = endpoint
        self.config = config
        self.name = config.name
        self.statistics = ModelStatistics(config.name, 1)

    def submit(self, request, received=None):
        request.cancelled = self.endpoint.cancelled.append
        self.endpoint.submitted += 1
        if self.endpoint.deferred:
            self.endpoint.waiting.append((self, request))
        else:
            self.answer(request)

    def answer(self, request):
        slot, request.slot = request.slot, None
        begin, nbytes = request.places[0]
        begin += request.start
        first = bytes(slot.memory[begin : begin + min(nbytes, 4)])
        self.endpoint.regions.arena(self.config.name).free(slot)
        response = InferResponse(_OUT, ((len(first) // 4,),), [memoryview(first)])
        if self.config.decoupled:
            request.respond(response)
            request.finish(None)
        else:
            request.finish(response)


class GrpcEndpoint:
    """The connection, its transport (which it is itself), and its service: its own, or another one's."""

    def __init__(
        self,
        *,
        deferred: bool = False,
        beside: GrpcEndpoint | None = None,
        arena_limit: int = 8 << 20,
    ) -> None:
        self.deferred = deferred
        self.submitted = 0
        self.cancelled: list = []
        self.waiting: list = []
        self._tasks = ControlTasks()
        if beside is None:
            regions = Regions(arena_limit)
            self.regions = regions
            self._memory = RequestMemory(
                regions, ClientRegions(regions, DeviceManager(0), allowed=True, most=4)
            )
            self._forms = self._new_forms()
            coder = MessageCoder(_WORKERS, regions.budget)
            self.infer = InferEndpoint(0, self._forms, self._memory, _UNTRACED, coder)
            self.connections: set = set()
            self.idle = IdleConnections()
        else:
            self.regions, self._memory = beside.regions, beside._memory
            self._forms, self.connections = beside._forms, beside.connections
            self.infer, self.idle = beside.infer, beside.idle
        self.coder = MessageCoder(_WORKERS, self.regions.budget)
        self.failures = FailedRequests()
        self.sent = bytearray()
        self._split: list[tuple[int, int, int, bytes]] = []
        self._split_bytes = 0
        self.closed = False
        self.connection = GrpcConnection(self, GrpcConnections(), self.connections)
        self.connection.connection_made(self)

    def _new_forms(self) -> FormCache:
        models = {"m": Model(self, CONFIG), "d": Model(self, _DECOUPLED)}
        for model in models.values():
            self.regions.arena(model.config.name)

        def find(name, version):
            if name not in models:
                raise BridgeError(f"no {name!r}", ErrorCode.NOT_FOUND)
            return models[name]

        return FormCache(find, self.regions.arena)

    methods = _METHODS

    def open(self, method, connection, stream_id, headers):
        if method < 0:
            raise CallFailed(Status.UNIMPLEMENTED, "")
        opening = Opening(connection, stream_id, headers, _MESSAGE_LIMIT)
        if method == _CONTROL:
            return UnaryCall(opening, lambda message: b"%d" % len(message), self._tasks)
        kind = (InferCall, StreamCall)[method]
        return kind(opening, self._forms, self._memory)

    def get_extra_info(self, name):
        return self if name == "socket" else None

    def fileno(self):
        return -1  # neither read from nor written to: what comes, comes through `get_buffer`

    def set_write_buffer_limits(self, *, high):
        assert high == 0

    def write(self, data):
        assert not self.closed
        self.sent += data

    def writelines(self, parts):
        for part in parts:
            self.write(part)

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return 0

    def close(self):
        self.closed = True

    abort = close

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            view = memoryview(piece)
            while view and not self.closed:
                buffer = self.connection.get_buffer(-1)
                taken = min(len(buffer), len(view))
                assert taken
                buffer[:taken] = view[:taken]
                view = view[taken:]
                self.connection.buffer_updated(taken)

    async def settle(self, turns: int = 1) -> None:
        """Let what is due in some turns of the event loop be sent, and kept requests be answered."""
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting, self.waiting = self.waiting, []
        for model, request in waiting:
            model.answer(request)
        await asyncio.sleep(0)

    def end(self) -> None:
        """Let the client's end of file arrive, as asyncio would tell it."""
        if not self.closed and not self.connection.eof_received():
            self.close()

    def lose(self) -> None:
        self.closed = True
        self.connection.connection_lost(None)

    def statuses(self, name: str = "grpc-status") -> dict[int, list[int]]:
        """The grpc-status, or another number, of each stream that has one."""
        found: dict[int, list[int]] = {}
        decoder = Decoder()
        for kind, flags, stream_id, payload in self._frames():
            if kind == 1:
                assert flags & 4
                fields = dict(decoder.decode(payload))
                if name in fields:
                    found.setdefault(stream_id, []).append(int(fields[name]))
        return found

    def data(self, stream_id: int) -> bytes:
        """Return the messages sent on a stream, prefixes included."""
        return b"".join(
            payload for kind, _, of, payload in self._frames() if (kind, of) == (0, stream_id)
        )

    def _frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of all frames; whole ones only were sent."""
        at = self._split_bytes
        while at < len(self.sent):
            length = int.from_bytes(self.sent[at : at + 3], "big")
            kind, flags = self.sent[at + 3], self.sent[at + 4]
            stream_id = int.from_bytes(self.sent[at + 5 : at + 9], "big")
            payload = bytes(self.sent[at + 9 : at + 9 + length])
            assert len(payload) == length
            at += 9 + length
            self._split.append((kind, flags, stream_id, payload))
        self._split_bytes = at
        return self._split
