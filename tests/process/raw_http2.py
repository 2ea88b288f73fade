"""HTTP/2 by hand: clients that begin, and then do nothing more."""

import socket
import struct
import threading
from contextlib import contextmanager, suppress

from hpack import Encoder

from tests.process.raw_http import connected

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
HEADERS, PING, GOAWAY = 1, 6, 7


def frames(sock):
    """Type and payload of each frame until the server closes."""
    data = b""
    while True:
        while len(data) < 9:
            piece = sock.recv(1 << 16)
            if not piece:
                return
            data += piece
        length = int.from_bytes(data[:3], "big")
        kind = data[3]
        while len(data) < 9 + length:
            data += sock.recv(1 << 16)
        yield kind, data[9 : 9 + length]
        data = data[9 + length :]


def kinds_until_cut_off(sock):
    """Types of the frames that come before the server closes, or resets the connection."""
    kinds = []
    try:
        for kind, _ in frames(sock):
            kinds.append(kind)
    except ConnectionError:
        pass
    return kinds


def goaway(sock):
    """Code and text of the server's last words."""
    said = [payload for kind, payload in frames(sock) if kind == GOAWAY]
    _, number = struct.unpack(">II", said[-1][:8])
    return number, said[-1][8:]


def open_stream(sock, method=b"ModelStreamInfer"):
    """Open a call by hand: its HEADERS."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", b"/inference.GRPCInferenceService/" + method),
        (":authority", "x"),
        ("content-type", "application/grpc"),
    ]
    block = Encoder().encode(fields)
    sock.sendall(PREFACE)
    sock.sendall(len(block).to_bytes(3, "big") + bytes((1, 4)) + (1).to_bytes(4, "big") + block)


def send_data(sock, data):
    """Send part of the call's request."""
    sock.sendall(len(data).to_bytes(3, "big") + bytes((0, 0)) + (1).to_bytes(4, "big") + data)


@contextmanager
def tapped(url):
    """Give the address of a way to a server, and how many bytes came back on it, piece by piece."""
    seen = []
    with connected(url) as upstream, socket.create_server(("127.0.0.1", 0)) as listener:

        def forth(client):
            with suppress(OSError):
                while piece := client.recv(1 << 16):
                    upstream.sendall(piece)

        def back():
            client, _ = listener.accept()
            with client, suppress(OSError):
                sender = threading.Thread(target=forth, args=(client,))
                sender.start()
                while piece := upstream.recv(1 << 16):
                    seen.append(len(piece))
                    client.sendall(piece)
                client.shutdown(socket.SHUT_RDWR)
                sender.join()

        receiver = threading.Thread(target=back)
        receiver.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", seen
        finally:
            upstream.shutdown(socket.SHUT_RDWR)
            receiver.join()
