"""Output of a stub: its order, and output that comes faster than the log takes it."""

import asyncio
import fcntl
import os
import random
import textwrap
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from gpubridge.engine.supervisor import stub_output
from gpubridge.engine.supervisor.stub_output import StubOutput
from gpubridge.transport.output_pieces import LogLine, encode_line, encode_pieces, piece_start
from tests.forks import fork
from tests.waits import until


class Printed:
    """The lines that are told of the output of a process, each taking a millisecond."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.told = []
        self.records = 0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(stub_output, "time", clock)
        self.output = StubOutput(self.tell)
        self.start = piece_start(self.output.token)
        self.out, self.err = self.output.write_ends

    def tell(self, line):
        self.now += 0.001
        self.told.append(line.text)

    def print(self, text):
        os.write(self.out, text)

    def steps_of_log(self, text, process=1):
        """Yield what writes the pieces of a line of Logger, and its mark, one by one."""
        return self.steps_of_record(encode_line(LogLine(0, text, "model.py", 7)), process)

    def steps_of_record(self, line, process=1):
        self.records += 1
        record = (process, self.records)
        for end, data in ((self.out, line), (self.err, b"")):
            for piece in encode_pieces(self.start, record, data):
                yield partial(os.write, end, piece)

    def log(self, text):
        for step in self.steps_of_log(text):
            step()

    def end(self):
        """Return all lines, once the process has ended."""
        self.output.close()
        return self.told


@pytest.fixture
@asynccontextmanager
async def printed(monkeypatch):
    printed = Printed(monkeypatch)
    try:
        yield printed
    finally:
        printed.output.close()
        printed.output.started()


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
    os.set_blocking(printed.out, False)
    taken = 0
    for _ in range(50):
        try:
            taken += os.write(printed.out, b"x\n" * 2048)
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
    assert printed.end() == [*EXPECTED, "rest"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert printed.told == [*EXPECTED, "rest"]


def thread_steps(printed, rng, name, said):
    """Yield the writes of a thread that prints to both streams and logs; ``said`` gets its lines."""
    for number in range(12):
        kind = rng.choice(["out", "err", "log"])
        said.append(f"{name}:{number}:" + "x" * rng.choice([0, 9000] if kind == "log" else [9]))
        if kind == "log":
            yield from printed.steps_of_log(said[-1], process=rng.randrange(3))
        else:
            # A record without a line, for the order of both streams.
            yield from printed.steps_of_record(b"")
            yield partial(os.write, getattr(printed, kind), f"{said[-1]}\n".encode())


@pytest.mark.parametrize("seed", range(40))
async def test_each_thread_keeps_its_order(printed, seed):
    rng = random.Random(seed)
    said = {name: [] for name in "abcd"}
    threads = [thread_steps(printed, rng, name, lines) for name, lines in said.items()]
    while threads:
        thread = rng.choice(threads)
        step = next(thread, None)
        if step is None:
            threads.remove(thread)
        else:
            step()
        if rng.random() < 0.3:
            printed.output._on_readable(rng.choice([printed.output._out, printed.output._err]))
    told = printed.end()
    for name, texts in said.items():
        assert [text for text in told if text.startswith(name)] == texts
    assert len(told) == sum(map(len, said.values()))


async def test_a_line_that_is_not_finished_is_told_before_what_is_logged(printed):
    printed.print(b"a ")
    printed.log("logged")
    printed.print(b"b\n")
    printed.print(b"c")
    printed.log("logged")
    printed.print(b"\n" + b"d\n")
    os.write(printed.err, b"e")
    next(printed.steps_of_log("logged"))()
    printed.output._on_readable(printed.output._out)
    printed.print(b"f")
    assert printed.end() == ["a ", "logged", "b", "c", "logged", "d", "e", "logged", "f"]


@pytest.mark.parametrize("cut", [1, 9, 17, 18, 25, 28, 29, 40])
async def test_a_piece_may_be_read_in_two_parts(printed, cut):
    fcntl.fcntl(printed.out, fcntl.F_SETPIPE_SZ, 1 << 20)
    printed.print(b"x" * (65535 - cut) + b"\n")
    printed.log("logged")
    printed.print(b"after")
    printed.output._on_readable(printed.output._out)
    assert printed.end()[8:] == ["logged", "after"]


async def test_what_a_process_wrote_before_it_was_killed_is_told(printed):
    first, *_ = printed.steps_of_log("long " * 2000)
    first()
    os.write(printed.err, next(encode_pieces(printed.start, (5, 5))) + b"behind a mark\n")
    printed.print(b"half")
    await until(lambda: "behind a mark" in printed.told)
    behind, half, cut = printed.end()
    assert (behind, half) == ("behind a mark", "half")
    assert len(cut) < 10_000
    assert ("long " * 2000).startswith(cut)


@pytest.mark.parametrize("text", [b"\0", b"\0abc", b"\xff\0\n", b"\0" + b"0" * 16 + b"\1" * 99])
async def test_text_that_is_like_a_piece_is_text(printed, text):
    printed.print(text)
    assert "".join(printed.end()).encode(errors="surrogateescape")[:1] in (b"\0", b"\\")
    assert len(printed.told) == 1


@pytest.mark.parametrize(
    "line", [b"", b"7", b"a\0b\0c\0d", b"1\0" * 9, b"9\0" + b"9" * 5000 + b"\0\0"]
)
async def test_a_model_that_makes_pieces_up_harms_nobody(printed, line):
    for piece in encode_pieces(printed.start, (1, 1), line):
        os.write(printed.out, piece)
        os.write(printed.err, piece)
    printed.print(printed.start + b"\xff" * 200)
    printed.print(b"\n")
    printed.log("after")
    assert isinstance(printed.end(), list)


PROGRAM = """
import sys, threading
from contextlib import suppress
from random import Random
from gpubridge.transport.output_pieces import LogLine
output = Output(os.environ["TOKEN"])

def log(text):
    output.log(LogLine(0, text, "model.py", 1))

{code}
"""


@pytest.fixture
@asynccontextmanager
async def run():
    """A function that runs code in a process, and returns what is told of it."""
    told = []
    output = StubOutput(told.append)

    async def run(code):
        program = PROGRAM.format(code=textwrap.dedent(code))
        environment = {**os.environ, "TOKEN": output.token}
        null = os.open(os.devnull, os.O_RDWR)
        process = fork(
            "from gpubridge.stub.output import Output",
            program,
            environment,
            (null, *output.write_ends),
        )
        os.close(null)
        await until(lambda: process.poll() is not None)
        process.close()
        output.close()
        return told

    yield run
    output.close()
    output.started()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ('print(1); log("2"); print(3, file=sys.stderr); print(4); log("5")', "1 2 3 4 5"),
        (
            'print(1, end=""); log("2"); print(3, end="", file=sys.stderr, flush=True); print(4)',
            "1 2 3 4",
        ),
        (
            'os.write(1, b"1"); log("2"); os.write(2, b"3"); log("4"); os.write(1, b"5")',
            "1 2 3 4 5",
        ),
        ('os.system("echo 1; echo 2 >&2"); log("3"); os.system("echo 4")', "1 2 3 4"),
        ('sys.stdout = TextIOWrapper(sys.stdout.buffer); print(1); log("2"); print(3)', "1 2 3"),
        ('sys.stdout = StringIO(); print(0); log("1"); print(2, file=sys.__stdout__)', "1 2"),
        ('sys.stdout.close(); sys.stderr = None; log("1"); os.write(1, b"2"); log("3")', "1 2 3"),
        ('kept = os.dup(1); os.dup2(0, 1); print(0); log("1"); os.dup2(kept, 1); print(2)', "1 2"),
        ('print(1); log("2"); os.closerange(3, 99); print(3); log("4"); print(5)', "1 2 3 4 5"),
        (
            'os.closerange(1, 99); open(os.devnull, "w"); open(os.devnull); log("lost"); print(0)',
            "",
        ),
        (
            'log("1"); print(2, end=""); pid = os.fork(); os.waitpid(pid, 0) if pid else log("3")',
            "1 2 3",
        ),
        ('os.set_blocking(1, False); print("1" * 8192 * 20); log("2" * 99999); print(3)', None),
        ('print(1); log("2"); print(3, end="", flush=True); os.kill(os.getpid(), 9)', "1 2 3"),
        (r'log("1\n2"); print(3); log("\udc80"); log("4\0")', "1\n2 3 \\udc80 4\0"),
    ],
)
async def test_what_is_printed_and_logged_keeps_its_order(run, code, told):
    texts = [line.text for line in await run(f"from io import StringIO, TextIOWrapper\n{code}")]
    expected = [*["1" * 8192] * 20, "2" * 99999, "3"] if told is None else told.split(" ")
    assert texts == [text for text in expected if text]


@pytest.mark.parametrize(("longest", "fork"), [(100_000, ""), (3000, "os.fork(), os.fork()")])
async def test_lines_of_many_threads_are_whole_and_in_order(run, longest, fork):
    told = await run(
        f"""
        def talk(name):
            rng = Random(name)
            says = [print, lambda text: print(text, file=sys.stderr), log]
            for number in range(30):
                size = int({longest} ** rng.random())
                rng.choice(says)(f"<{{os.getpid()}}.{{name}}:{{number}}:{{'x' * size}}:{{size}}>")

        {fork}
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with suppress(ChildProcessError):
            while True:
                os.wait()
        """
    )
    parts, seen = {}, {}
    for line in told:
        # Printed lines are told in parts of 8 KiB.
        text = parts[line.file] = parts.get(line.file, "") + line.text
        assert text.endswith(">") or len(line.text) == 8192
        if text.endswith(">"):
            name, number, filling, size = text.strip("<>").split(":")
            assert filling == "x" * int(size)
            seen.setdefault(name, []).append(int(number))
            parts[line.file] = ""
    assert len(seen) == (16 if fork else 4)
    assert all(numbers == [*range(30)] for numbers in seen.values())


async def test_the_frames_of_the_last_crash_are_kept_within_bounds(monkeypatch):
    printed = Printed(monkeypatch)
    os.write(printed.err, b'Fatal Python error: Aborted\n\n  File "a.py", line 1 in child\n')
    os.write(printed.err, b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n")
    frames = [f'File "{"x" * 300}.py", line {line} in f' for line in range(20)]
    os.write(printed.err, "".join(f"  {frame}\n" for frame in frames).encode())
    printed.end()
    assert printed.output.crash_frames == [frame[:200] for frame in frames[:16]]
