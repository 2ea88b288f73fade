"""The text of the metrics under many who ask for it: how often it is built, and what each gets."""

import asyncio
import gzip

import pytest

from gpubridge.engine.workers import Workers
from gpubridge.frontend import metrics_text
from gpubridge.frontend.metrics_text import MetricsText

MANY = 1000


class Clock:
    """Time that passes while a text is built and while somebody sleeps."""

    def __init__(self, monkeypatch, cost):
        self.now, self.cost, self.built, self.slept = 100.0, cost, 0, []
        monkeypatch.setattr(metrics_text.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(metrics_text.asyncio, "sleep", self.sleep)
        self.workers = Workers()
        self.text = MetricsText(self.build, self.workers)

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += max(seconds, 0)

    def build(self):
        self.built += 1
        self.now += self.cost
        return b"%d " % self.built * 1000

    async def ask(self, count, *, packs=False):
        return await asyncio.gather(*(self.text.answer(packs=packs) for _ in range(count)))


@pytest.mark.parametrize(("cost", "gap"), [(0.001, 0.02), (0.2, 1.0)])
async def test_who_asks_at_once_shares_a_text_and_the_next_ones_are_apart(monkeypatch, cost, gap):
    clock = Clock(monkeypatch, cost)
    for turn in range(1, 4):
        bodies = {answer.body for answer in await clock.ask(MANY)}
        # Each is of after its request.
        assert bodies == {b"%d " % turn * 1000}
    assert clock.built == 3
    assert clock.slept[1:] == pytest.approx([gap, gap])


async def test_it_is_compressed_once_for_all(monkeypatch):
    clock = Clock(monkeypatch, 0.001)
    packed = []
    monkeypatch.setattr(metrics_text, "compress", lambda *given: packed.append(given) or b"packed")
    clock.workers.begin()
    assert {answer.body for answer in await clock.ask(MANY, packs=True)} == {b"packed"}
    monkeypatch.undo()
    (answer,) = await clock.ask(1, packs=True)
    assert gzip.decompress(answer.body) == b"2 " * 1000
    assert b"Content-Encoding: gzip\r\n" in answer.fields
    assert len(packed) == 1
    clock.workers.close()


async def test_an_error_is_everybodys_and_the_next_text_is_built(monkeypatch):
    clock = Clock(monkeypatch, 0.001)
    build, clock.text._build = clock.text._build, lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        await clock.ask(3)
    clock.text._build = build
    assert len(await clock.ask(3)) == 3
