"""The memory that a stub names: of its outputs, and what it was lent itself."""

import pytest

from gpubridge.host_shm import Segment
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors
from tests.fuzz.fake_stub import FakeStub, record

REGION = 1 << 32
SIZE = 4096
FLOATS = encode_tensors([("OUT", "FP32", [4])])


@pytest.fixture
def fake_stub():
    """Two requests at a stub, which has a region for its outputs."""
    fake_stub = FakeStub()
    segment = Segment.create(REGION, SIZE)
    segment.view[-16:] = b"0123456789abcdef"
    fake_stub.memory.add_segment(segment)
    fake_stub.enter(1)
    fake_stub.enter(1)
    yield fake_stub
    fake_stub.close()


def answer(fake_stub, offset, nbytes):
    """Take an answer of four floats that lies somewhere; returns the outcome."""
    asked = fake_stub.asked[0]
    place = (REGION, offset, nbytes, 0)
    fake_stub.complete((1, [record_encoder()(asked.request.ticket, *FLOATS, place, 0)]))
    return asked.outcomes[0]


def test_an_output_at_the_end_of_its_memory_is_taken(fake_stub):
    (output,) = answer(fake_stub, SIZE - 16, 16).buffers
    assert bytes(output) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("offset", "nbytes", "said"),
    [
        (0, 17, "output 'OUT' of 17 bytes, its shape needs 16"),
        (0, 15, "output 'OUT' of 15 bytes, its shape needs 16"),
        (SIZE - 15, 16, "16 bytes at 4081 of region 0x100000000 under lease 0 do not exist"),
    ],
)
def test_an_output_that_is_a_byte_too_long_is_no_answer(fake_stub, offset, nbytes, said):
    with pytest.raises(MalformedMessage, match=said):
        answer(fake_stub, offset, nbytes)
    assert not fake_stub.asked[0].outcomes


@pytest.mark.parametrize(
    ("before", "behind", "other"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (-1, 1, 0), (0, 0, 1)]
)
def test_a_stub_may_name_what_it_was_lent_and_nothing_beside_it(fake_stub, before, behind, other):
    # That of the other request lies before it.
    asked = fake_stub.asked[1]
    slot = asked.request.slot
    place = (
        slot.segment.region,
        slot.offset - before,
        slot.size + before + behind,
        asked.request.ticket + other,
    )
    if before or behind or other:
        with pytest.raises(ValueError, match="are not lent under ticket"):
            fake_stub.in_flight.find(place)
    else:
        assert fake_stub.in_flight.find(place)[:3] == (slot.segment, slot.offset, slot.size)


@pytest.mark.parametrize("dies", [False, True])
def test_a_request_that_comes_back_has_its_memory_whomever_that_was_handed_on_to(fake_stub, dies):
    asked = fake_stub.asked[1]
    request, slot = asked.request, asked.request.slot
    handed_on = fake_stub.in_flight.find((slot.segment.region, slot.offset, 64, request.ticket))
    if dies:
        (_, returned) = fake_stub.in_flight.close(0)[1]
    else:
        again = record(request.ticket, ResponseFlag.RESCHEDULED)
        (returned,) = fake_stub.complete((2, [again])).returning
    assert returned is request
    assert request.slot is None
    assert [place[:3] for place in request.ranges] == [(slot.segment, slot.offset, 64)]
    del handed_on
    # Also that of the other request.
    assert fake_stub.arena.lent()[0] == 2
    request.ranges = None
    assert fake_stub.arena.lent()[0] == 1
