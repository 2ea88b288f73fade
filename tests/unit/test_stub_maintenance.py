"""The server has stubs return memory that is idle."""

from types import SimpleNamespace

from gpubridge.engine.ipc.stub_connection import StubConnection
from gpubridge.transport.messages import Kind


def test_a_stub_that_is_always_at_work_returns_memory_too():
    told = []
    link = SimpleNamespace(
        release_kept=lambda: None,
        send_control=lambda kind, **_: told.append((kind, link.requests.oldest)),
        requests=SimpleNamespace(oldest=0),
        _trimmed_in=0,
    )
    for batch in (0, 0, 5, 5, 6, 6, 0):
        link.requests.oldest = batch
        StubConnection.maintain(link, 30.0)
    # Once while it executes the same batch: it reads nothing until that ends.
    assert told == [(Kind.TRIM, batch) for batch in (0, 0, 5, 6, 0)]
