"""An output on a device reaches only clients that have asked for it there: others cannot read it."""

from types import SimpleNamespace

import pytest

from gpubridge.engine.ipc.decode_response import decode_response
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.device_events import arena_region, reserve_addresses
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record, TensorRef
from gpubridge.transport.signatures import Signature, TensorSpec

REGION = arena_region(3)


@pytest.fixture
def borrowed():
    memory = BorrowedMemory(memoryview(bytearray(16)))
    memory.add_segment(SimpleNamespace(region=REGION, view=reserve_addresses(4096)))
    return memory


def record():
    signature = Signature((TensorSpec("OUT", "FP32", 1, 4),), ())
    return Record(0, signature, ((4,),), ResponseContext(), 0, "", [TensorRef(REGION, 256, 16, 5)])


def test_it_is_handed_on_to_who_has_asked(borrowed):
    request = SimpleNamespace(client=None, context=RequestContext(device="GPU-0"))
    response = decode_response(record(), borrowed, request, lambda ref: None, ())
    assert response.visible() == [None]
    (part,) = response.ranges()
    assert (part.segment.region, part.offset, part.nbytes) == (REGION, 256, 16)


def test_it_is_refused_for_anybody_else(borrowed):
    request = SimpleNamespace(client=None, context=RequestContext())
    with pytest.raises(MalformedMessage, match="an output on a device that was not requested"):
        decode_response(record(), borrowed, request, lambda ref: None, ())
