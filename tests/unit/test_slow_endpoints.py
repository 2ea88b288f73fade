"""Endpoints whose readers are slow: they get what is stored in order, and charge what they keep."""

import struct
from types import SimpleNamespace

import orjson

from gpubridge.engine.memory.response_store import ResponseStore
from gpubridge.engine.workers import Workers
from gpubridge.frontend.generate import GenerateStreamHandler
from gpubridge.frontend.openai import OpenAiHandler
from gpubridge.host_shm import Account
from gpubridge.request import InferRequest, InferResponse
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.fuzz.fake_stub import CONFIG, record
from tests.unit.test_response_store import Asked, Stub
from tests.waits import until

OUT = Signature((TensorSpec("OUT", "FP32", 1, 4),), ())
TEXT = Signature((TensorSpec("text_output", "BYTES", 1, None),), ())
HEAVY = 1_300_000


class Exchange:
    """The place of an answer whose client reads all at once."""

    def __init__(self):
        self.account = Account(int)
        self.sent = []
        self.failures = []
        self.ended = False

    def begin(self, status, fields, on_sent, filler):
        self.on_sent = on_sent
        on_sent()

    def send(self, pieces):
        self.sent.append(b"".join(pieces))
        self.on_sent()

    def end(self):
        self.ended = True

    def fail(self, error):
        self.failures.append(error)


async def test_events_keep_their_order_behind_one_that_a_worker_encodes():
    workers = Workers()
    stub = Stub(ResponseStore(1 << 30), workers)
    handler = GenerateStreamHandler(str, None, workers, {}, None)
    exchange = handler._exchange = Exchange()
    handler._model = SimpleNamespace(config=CONFIG, version=1)
    asked = Asked(stub, exchange.account)
    handler._request = asked.request
    asked.request.on_partial, asked.request.on_done = handler._respond, handler._done
    for number in range(5):
        values = [number] * (1 if number else HEAVY // 4)
        data = memoryview(struct.pack(f"<{len(values)}f", *values))
        stub.coming.append(InferResponse(OUT, [(len(values),)], [data]))
        stub.respond(record(asked.ticket, ResponseFlag.OPEN | ResponseFlag.ERROR))
    assert exchange.account.stored > 0
    asked.end()
    await until(lambda: exchange.ended)
    events = [orjson.loads(event.removeprefix(b"data: ")) for event in exchange.sent]
    first = [
        event["OUT"][0] if isinstance(event["OUT"], list) else event["OUT"] for event in events
    ]
    assert first == list(range(5))
    assert exchange.account.stored == 0
    workers.close()
    stub.close()


def test_an_answer_that_is_not_streamed_is_charged_and_bounded():
    store = ResponseStore(1 << 20)
    handler = OpenAiHandler("completions", str, None, None, {}, None)
    handler.store = store
    exchange = handler._exchange = Exchange()
    handler._model = SimpleNamespace(name="m")
    cancelled = []
    request = handler._request = InferRequest(b"", None, 0, (), handler._done)
    request.on_partial, request.cancelled = handler._respond, cancelled.append
    handler._read(b'{"model": "m", "prompt": "x"}')
    piece = struct.pack("<I", 1000) + b"x" * 1000
    charged = []
    for _ in range(1000):
        if not exchange.failures:
            request.respond(InferResponse(TEXT, [(1,)], [memoryview(piece)]))
            charged.append(exchange.account.stored)
    (error,) = exchange.failures
    assert f"which may have {store.limit // 2}" in error.message
    assert len(charged) * len(piece) <= max(charged) * 1.3 <= store.limit
    assert cancelled == [request]
    assert store.used == exchange.account.stored == 0
