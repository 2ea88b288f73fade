"""A real server under garbage at every endpoint: a client beside it sees nothing of it, and nothing is left."""

import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.grpc_endpoint import PREFACE, frame, head, message
from tests.process.model_sources import answering
from tests.process.server import running_server, wait_until, write_model
from tests.unit.grpc_requests import raw

triton = pytest.importorskip("tritonclient.http")

_MODEL = answering("return respond(OUT=value * 2)")
_ROUNDS = int(os.environ.get("GPUBRIDGE_FUZZ_EXAMPLES", "40")) * 6
_INFER = b"/v2/models/m/infer"
_DOCUMENT = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[2],"data":[1,2]}]}'
_BINARY = (
    b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[30000],'
    b'"parameters":{"binary_data_size":120000}}]}'
)


def _post(target: bytes, body: bytes, fields: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n%b" % (
        target,
        len(body),
        fields,
        body,
    )


def _http() -> list[bytes]:
    """Requests that are right."""
    length = b"Inference-Header-Content-Length: %d\r\n" % len(_BINARY)
    return [
        b"GET /v2/health/ready HTTP/1.1\r\n\r\n",
        b"GET /v2/models/m/config HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        _post(_INFER, _DOCUMENT),
        _post(_INFER, _BINARY + bytes(120_000), length),
        _post(b"/v2/models/m/generate", b'{"IN":[1,2]}'),
        _post(b"/v2/models/m/generate_stream", b'{"IN":[1,2]}'),
        _post(b"/v2/repository/index", b"{}"),
    ]


def _grpc() -> list[bytes]:
    """Calls that are right, each of a connection."""
    small = raw(("IN", "FP32", [2], bytes(8))).SerializeToString()
    large = raw(("IN", "FP32", [30_000], bytes(120_000))).SerializeToString()
    calls = []
    for method, data in (
        ("ModelInfer", small),
        ("ModelInfer", large),
        ("ModelStreamInfer", small),
        ("ServerMetadata", b""),
        ("ModelConfig", b"\n\1m"),
        ("ModelStatistics", b""),
    ):
        sent = PREFACE + head(1, method)
        content = message(data)
        for at in range(0, len(content), 16_000):
            sent += frame(0, 0, 1, content[at : at + 16_000])
        calls.append(sent + frame(0, 1, 1))
    return calls


def _broken(rng: random.Random, right: list[bytes]) -> bytes:
    """Something that is mostly right."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 3000))
    data = bytearray(b"".join(rng.choices(right, k=rng.randrange(1, 3))))
    for _ in range(rng.randrange(4)):
        # Most of the meaning lies at the beginning.
        at = rng.randrange(min(len(data), rng.choice([200, 1 << 20])) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        else:
            del data[at:]
    return bytes(data)


def _throw(url: str, right: list[bytes], seed: int, rounds: int) -> None:
    """Send broken traffic on connections of their own, and leave in every way there is."""
    rng = random.Random(seed)
    host, port = url.split(":")
    for _ in range(rounds):
        how = rng.randrange(3)
        with socket.create_connection((host, int(port)), timeout=150) as sock:
            try:
                data = _broken(rng, right)
                cut = rng.randrange(len(data) + 1)
                sock.sendall(data[:cut])
                sock.sendall(data[cut:])
                if how == 0:
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
                elif how == 1:
                    sock.settimeout(0.02)
                    sock.recv(1 << 16)
            except TimeoutError:
                # Nothing may have to be said yet; but who has hung up is not kept waiting.
                if how == 0:
                    raise
            except OSError:
                # Cut off: an answer, too.
                pass


def _resources(pid: int) -> tuple[int, int]:
    """Descriptors and resident KiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(rss.split()[1])


def _attack(server, seed: int, rounds: int) -> None:
    wrong: list[object] = []
    over = threading.Event()

    def be_well() -> None:
        client = triton.InferenceServerClient(server.http_url, connection_timeout=150)
        number = 0
        while not over.is_set():
            number += 1
            data = np.full(2 + number % 50, number, np.float32)
            tensor = triton.InferInput("IN", list(data.shape), "FP32").set_data_from_numpy(data)
            try:
                answer = client.infer("m", [tensor]).as_numpy("OUT")
                if not np.array_equal(answer, data * 2):
                    wrong.append(answer)
            except Exception as error:
                wrong.append(error)
        client.close()

    healthy = threading.Thread(target=be_well)
    healthy.start()
    with ThreadPoolExecutor() as pool:
        attacks = [
            pool.submit(_throw, url, right, seed + i, rounds)
            for i, (url, right) in enumerate(
                [
                    (server.http_url, _http()),
                    (server.grpc_url, _grpc()),
                    (server.metrics_url, _http()),
                ]
            )
        ]
    over.set()
    healthy.join()
    for attack in attacks:
        attack.result()
    assert wrong == []


def test_garbage_on_every_port_disturbs_no_client_and_leaves_nothing(tmp_path):
    write_model(tmp_path, "m", _MODEL)
    with running_server(tmp_path) as server:
        stubs = server.stubs()
        # What is made once is made: caches, segments of the arena, buffers of the allocator.
        _attack(server, 1_000, _ROUNDS // 2)
        wait_until(lambda: _resources(server.pid)[0] < 200, "connections to be gone", server)
        before = _resources(server.pid)
        _attack(server, 2_000, _ROUNDS)
        wait_until(
            lambda: _resources(server.pid)[0] <= before[0] + 8, "connections to be gone", server
        )
        assert _resources(server.pid)[1] < before[1] + 64 * 1024
        assert server.stubs() == stubs
        log = server.log()
        assert "Traceback" not in log, log
        assert not [line for line in log.splitlines() if line.startswith("E")], log
        assert server.stop() == 0
