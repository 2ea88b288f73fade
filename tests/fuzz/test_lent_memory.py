"""Memory that is lent and given back, in any order and at any place: nothing overlaps, and nothing is lost."""

import ctypes

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.tensor import native
from gpubridge.transport.lease_book import LeaseBook
from tests.fuzz.budget import fuzzed

pytestmark = pytest.mark.skipif(native.native() is None, reason=str(native.absence()))

_REGIONS = [1 << 32, 2 << 32]
_LEASES = 4
_NUMBERS = st.sampled_from([0, 1, 16, 63, 64, 65, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
_REFS = st.one_of(
    st.tuples(
        st.sampled_from(_REGIONS),
        st.integers(0, 48),
        st.integers(0, 20),
        st.integers(0, _LEASES - 1),
    ),
    st.tuples(
        st.sampled_from([*_REGIONS, 0, (1 << 64) - 1]),
        _NUMBERS,
        _NUMBERS,
        st.sampled_from([0, _LEASES - 1, _LEASES, 0xFFFF_FFFF, 1 << 63]),
    ),
)


class Borrower:
    """A book of leases, regions that are known to it, and the views that it has made."""

    def __init__(self, book):
        self.table = bytearray(_LEASES)
        self.book = book(memoryview(self.table))
        self.memory = [bytearray(range(64)), bytearray(range(100, 164))]
        self.views = []

    def step(self, kind, number, refs):
        """Do one thing; returns what is seen of it."""
        found = None
        if kind == "know":
            self.book.add(_REGIONS[number % 2], memoryview(self.memory[number % 2]))
        elif kind == "forget":
            # Of one that is not known there is no word.
            if number % 2 in self.known:
                self.book.remove(_REGIONS[number % 2])
        elif kind == "drop" and self.views:
            del self.views[number % len(self.views)]
        elif kind == "look":
            # The lender sets the bytes before it names the leases.
            for *_, lease in refs:
                if lease < _LEASES:
                    self.table[lease] = 1
            try:
                views = self.book.views(refs)
            except ValueError:
                found = "refused"
            else:
                found = [bytes(view) for view in views]
                self.views.append(views)
        self.known = self.known | {number % 2} if kind == "know" else self.known
        self.known = self.known - {number % 2} if kind == "forget" else self.known
        return found, bytes(self.table), self.book.held

    known: frozenset[int] = frozenset()


@fuzzed()
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["know", "look", "look", "look", "drop", "drop", "forget"]),
            st.integers(0, 7),
            st.lists(_REFS, max_size=4),
        ),
        max_size=30,
    )
)
def test_both_books_lend_the_same_and_end_the_same_leases(steps):
    sides = [Borrower(native.native().LeaseBook), Borrower(LeaseBook)]
    for step in [("know", 0, []), ("know", 1, []), *steps]:
        seen, wanted = (side.step(*step) for side in sides)
        if seen[0] == wanted[0] == "refused":
            # A stub that sends such places is closed.
            break
        assert seen == wanted
    for side in sides:
        side.views.clear()
        assert (side.book.held, side.book.held_bytes) == (0, 0)


@fuzzed()
@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(0, 600), _NUMBERS)
def test_buffers_are_placed_behind_one_another_or_refused(buffers, size, lease):
    memory = bytearray(size)
    ends = [(len(buffer) + 63) // 64 * 64 for buffer in buffers]
    fits = all(sum(ends[:i]) + len(buffer) <= size for i, buffer in enumerate(buffers))
    try:
        fields = native.native().place(memory, buffers, 7, 64, lease)
    except ValueError:
        assert not fits
        return
    assert fits
    for index, buffer in enumerate(buffers):
        region, at, nbytes, under = fields[4 * index : 4 * index + 4]
        assert (region, at, nbytes, under) == (7, 64 + sum(ends[:index]), len(buffer), lease)
        assert memory[at - 64 : at - 64 + nbytes] == buffer


@fuzzed()
@given(
    st.integers(0, 1 << 16),
    st.integers(0, 1024),
    st.lists(st.one_of(st.integers(0, 5000), st.tuples(st.integers(0, 20))), max_size=40),
)
def test_a_framework_gets_pieces_that_do_not_overlap(size, odd, steps):
    compiled = native.native()
    library = ctypes.CDLL(native.native_path())
    take, give = library.gpubridge_arena_malloc, library.gpubridge_arena_free
    take.restype = ctypes.c_void_p
    take.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    give.restype = None
    give.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    # No process reads what is there.
    begin = (1 << 40) + odd
    first = (begin + 511) // 512 * 512
    lent = {}
    compiled.arena_set(begin, size)
    try:
        for step in steps:
            if isinstance(step, tuple):
                if lent:
                    pointer = sorted(lent)[step[0] % len(lent)]
                    give(pointer, lent.pop(pointer), 0, None)
                    # Twice: what is not lent is not given back.
                    give(pointer, 1, 0, None)
                continue
            pointer = take(step, 0, None)
            nbytes = (step + 511) // 512 * 512
            edges = [first, *(edge for at in sorted(lent) for edge in (at, at + lent[at]))]
            edges.append(max(begin + size, first))
            gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
            if pointer is None:
                assert not step or all(end - start < nbytes for start, end in gaps)
                continue
            assert pointer % 512 == 0
            assert any(start <= pointer and pointer + nbytes <= end for start, end in gaps)
            lent[pointer] = nbytes
        assert compiled.arena_state()[0] == sum(lent.values())
    finally:
        compiled.arena_set(0, 0)
