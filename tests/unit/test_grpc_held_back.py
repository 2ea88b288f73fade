"""Answers that a client's HTTP/2 windows hold back: for how long, and what ends then."""

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

REQUEST = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())
# SETTINGS_INITIAL_WINDOW_SIZE 0: no answer may be sent before a WINDOW_UPDATE.
NO_WINDOW = frame(4, 0, 0, b"\0\4\0\0\0\0")
TIMEOUT = 60
RESET = frame(3, 0, 1, (11).to_bytes(4, "big"))


def held_back(method, *, end=True):
    """A endpoint with an answer that must wait."""
    endpoint = GrpcEndpoint()
    endpoint.receive(PREFACE + NO_WINDOW + head(1, method) + frame(0, end, 1, REQUEST))
    return endpoint


def widen(endpoint, nbytes, stream_id=1):
    endpoint.receive(frame(8, 0, stream_id, nbytes.to_bytes(4, "big")))


def looked(endpoint, times):
    """Look at the connection at these times; whether the call was reset by then, and when."""
    for time in times:
        # It answers PINGs, so that it is heard.
        endpoint.receive(frame(6, 1, 0, b"keepaliv"))
        endpoint.connection.check(time)
        endpoint.connection._state.flush()
        if RESET in bytes(endpoint.sent):
            return time
    return None


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_an_answer_that_no_window_lets_through_ends_its_call(method):
    endpoint = held_back(method, end=method == "ModelInfer")
    assert looked(endpoint, range(TIMEOUT)) is None
    assert len(endpoint.connection.http2.held_back()) == 1
    assert looked(endpoint, range(TIMEOUT, 100)) == TIMEOUT
    assert endpoint.connection.http2.held_back() == []
    assert endpoint.connection.calls == {}
    assert not endpoint.closed
    # Others on the connection go on.
    endpoint.receive(frame(4, 0, 0, b"\0\4\0\1\0\0"))
    endpoint.receive(head(3, "ModelInfer") + frame(0, 1, 3, REQUEST))
    endpoint.connection._state.flush()
    assert endpoint.statuses()[3] == [0]


async def test_a_window_that_opens_too_slowly_is_as_good_as_closed():
    endpoint = held_back("ModelStreamInfer", end=False)
    for time in range(TIMEOUT):
        assert looked(endpoint, [time]) is None
        widen(endpoint, 1)
        endpoint.receive(frame(0, 0, 1, REQUEST))
    assert looked(endpoint, [TIMEOUT]) == TIMEOUT


async def test_a_client_that_reads_slowly_but_steadily_is_served():
    endpoint = held_back("ModelStreamInfer", end=False)
    for time in range(0, 10 * TIMEOUT, 20):
        assert looked(endpoint, [time]) is None
        for _ in range(400):
            endpoint.receive(frame(0, 0, 1, REQUEST))
        # About 540 bytes a second.
        widen(endpoint, 10_800)
        widen(endpoint, 10_800, 0)
    assert endpoint.connection.http2.held_back()


async def test_time_in_which_nothing_is_held_back_does_not_count():
    endpoint = held_back("ModelStreamInfer", end=False)
    assert looked(endpoint, range(50)) is None
    widen(endpoint, 10_000)
    assert looked(endpoint, range(50, 60)) is None
    endpoint.receive(frame(4, 0, 0, b"\0\4\0\0\0\0"))
    widen_by = 10_000 - len(endpoint.data(1))
    for _ in range(widen_by // 10):
        endpoint.receive(frame(0, 0, 1, REQUEST))
    assert endpoint.connection.http2.held_back()
    assert looked(endpoint, range(60, 120)) is None
    assert looked(endpoint, range(120, 200)) == 120


async def test_a_socket_that_is_full_is_another_matter():
    endpoint = held_back("ModelInfer")
    endpoint.pause_reading = endpoint.resume_reading = lambda: None
    endpoint.connection.pause_writing()
    assert looked(endpoint, range(200)) is None
    endpoint.connection.resume_writing()
    assert looked(endpoint, range(200, 300)) == 260


@pytest.mark.parametrize(("rate", "ends"), [(600, True), (9000, False)])
async def test_an_answer_that_holds_much_has_to_be_let_through_faster(rate, ends):
    endpoint = held_back("ModelStreamInfer", end=False)
    endpoint.connection.http2.send_data(1, [bytes(8 << 20)])
    for time in range(0, 3 * TIMEOUT, 20):
        if looked(endpoint, [time]) is not None:
            break
        widen(endpoint, 20 * rate)
        widen(endpoint, 20 * rate, 0)
    assert (RESET in bytes(endpoint.sent)) is ends
