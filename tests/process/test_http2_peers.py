"""gRPC's C core as the client of an echo over HTTP/2 on a real socket."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
import uvloop

from gpubridge.dataplane import GrpcMethods, HeaderFields, Http2Connection, Http2Limits
from gpubridge.frontend.grpc import connection as events_of

HEAD = HeaderFields([(b":status", b"200"), (b"content-type", b"application/grpc")], repeat=True)
DONE = HeaderFields([(b"grpc-status", b"0")], repeat=True)
LARGE = 5 << 20


class Echo(asyncio.BufferedProtocol):
    """Unary calls: /echo/now answers with what came, /echo/never does not answer."""

    seen: list[Echo]

    def __init__(self):
        self.connection = Http2Connection(GrpcMethods([]), Http2Limits())
        self.paused = False
        self.calls, self.targets, self.paths, self.resets = {}, {}, {}, []
        self.closed_with = None
        self.reads = 0
        self.copied = 0
        self.seen.append(self)

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
        self.flush()

    def connection_lost(self, exc):
        self.connection.lost()

    def get_buffer(self, sizehint):
        return self.connection.memory()

    def buffer_updated(self, nbytes):
        self.reads += 1
        self.take(self.connection.received(nbytes, time.monotonic()))
        self.flush()

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self.flush()

    def flush(self):
        while not self.paused and (outcome := self.connection.flush(-1)):
            left, events, _ = outcome
            self.take(events)
            if not left:
                break
            self.transport.writelines(left)
        if self.connection.closed and not self.paused:
            self.transport.close()

    def take(self, events):
        handlers = {
            events_of.BEGIN: self.on_headers,
            events_of.DATA: self.on_data,
            events_of.FILLED: self.on_filled,
            events_of.RESET: self.on_reset,
            events_of.CLOSED: self.on_closed,
        }
        for kind, stream_id, *said in events:
            handlers.get(kind, lambda *_: None)(stream_id, *said)

    def on_headers(self, stream_id, method, headers, end):
        self.calls[stream_id] = b""
        self.paths[stream_id] = headers.path

    def on_data(self, stream_id, view, end):
        if stream_id in self.targets:
            # It was received before the place for it was named.
            whole, at = self.targets[stream_id]
            whole[at : at + len(view)] = view
            self.copied += len(view)
            self.name_place(stream_id, whole, at + len(view), end)
            return
        message = self.calls[stream_id] = self.calls[stream_id] + view
        if end:
            self.answer(stream_id, [message])
        elif len(message) >= 5:
            size = 5 + int.from_bytes(message[1:5], "big")
            if size > len(message):
                whole = bytearray(size)
                whole[: len(message)] = message
                self.name_place(stream_id, whole, len(message), end)

    def name_place(self, stream_id, whole, at, end):
        self.targets[stream_id] = whole, at
        if at < len(whole):
            self.connection.receive_into(stream_id, memoryview(whole)[at:])
        else:
            self.on_filled(stream_id, end)

    def on_filled(self, stream_id, end):
        self.copied += self.connection.copied(stream_id)
        self.calls[stream_id] = memoryview(self.targets.pop(stream_id)[0])
        if end:
            self.answer(stream_id, [self.calls[stream_id]])

    def answer(self, stream_id, message):
        if self.paths[stream_id] == b"/echo/now":
            self.connection.send_response(stream_id, HEAD, message, DONE)

    def on_reset(self, stream_id, code):
        self.resets.append(code)

    def on_closed(self, stream_id, code, text):
        self.closed_with = (code, text)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def echo(request):
    """Serve on a thread; return a channel to it, and the connections it sees."""
    Echo.seen = []
    loop = request.param()
    server = loop.run_until_complete(loop.create_server(Echo, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            yield channel, Echo.seen
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for connection in Echo.seen:
            connection.transport.abort()
        server.close()
        loop.run_until_complete(server.wait_closed())
        loop.close()
    assert [connection.closed_with for connection in Echo.seen if connection.closed_with] == []


def test_small_calls(echo):
    channel, _ = echo
    call = channel.unary_unary("/echo/now")
    for size in (0, 1, 10, 4000, 20_000, 100_000):
        assert call(b"x" * size, timeout=150) == b"x" * size


def test_large_messages_both_ways(echo):
    channel, seen = echo
    message = bytes(range(256)) * (LARGE // 256)
    call = channel.unary_unary("/echo/now")
    assert call(message, timeout=150) == message
    assert call(message, timeout=150) == message
    # All but what came with a frame's header went straight to its place.
    assert 0 < seen[0].copied < LARGE // 8


def test_many_calls_at_once(echo):
    channel, seen = echo
    call = channel.unary_unary("/echo/now")
    pending = [call.future(b"%d" % n * 100, timeout=150) for n in range(200)]
    assert [future.result() for future in pending] == [b"%d" % n * 100 for n in range(200)]
    assert seen[0].connection.open_streams == 0


def test_a_cancelled_call_is_told_and_the_others_go_on(echo):
    channel, seen = echo
    never = channel.unary_unary("/echo/never").future(b"x")
    now = channel.unary_unary("/echo/now")
    assert now(b"first", timeout=150) == b"first"
    assert never.cancel()
    deadline = time.monotonic() + 30
    while not seen[0].resets and time.monotonic() < deadline:
        assert now(b"again", timeout=150) == b"again"
    assert seen[0].resets == [8]
    assert now(b"last", timeout=150) == b"last"
