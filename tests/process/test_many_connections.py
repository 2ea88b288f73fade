"""Many connections at once, half of them slow: the others do not fail, and nothing is left behind."""

import asyncio

import pytest

from benchmarks.many_connections import fast_half, slow_half, write_models
from tests.process.raw_http import connected, inference
from tests.process.server import open_files, running_server, wait_until
from tests.waits import until

SECONDS = 4.0
EACH = 40
ASK = (
    b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}],'
    b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}'
)
MOST_AHEAD = 40


@pytest.fixture(scope="module")
def server(repository):
    write_models(repository)
    # Slow ones are cut off soon, and come again.
    flags = ("--http-header-timeout=2", "--http-body-timeout=2", "--http-send-timeout=2")
    with running_server(repository, *flags) as running:
        yield running


def sockets(server) -> int:
    return sum(link.startswith("socket:") for link in open_files(server.pid))


def test_half_of_them_slow(server):
    asyncio.run(fast_half(server.http_url, 4, 0.5))
    before = sockets(server)

    async def both():
        async with slow_half(server.http_url, EACH) as slow:
            fast = await fast_half(server.http_url, EACH, SECONDS)
            await until(lambda: slow.cut_off > EACH / 2)
        return fast

    fast = asyncio.run(both())
    assert fast.failures == []
    assert len(fast.latencies) > EACH
    wait_until(lambda: sockets(server) <= before, "slow clients to be gone", server)


def answered(server) -> float:
    """Return the number of requests that its large model has answered."""
    metrics = server.metrics()
    return sum(
        count
        for name, count in metrics.items()
        if name.startswith("nv_inference_request_success{") and '"large"' in name
    )


def test_a_client_that_sends_ahead_and_does_not_read_holds_little(server):
    """A client asks 2,000 times for 6 MiB, and reads nothing."""
    before = answered(server)
    with connected(server.http_url, receive_bytes=4096) as sock:
        sock.sendall(inference("large", ASK) * 2000)
        wait_until(lambda: answered(server) > before, "the first answer")
        asyncio.run(fast_half(server.http_url, 2, 1.0))
        assert answered(server) - before <= MOST_AHEAD
    assert asyncio.run(fast_half(server.http_url, 2, 0.3)).failures == []
