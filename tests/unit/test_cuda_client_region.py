"""Clients' device memory: opened and checked, and what is wrong with it is the client's error."""

import pytest

from tests.simcuda.processes import running_worker
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

CLIENT = """
start(told)
pointer = ok(d.cuMemAlloc(1000)); fill(pointer, 4, 1000); ok(d.cuCtxSynchronize())
answer = raw(ok(d.cuIpcGetMemHandle(pointer)))
"""
OPEN = """
handle, size = told
region = open_client_region(context, bytes(handle), size)
answer = [region.size, *seen(region.pointer + 999)]
"""
REFUSED = "answer = refusal(open_client_region, context, bytes(told[0]), told[1])"


# What drivers do when one of two openings in a block is closed.
CLOSING = pytest.mark.parametrize("same_block", ["counted", "closed-once"])


def opened_and_closed(machine):
    opened = [call for call in machine.calls("cuIpcOpenMemHandle") if call.result == 0]
    return len(opened), len(machine.calls("cuIpcCloseMemHandle"))


def test_a_region_is_opened_and_closed_once(machine):
    with running_worker(machine) as client, device_worker(machine) as server:
        handle = client.do(CLIENT, 0)
        assert server.do(OPEN, [handle, 1000]) == [1000, 4]
        assert server.do("answer = region.uuid == context.device.uuid") is True
        server.do("region.close(); region.close()")
    assert opened_and_closed(machine) == (1, 1)


@CLOSING
def test_one_memory_may_be_registered_twice(machine, same_block):
    machine.set(same_block=same_block)
    with running_worker(machine) as client, device_worker(machine) as server:
        handle = client.do(CLIENT, 0)
        server.do(OPEN + "first = region", [handle, 1000])
        server.do(OPEN, [handle, 500])
        assert server.do("first.close(); answer = seen(region.pointer)") == [4]
        server.do("region.close()")
    assert opened_and_closed(machine) == (2, 2 if same_block == "counted" else 1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1001, "expected device memory of 1001 bytes, got 1000; register no more bytes"),
        (0, "expected a size of at least one byte of device memory, got 0"),
        (-1, "expected a size of at least one byte of device memory, got -1"),
    ],
)
def test_more_than_there_is_is_the_clients_error(machine, size, text):
    with running_worker(machine) as client, device_worker(machine) as server:
        kind, code, message = server.do(REFUSED, [client.do(CLIENT, 0), size])
    assert (kind, code) == ("BridgeError", "INVALID_ARG")
    assert message.startswith(text)
    opened, closed = opened_and_closed(machine)
    assert opened == closed


def test_a_handle_that_cannot_be_opened_is_the_clients_error(device_process):
    own = device_process.do("segment = mine(1000); answer = list(segment.handle)")
    for handle in ([1] * 64, own):
        kind, code, message = device_process.do(REFUSED, [handle, 1000])
        assert (kind, code) == ("BridgeError", "INVALID_ARG")
        assert message.startswith("failed to open CUDA IPC handle: cuIpcOpenMemHandle failed: ")


@CLOSING
@pytest.mark.parametrize(("one", "last"), [("first", "second"), ("second", "first")])
def test_two_regions_may_lie_in_one_block(machine, same_block, one, last):
    machine.set(same_block=same_block)
    with running_worker(machine) as client, device_worker(machine) as server:
        handles = [client.do(CLIENT, 0) for _ in range(2)]
        server.do(OPEN + "first = region", [handles[0], 1000])
        server.do(OPEN + "second = region", [handles[1], 1000])
        sees_last = f"answer = seen({last}.pointer + 999)"
        assert server.do(f"{one}.close(); {sees_last}") == [4]
        # One that is refused, and one that is opened anew.
        server.do(REFUSED, [handles[1], 1001])
        assert server.do(sees_last) == [4]
        server.do(OPEN, [handles[1], 1000])
        assert server.do(f"region.close(); {sees_last}") == [4]
        server.do(f"old = {last}.pointer; {last}.close()")
        assert opened_and_closed(machine) == (4, 4 if same_block == "counted" else 1)
        # Nothing stayed open: it is another mapping.
        assert server.do(OPEN, [handles[0], 1000]) == [1000, 4]
        assert server.do("answer = region.pointer >> 21 != old >> 21; region.close()") is True


def test_clients_are_told_of_blocks_that_open_only_once(machine):
    machine.set(same_block="refused")
    with running_worker(machine) as client, device_worker(machine) as server:
        handles = [client.do(CLIENT, 0) for _ in range(2)]
        server.do(OPEN, [handles[0], 1000])
        kind, code, message = server.do(REFUSED, [handles[1], 1000])
        assert (kind, code) == ("BridgeError", "INVALID_ARG")
        assert "only once: register one region" in message
        server.do("region.close()")
        server.do(OPEN, [handles[1], 1000])
        server.do("region.close()")


@pytest.mark.parametrize("peers", [True, False])
def test_memory_of_another_device_is_refused_also_where_devices_reach_each_other(machine, peers):
    if peers:
        machine.allow_peers()
    with running_worker(machine) as client, device_worker(machine) as server:
        handle = client.do(CLIENT, 1)
        with pytest.raises(RuntimeError, match="memory on device 1" if peers else "another GPU"):
            server.do(OPEN, [handle, 1000])
    opened, closed = opened_and_closed(machine)
    assert opened == closed == peers


@pytest.mark.parametrize(("code", "text"), [(2, "OUT_OF_MEMORY"), (700, "ILLEGAL_ADDRESS")])
def test_the_servers_own_trouble_is_not_the_clients(machine, code, text):
    with running_worker(machine) as client, device_worker(machine) as server:
        handle = client.do(CLIENT, 0)
        machine.fail("cuIpcOpenMemHandle", code)
        with pytest.raises(RuntimeError, match=f"^CudaError: .*{text}"):
            server.do(OPEN, [handle, 1000])
