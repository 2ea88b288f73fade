"""Progress of loads: their records, and the lines in the log."""

import asyncio
import re
import sys
from contextlib import ExitStack

from gpubridge.engine.environments.unpacker import Unpacker
from gpubridge.engine.load_progress import LoadProgress, load_step, readable_size
from gpubridge.engine.load_threads import LoadThreads
from tests.waits import timers, until


async def test_a_load_is_logged_as_long_as_it_lasts(caplog):
    caplog.set_level("INFO", "gpubridge")
    progress = LoadProgress(0.01)
    with progress.track("m", 7, lambda: ("instance m_0 in initialize", None)):
        await until(lambda: len(caplog.records) > 2)
    await asyncio.sleep(0)
    assert not timers()
    assert progress.loads == []
    pattern = r"model 'm' version 7 has been loading for \d+ s: instance m_0 in initialize"
    assert re.fullmatch(pattern, caplog.records[0].getMessage())


async def test_a_load_has_one_step_at_a_time():
    progress = LoadProgress()
    with progress.track("m", 0, lambda: ("first", None)):
        (load,) = progress.loads
        with load_step(lambda: ("second", 0.25)):
            assert str(load) == "model 'm' has been loading for 0 s: second (25 %)"
            assert load.report() == ("second", 0.25)
        assert load.report() == ("first", None)


async def test_loads_at_the_same_time_have_steps_of_their_own():
    progress = LoadProgress()

    async def load(name, go):
        with progress.track(name, 1, lambda: ("outer", None)), load_step(lambda: (name, None)):
            await go.wait()

    go = asyncio.Event()
    tasks = [asyncio.create_task(load(name, go)) for name in "ab"]
    await asyncio.sleep(0)
    assert [each.report()[0] for each in progress.loads] == ["a", "b"]
    go.set()
    await asyncio.gather(*tasks)
    # Work that no load waits for has no step.
    with load_step(lambda: ("alone", None)):
        assert progress.loads == []


UNPACKING = """
print('{"doing": "unpacking", "part": 0.5, "nbytes": 3145728, "members": 7}', flush=True)
input()
print('{"environment": "/unpacked"}')
"""


async def test_every_model_that_waits_for_an_environment_reports_its_unpacking(
    tmp_path, monkeypatch
):
    progress = LoadProgress()
    made = []

    async def start(unpacker, archive, store):
        pipe = asyncio.subprocess.PIPE
        made.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", UNPACKING, stdin=pipe, stdout=pipe
            )
        )
        return made[0]

    async def load(unpacker, name):
        with progress.track(name, 1, lambda: ("starting", None)):
            return await unpacker.unpack(tmp_path / "env.tar")

    monkeypatch.setattr(Unpacker, "_start", start)
    unpacker = Unpacker(tmp_path / "cache", 1, LoadThreads())
    loads = [asyncio.create_task(load(unpacker, name)) for name in "ab"]
    told = f"environment {tmp_path}/env.tar: unpacking, 7 files and directories, 3 MiB", 0.5
    await until(lambda: [each.report() for each in progress.loads] == [told, told])
    made[0].stdin.write(b"\n")
    assert [str(path) for path in await asyncio.gather(*loads)] == ["/unpacked"] * 2


def test_sizes_are_readable():
    assert [readable_size(n) for n in (0, 1023, 1 << 20, 5 << 29)] == [
        "0 bytes",
        "1023 bytes",
        "1 MiB",
        "2.5 GiB",
    ]


async def test_many_loads_have_one_line_about_their_progress(caplog):
    caplog.set_level("INFO", "gpubridge")
    progress = LoadProgress(0.01)
    with ExitStack() as stack:
        for number in range(200):
            stack.enter_context(progress.track(f"m{number}", 1, lambda: ("step", None)))
        await until(lambda: len(caplog.records) > 3)
    text = "200 models are being loaded, of which model 'm0' version 1 has been loading"
    assert all(record.getMessage().startswith(text) for record in caplog.records[1:])
    await asyncio.sleep(0)
    assert not timers()
