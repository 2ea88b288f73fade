"""Segments are pinned whole and once; what cannot be pinned is a value with a reason."""

import pytest

pytest.importorskip("cuda.bindings")

START = """
from gpubridge.host_shm import Segment
host = Segment.create(1, 8192)
memory = PinnedMemory(context)
"""


def test_a_pinned_segment_is_copied_without_staging(machine, worker):
    assert worker.do("answer = [memory.pin(host.view), memory.pin(host.view), memory.nbytes]") == [
        True,
        True,
        8192,
    ]
    worker.do(
        "copies = CopyStream(context); segment = mine(4096)\n"
        "copies.h2d(segment.pointer, host.view[4096:], 4096)\n"
        "copies.d2h(host.view, segment.pointer, 4096); copies.wait()"
    )
    assert machine.calls("cuMemcpyHtoDAsync")[0].arguments == (4096, 1)
    assert machine.calls("cuMemcpyDtoHAsync")[0].arguments == (4096, 1)
    assert [call.arguments[0] for call in machine.calls("cuMemHostRegister")] == [8192]


def test_the_segment_stays_its_owners(machine, worker):
    worker.do("memory.pin(host.view); memory.unpin(host.view); memory.unpin(host.view)")
    assert worker.do("answer = memory.nbytes") == 0
    worker.do("memory.pin(host.view); memory.close(); memory.close(); host.close()")
    assert len(machine.calls("cuMemHostUnregister")) == 2


@pytest.mark.parametrize("code", [801, 2])
def test_a_failed_pinning_names_its_reason(machine, worker, code):
    machine.fail("cuMemHostRegister", code)
    assert worker.do("answer = [memory.pin(host.view), memory.nbytes]") == [False, 0]
    reason = worker.do("answer = memory.reason")
    assert reason.startswith("cuMemHostRegister failed: CUDA_ERROR_")
    worker.do("memory.unpin(host.view); memory.close()")
    assert machine.calls("cuMemHostUnregister") == []


def test_a_lost_context_is_no_reason_but_an_error(machine, worker):
    machine.fail("cuMemHostRegister", 719)
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
        worker.do("memory.pin(host.view)")


def test_memory_pinned_by_others_stays_pinned(machine, worker):
    worker.do("first = PinnedMemory(context); first.pin(host.view)")
    assert worker.do("answer = memory.pin(host.view)") is False
    worker.do("memory.close()")
    assert machine.calls("cuMemHostUnregister") == []


def test_no_memory_and_half_of_a_segment_are_misuse(worker):
    for misuse in ("host.view[:0]", "host.view.toreadonly()"):
        with pytest.raises(RuntimeError, match="at least one byte, and a writable one"):
            worker.do(f"memory.pin({misuse})")
    worker.do("memory.pin(host.view)")
    with pytest.raises(RuntimeError, match="8192 bytes are pinned where 100"):
        worker.do("memory.pin(host.view[:100])")
