"""Cells of a time series: their sum is that of one number, in any process that counts."""

import os
import threading

import pytest
from hypothesis import given, strategies as st

from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
    histogram_units,
)

WRITERS = 3


def series(kind, count=WRITERS):
    """A head and some cells behind it, on a board of their own."""
    board = MetricBoard(memoryview(bytearray(16 * UNIT_BYTES)))
    units = range(1, count + 2)
    for unit, following in zip(units, [*units[1:], 0], strict=True):
        board.link(unit, following)
    return board, [kind(board, 1, unit) for unit in units]


@given(
    st.lists(
        st.tuples(
            st.integers(0, WRITERS), st.sampled_from(["add", "set"]), st.integers(-1000, 1000)
        ),
        max_size=40,
    )
)
def test_a_gauge_of_several_writers_is_one_number(steps):
    _, cells = series(GaugeCell)
    expected = 0
    for who, what, amount in steps:
        getattr(cells[who], what)(amount)
        expected = amount if what == "set" else expected + amount
        assert {cell.total() for cell in cells} == {expected}


@given(st.lists(st.tuples(st.integers(1, WRITERS), st.integers(-9, 9), st.booleans())), st.data())
def test_a_writer_that_goes_leaves_what_it_counted(steps, data):
    board, cells = series(GaugeCell)
    expected = 0
    for who, amount, sets in steps:
        (cells[who].set if sets else cells[who].add)(amount)
        expected = amount if sets else expected + amount
    gone = data.draw(st.integers(1, WRITERS))
    left = [unit for unit in range(1, WRITERS + 2) if unit != gone + 1]
    for unit, following in zip(left, [*left[1:], 0], strict=True):
        board.link(unit, following)
    cells[0].absorb(cells[gone])
    assert cells[0].total() == expected


class Watched:
    """Numbers of a board; something happens just before one of them is read."""

    def __init__(self, numbers, reads, happens):
        self._numbers = numbers
        self._reads = reads
        self._happens = happens

    def __getitem__(self, index):
        if self._reads == 0:
            self._happens()
        self._reads -= 1
        return self._numbers[index]


@pytest.mark.parametrize("reads", range(40))
def test_a_gauge_that_is_set_while_it_is_looked_at(reads):
    _, cells = series(GaugeCell)
    cells[1].set(5)
    cells[3].add(0.25)

    def happens():
        cells[1].set(7)
        cells[2].add(0.5)

    reader = GaugeCell(cells[0]._board, 1, 4)
    reader._words = Watched(reader._words, reads, happens)
    assert reader.total() in (5.25, 7.5)


@pytest.mark.parametrize("reads", range(24))
def test_a_counter_whose_cell_goes_while_it_is_looked_at(reads):
    board, cells = series(CounterCell)
    for cell in cells[1:]:
        cell.add(1)

    def happens():
        board.change(1)
        board.link(1, 3)
        cells[0].absorb(cells[1])
        board.change(1)

    reader = CounterCell(board, 1, 4)
    reader._words = Watched(reader._words, reads, happens)
    assert reader.total() == 3


def test_a_gauge_of_one_process_is_exact():
    _, cells = series(GaugeCell)
    cells[1].set(1e17)
    cells[2].add(1e17)
    cells[1].set(0.3)
    cells[1].add(0.1)
    assert cells[2].total() == 0.3 + 0.1


def test_a_counter_is_the_sum_of_its_cells_and_a_fork_counts_alone():
    _, cells = series(CounterCell)
    for amount, cell in enumerate(cells):
        cell.add(amount)
    assert cells[0].total() == sum(range(WRITERS + 1))
    cells[1].detach()
    cells[1].add(100)
    assert cells[0].total() == sum(range(WRITERS + 1))
    assert cells[1].total() == sum(range(WRITERS + 1)) + 100


@pytest.mark.parametrize("following", [1, 2, 15, 16, 1 << 60])
def test_a_spoiled_board_ends_no_process(following):
    board, cells = series(CounterCell, 1)
    cells[1].add(2.0)
    board.link(2, following)
    assert cells[1].total() >= 2.0


def test_a_histogram_counts_up_to_each_bound():
    bounds = [1.0, 2.0, 4.0]
    board = MetricBoard(memoryview(bytearray(histogram_units(bounds) * UNIT_BYTES)))
    cell = HistogramCell(board, 0, bounds)
    for value in (0.5, 1.0, 1.1, 4.0, 4.1, float("inf")):
        cell.observe(value)
    assert cell.counts() == [2, 1, 1, 2]
    assert cell.sum() == float("inf")
    cell.observe(float("nan"))
    assert cell.counts() == [2, 1, 1, 3]


@pytest.mark.parametrize("buckets", [0, 5, 6, 7, 14, 15])
def test_a_histogram_fits_into_its_units(buckets):
    bounds = [float(bound) for bound in range(buckets)]
    units = histogram_units(bounds)
    board = MetricBoard(memoryview(bytearray(units * UNIT_BYTES)))
    cell = HistogramCell(board, 0, bounds)
    cell.observe(1e9)
    assert cell.counts() == [0] * buckets + [1]
    assert (units - 1) * UNIT_BYTES < (buckets + 2) * 8 <= units * UNIT_BYTES


def test_threads_and_readers_see_a_gauge_only_as_it_was_set():
    _, cells = series(GaugeCell)
    over = threading.Event()
    seen = set()

    def read():
        while not over.is_set():
            seen.add(cells[2].total())

    reader = threading.Thread(target=read)
    reader.start()
    for value in range(2000):
        cells[1].set(float(value % 2 + 1))
        if value % 64 == 0:
            os.sched_yield()
    over.set()
    reader.join()
    assert seen <= {0.0, 1.0, 2.0}
