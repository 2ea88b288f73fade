"""Lines that a process prints, faster than the log takes them."""

import asyncio
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from gpubridge.engine.supervisor import printed_lines
from gpubridge.engine.supervisor.printed_lines import PrintedLines


class Printed:
    """Return the lines reported of a stream, each taking a millisecond."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.told = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(printed_lines, "time", clock)
        self.lines = PrintedLines(self.tell)

    def tell(self, line):
        self.now += 0.001
        self.told.append(line)

    def print(self, text):
        os.write(self.lines.write_end, text)


@pytest.fixture
@asynccontextmanager
async def printed(monkeypatch):
    printed = Printed(monkeypatch)
    try:
        yield printed
    finally:
        printed.lines.close()
        printed.lines.started()


EXPECTED = [str(number) for number in range(100)]
PRINTED = "".join(f"{line}\n" for line in EXPECTED).encode()


async def test_other_work_has_its_turn_between_lines_that_come_fast(printed):
    printed.print(PRINTED)
    most = 0
    while len(printed.told) < len(EXPECTED):
        before = len(printed.told)
        await asyncio.sleep(0)
        most = max(most, len(printed.told) - before)
    assert printed.told == EXPECTED
    assert 1 <= most <= 4


async def test_a_process_that_prints_faster_waits(printed):
    os.set_blocking(printed.lines.write_end, False)
    taken = 0
    for _ in range(50):
        try:
            taken += os.write(printed.lines.write_end, b"x\n" * 2048)
        except BlockingIOError:
            break
        await asyncio.sleep(0)
    else:
        pytest.fail("all of it was taken at once")
    assert taken < 50 * 4096


@pytest.mark.parametrize("begun", [False, True])
async def test_the_end_tells_what_is_left(printed, begun):
    printed.print(PRINTED + b"rest")
    if begun:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert printed.told
    printed.lines.close()
    assert printed.told == [*EXPECTED, "rest"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert printed.told == [*EXPECTED, "rest"]
