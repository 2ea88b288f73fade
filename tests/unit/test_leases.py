"""Leases: memory is lent until its last reference ends, no longer and no shorter."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from gpubridge import dataplane
from gpubridge.host_shm import HostArena
from gpubridge.pb_utils import Tensor
from gpubridge.tensor import native
from gpubridge.transport import leases
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.leases import BorrowedMemory, LentSlots, read_only_id

LEASES = 8


@pytest.fixture(params=["native", "python"], scope="module", autouse=True)
def implementation(request):
    if request.param == "native" and native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(leases, "native", lambda: None)
        yield request.param


class Wall:
    """Both sides of the wall in one process, over one table."""

    def __init__(self):
        self.table = memoryview(bytearray(LEASES))
        self.arena = HostArena(7, 64 << 20)
        self.lender = LentSlots(self.table, self.arena.free)
        self.borrower = BorrowedMemory(self.table)

    def lend(self, data):
        slot = self.arena.allocate(len(data))
        slot.memory[: len(data)] = data
        region = slot.segment.region
        if region not in self.borrower._segments:
            self.borrower.announce(region, os.dup(slot.segment.fd), slot.segment.size)
        return slot, self.lender.lend(slot)

    def view(self, slot, lease, at=0, nbytes=None):
        nbytes = slot.size - at if nbytes is None else nbytes
        (view,) = self.borrower.views([(slot.segment.region, slot.offset + at, nbytes, lease)])
        return view


@pytest.fixture
def wall():
    wall = Wall()
    yield wall
    wall.borrower.close()
    wall.arena.close()


def test_a_view_shows_the_lent_bytes_and_is_writable(wall):
    slot, lease = wall.lend(b"abcdef")
    view = wall.view(slot, lease, 2, 3)
    assert bytes(view) == b"cde"
    view[0] = ord("x")
    assert slot.memory[2] == ord("x")
    assert (view.format, view.ndim, view.contiguous) == ("B", 1, True)


SPECS = (("INPUT", "INT16"), ("OTHER", "UINT8"))
SHAPES = ((1, 2), (2,))


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("read_only", [True, False])
def test_tensors_are_of_the_lent_bytes(wall, placed, read_only):
    slot, lease = wall.lend(bytes(range(6)))
    refs = [
        (slot.segment.region, slot.offset + at, nbytes, lease) for at, nbytes in ((0, 4), (4, 2))
    ]
    tensors = wall.borrower.tensors(refs, SPECS, SHAPES, Tensor, placed, read_only)
    assert [type(tensor) for tensor in tensors] == [Tensor, Tensor]
    made = [(t.name(), t._datatype, t._shape, t._place) for t in tensors]
    assert made == [
        (*spec, shape, ref if placed else None)
        for spec, shape, ref in zip(SPECS, SHAPES, refs, strict=True)
    ]
    first, second = (tensor.as_numpy() for tensor in tensors)
    assert first.tolist() == [[0x0100, 0x0302]]
    assert second.tolist() == [4, 5]
    assert first.flags.writeable is second.flags.writeable is not read_only
    del first, tensors
    assert wall.table[lease] == 1
    del second
    assert wall.table[lease] == 0


def test_tensors_without_bytes_need_no_region(wall):
    (tensor,) = wall.borrower.tensors([(0, 0, 0, NO_LEASE)], [("E", "FP32")], [(0,)], Tensor)
    assert tensor.as_numpy().shape == (0,)
    assert not wall.borrower.book.held


def test_tensors_of_places_that_do_not_exist_are_refused(wall):
    slot, lease = wall.lend(b"abcdef")
    for ref in ((5, 0, 1, lease), (slot.segment.region, 0, 1 << 40, lease)):
        with pytest.raises(MalformedMessage, match="do not exist"):
            wall.borrower.tensors([ref], [("X", "UINT8")], [(1,)], Tensor)
    assert wall.table[lease] == 1


def test_byte_is_set_until_the_last_view_dies(wall):
    slot, lease = wall.lend(b"abcdef")
    assert wall.table[lease] == 1
    first, second = wall.view(slot, lease, 0, 3), wall.view(slot, lease, 3, 3)
    assert not wall.lender.reclaim(lease)
    del first
    assert wall.table[lease] == 1
    del second
    assert wall.table[lease] == 0
    assert wall.lender.reclaim(lease)
    assert wall.arena.lent() == (0, 0)


def torch_tensor(view):
    torch = pytest.importorskip("torch")
    # No collection searches its hundreds of thousands of objects, then.
    gc.freeze()
    return torch.from_numpy(np.frombuffer(view, np.float32))[1:]


DERIVED = {
    "a tensor of PyTorch's": torch_tensor,
    "a slice": lambda view: view[1:3],
    "another format": lambda view: view.cast("I"),
    "a view of the view": memoryview,
    "an array": lambda view: np.frombuffer(view, np.float32),
    "an array of a slice": lambda view: np.frombuffer(view[4:8], np.uint8),
    "part of an array": lambda view: np.frombuffer(view, np.uint8).reshape(4, 4)[1:, ::2],
    "a buffer of an array": lambda view: np.frombuffer(view, np.uint8).data,
    "an array as array": lambda view: np.asarray(memoryview(view)),
    "a transport's write": lambda view: memoryview(view).cast("b")[5:],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_everything_made_of_a_view_keeps_the_lease(wall, derive):
    slot, lease = wall.lend(bytes(range(16)))
    derived = derive(wall.view(slot, lease, 0, 16))
    gc.collect()
    assert wall.table[lease] == 1
    del derived
    gc.collect()
    assert wall.table[lease] == 0


def test_the_last_view_may_die_on_another_thread(wall):
    slot, lease = wall.lend(bytes(16))
    box = [wall.view(slot, lease)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert wall.table[lease] == 0


def test_views_die_on_many_threads_while_others_are_made(wall):
    rounds = 200
    lent = [wall.lend(bytes(16)) for _ in range(LEASES)]

    def drop(lease, slot):
        for _ in range(rounds):
            views = [wall.view(slot, lease) for _ in range(3)]
            assert wall.table[lease] == 1
            views.clear()
            assert wall.table[lease] == 0
            wall.table[lease] = 1

    threads = [threading.Thread(target=drop, args=(lease, slot)) for slot, lease in lent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wall.borrower.book.held
    assert bytes(wall.table) == b"\1" * LEASES


def test_leases_of_different_slots_do_not_mix(wall):
    (one, first), (two, second) = wall.lend(b"one!"), wall.lend(b"two!")
    a, b = wall.view(one, first, 0, 4), wall.view(two, second, 0, 4)
    del a
    assert (wall.table[first], wall.table[second]) == (0, 1)
    assert bytes(b) == b"two!"


def test_a_kept_slot_is_not_lent_again(wall):
    slot, lease = wall.lend(b"kept" * 1024)
    kept = wall.view(slot, lease)
    places = set()
    for _ in range(3 * 256):
        other = wall.arena.allocate(4096)
        places.add((other.segment.region, other.offset))
    assert (slot.segment.region, slot.offset) not in places
    assert bytes(kept[:4]) == b"kept"


def test_sweeping_reclaims_only_what_is_back(wall):
    lent = [wall.lend(bytes(16)) for _ in range(4)]
    views = [wall.view(slot, lease) for slot, lease in lent]
    views[0] = views[2] = None
    wall.lender.sweep()
    assert len(wall.lender) == 2
    assert wall.arena.lent()[0] == 2
    wall.lender.sweep()
    assert len(wall.lender) == 2


def test_leases_that_stay_out_do_not_hold_up_those_behind_them(wall):
    slow = [wall.lend(bytes(16)) for _ in range(LEASES - 1)]
    views = [wall.view(slot, lease) for slot, lease in slow]
    for _ in range(50):
        slot, lease = wall.lend(bytes(16))
        view = wall.view(slot, lease)
        wall.lender.sweep_oldest()
        assert len(wall.lender) == LEASES
        del view
        for _ in range(LEASES):
            wall.lender.sweep_oldest()
        assert len(wall.lender) == LEASES - 1
    views.clear()
    for _ in range(LEASES):
        wall.lender.sweep_oldest()
    assert len(wall.lender) == 0


def test_leases_run_out_and_come_back(wall):
    lent = [wall.lend(bytes(16)) for _ in range(LEASES)]
    assert wall.lender.exhausted
    views = [wall.view(slot, lease) for slot, lease in lent]
    views.pop()
    wall.lender.sweep()
    assert not wall.lender.exhausted


def test_a_number_without_a_slot_is_reclaimed_at_once(wall):
    lease = wall.lender.lend(None)
    assert wall.table[lease] == 0
    assert wall.lender.reclaim(lease)
    assert wall.arena.lent() == (0, 0)


def test_recall_takes_the_slot_back_from_a_dead_borrower(wall):
    slot, lease = wall.lend(bytes(16))
    view = wall.view(slot, lease)
    wall.lender.recall(lease)
    assert wall.arena.lent() == (0, 0)
    assert wall.arena.allocate(16).offset == slot.offset
    assert len(view)


def test_a_fork_clears_only_its_own_table(wall):
    slot, lease = wall.lend(bytes(16))
    view = wall.view(slot, lease)
    private = memoryview(bytearray(wall.table))
    wall.borrower.forget(private)
    del view
    assert (private[lease], wall.table[lease]) == (0, 1)


def test_no_bytes_need_no_region(wall):
    assert list(wall.borrower.views([(99, 0, 0, NO_LEASE)])) == [b""]


@pytest.mark.parametrize(
    ("region", "offset", "nbytes", "lease"),
    [
        (1, 0, 16, 0),
        (None, 1 << 20, 1, 0),
        (None, (1 << 20) - 1, 2, 0),
        (None, (1 << 64) - 1, 1, 0),
        (None, 0, (1 << 64) - 1, 0),
        (None, 0, 16, LEASES),
        (None, 0, 16, NO_LEASE),
        (None, 0, 0, LEASES),
    ],
)
def test_places_that_do_not_exist_are_refused(wall, region, offset, nbytes, lease):
    slot, _ = wall.lend(bytes(16))
    with pytest.raises(MalformedMessage, match="do not exist"):
        wall.borrower.views(
            [(slot.segment.region if region is None else region, offset, nbytes, lease)]
        )
    assert not wall.borrower.book.held


def test_views_outlive_their_region(wall):
    slot, lease = wall.lend(b"abcd")
    view = wall.view(slot, lease, 0, 4)
    wall.borrower.drop(slot.segment.region)
    assert bytes(view) == b"abcd"
    del view
    assert wall.table[lease] == 0


def test_memory_to_be_read_only_gives_views_that_say_so(wall):
    slot, lease = wall.lend(b"abcd")
    region = read_only_id(slot.segment.region)
    wall.borrower.announce(region, os.dup(slot.segment.read_only_fd), slot.segment.size)
    (view,) = wall.borrower.views([(region, slot.offset, 4, lease)])
    assert (bytes(view), view.readonly) == (b"abcd", True)
    with pytest.raises(TypeError):
        view[0] = 1
    # The other id of the same memory is mapped beside it, to be written to.
    other = wall.view(slot, lease, 0, 4)
    other[0] = ord("x")
    assert bytes(view) == b"xbcd"
    del view, other
    wall.borrower.drop(region)


def test_views_of_owned_memory_keep_its_owner():
    class Owner:
        pass

    owner, memory = Owner(), memoryview(bytearray(b"abcd"))
    gone = weakref.ref(owner)
    views = [dataplane.owned_view(memory[1:3], owner)]
    memory.release()
    del owner
    views[0][0] = ord("x")
    views.append(views.pop()[:1])
    assert (bytes(views[0]), gone() is None) == (b"x", False)
    views.clear()
    assert gone() is None
    with pytest.raises(TypeError, match="read-only"):
        dataplane.owned_view(b"ab", None)[0] = 1
