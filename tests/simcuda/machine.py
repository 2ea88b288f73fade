"""A simulated machine: its directory, what is set of it, and what processes have done on it."""

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.simcuda.build import build_driver

# The layout of `Control` in csrc/world.h.
_HEADER = struct.Struct("=IIIIIIQQQQ")
_VERSION = struct.Struct("=Q")
_VERSION_AT = 32
_FAULT = struct.Struct("=48sqii")
_FAULTS = 32
_LOCK = struct.Struct("=Q")
_ACTIVITY = struct.Struct("=i4x6Q")
_ACTIVITIES = 256
_ACTIVITIES_AT = _HEADER.size + _FAULTS * _FAULT.size + _LOCK.size
_MACHINE_BYTES = 1 << 30


@dataclass(frozen=True)
class DriverCall:
    """One call as it was recorded: who made it, what it was, what it answered."""

    pid: int
    name: str
    arguments: tuple[int, ...]
    result: int


@dataclass(frozen=True)
class Activity:
    """Seconds of a process, and a number.

    - ``held``, ``stalled``: it held the driver's lock; its calls were stalled by that.
    - ``paid``: what opening, closing and allocating took.
    - ``spun``, ``slept``: it waited for work and burned a processor, or slept.
    - ``polls``: how often it asked whether work was done.
    """

    held: float = 0.0
    stalled: float = 0.0
    paid: float = 0.0
    spun: float = 0.0
    slept: float = 0.0
    polls: int = 0


class Machine:
    """A machine with simulated devices; processes with ``environment()`` are on it.

    Parameters
    ----------
    folder : Path
        Its directory, of `make_machine`; another process may have made it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tolerated = ""
        with self._path("control").open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._driver = build_driver()
        lines = (line.split("=", 1) for line in self._path("settings").read_text().splitlines())
        self._settings = {name.lower(): text for name, text in lines}
        # What is read of its records begins there; processes append lines.
        self._starts = {"calls": 0, "violations": 0}
        self.begin()

    def close(self) -> None:
        """Let go of the control page."""
        self._page.close()

    def environment(self) -> Mapping[str, str]:
        """Return the environment of a process on this machine."""
        libraries = os.environ.get("LD_LIBRARY_PATH")
        return {
            **os.environ,
            "SIMCUDA_DIR": str(self.folder),
            "LD_LIBRARY_PATH": f"{self._driver}:{libraries}" if libraries else str(self._driver),
        }

    def set(self, **settings: int | str) -> None:
        """Set what csrc/settings.h tells of, from now on: ``open_us=500``."""
        self._write({**self._settings, **{name: str(settings[name]) for name in settings}})

    def _write(self, settings: dict[str, str]) -> None:
        self._settings = settings
        lines = "".join(f"{name.upper()}={text}\n" for name, text in settings.items())
        (self.folder / "settings").write_text(lines)
        (version,) = _VERSION.unpack_from(self._page, _VERSION_AT)
        _VERSION.pack_into(self._page, _VERSION_AT, version + 1)

    def delay(self, longest_us: int) -> None:
        """Let work on streams begin up to so many microseconds late."""
        struct.pack_into("=I", self._page, 0, longest_us)

    def set_devices(self, count: int) -> None:
        """Have so many devices (0 to 2), for processes that begin after this."""
        struct.pack_into("=I", self._page, 8, count)

    def set_memory(self, nbytes: int) -> None:
        """Have so much memory on each device."""
        struct.pack_into("=Q", self._page, 24, nbytes)

    def allow_peers(self) -> None:
        """Let the devices reach each other's memory."""
        struct.pack_into("=I", self._page, 12, 1)

    def make_exclusive(self) -> None:
        """Let the devices say that they are for one process each."""
        struct.pack_into("=I", self._page, 16, 3)

    def refuse_legacy_handles(self) -> None:
        """Let no process open another one's memory by a handle, as in WSL2 and some containers."""
        self.fail("cuIpcOpenMemHandle", 801)

    def refuse_memory_fds(self) -> None:
        """Let memory not be exported as a file descriptor."""
        struct.pack_into("=I", self._page, 20, 1)

    def fail(self, call: str, code: int, *, nth: int = -1) -> None:
        """Let a call fail, in whatever process: the n-th from now on, or each one."""
        for index in range(_FAULTS):
            at = _HEADER.size + index * _FAULT.size
            if not _FAULT.unpack_from(self._page, at)[3]:
                _FAULT.pack_into(self._page, at, call.encode(), nth, code, 1)
                return
        raise ValueError(f"expected at most {_FAULTS} faults")

    def heal(self) -> None:
        """Let no call fail any more."""
        for index in range(_FAULTS):
            _FAULT.pack_into(self._page, _HEADER.size + index * _FAULT.size, b"", 0, 0, 0)

    def begin(self) -> None:
        """Forget the calls and the broken rules so far; what has been set, and what processes hold, stays."""
        self._starts = {name: self._path(name).stat().st_size for name in self._starts}

    def state(self) -> tuple[bytes, dict[str, str]]:
        """Return what is set of it now, to be compared, or to be set again."""
        faults = self._page[_HEADER.size : _ACTIVITIES_AT - _LOCK.size]
        return self._page[:_VERSION_AT] + faults, self._settings

    def restore(self, state: tuple[bytes, dict[str, str]]) -> None:
        """Set all that was set when `state` returned this."""
        page, settings = state
        self._page[:_VERSION_AT] = page[:_VERSION_AT]
        self._page[_HEADER.size : _ACTIVITIES_AT - _LOCK.size] = page[_VERSION_AT:]
        if settings != self._settings:
            self._write(settings)

    def used(self, device: int, pid: int | None = None) -> int:
        """Return the bytes of a device that somebody has, of one process's making or all.

        They are those of whole blocks of 2 MiB.
        """
        return sum(
            _held_bytes(file)
            for kind in ("memory", "physical")
            for file in self.folder.glob(f"{kind}-{'*' if pid is None else pid}-*-{device}")
        )

    def contexts(self, device: int | None = None) -> list[int]:
        """Return the process of each context that is there now, on one device or all; sorted."""
        files = (
            file.name.split("-")
            for file in self.folder.glob(f"context-*-{'*' if device is None else device}")
        )
        return sorted(int(pid) for _, pid, *_ in files if Path(f"/proc/{pid}").exists())

    def activity(self, pid: int) -> Activity:
        """Return how a process has waited for the driver so far."""
        for index in range(_ACTIVITIES):
            at = _ACTIVITIES_AT + index * _ACTIVITY.size
            found, *microseconds, polls = _ACTIVITY.unpack_from(self._page, at)
            if found == pid:
                return Activity(*(each / 1e6 for each in microseconds), polls)
        return Activity()

    def calls(self, name: str | None = None, pid: int | None = None) -> list[DriverCall]:
        """Return the calls since `begin`, in their order; of one name or process only."""
        found = []
        for line in self._lines("calls"):
            who, _, rest = line.partition(" ")
            call, _, rest = rest.partition("(")
            arguments, _, result = rest.partition(")=")
            if name in (None, call) and pid in (None, int(who)):
                values = tuple(map(int, arguments.split(","))) if arguments else ()
                found.append(DriverCall(int(who), call, values, int(result)))
        return found

    def violations(self) -> list[str]:
        """Return the rules that were broken since `begin`, each with the process that did.

        One of which the words ``tolerated`` tell is left out.
        """
        broken = self._lines("violations")
        return [rule for rule in broken if not self.tolerated or self.tolerated not in rule]

    def end(self) -> None:
        """Remove it with all its memory: no rule was broken since `begin`, and no memory of a device is left."""
        broken, left = self.violations(), [self.used(device) for device in range(2)]
        self.remove()
        assert broken == [], broken
        assert not any(left), left

    def remove(self) -> None:
        """Remove it with all its memory."""
        self.close()
        # A process that ends only now removes what it has exported itself.
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _lines(self, name: str) -> list[str]:
        with self._path(name).open() as file:
            file.seek(self._starts[name])
            return file.read().splitlines()


def _held_bytes(file: Path) -> int:
    """Return the size of a block, unless nobody has it any more."""
    try:
        with file.open("rb") as opened:
            # Whoever has one keeps a lock, and the kernel ends that with the process.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_size
    except FileNotFoundError:
        pass
    return 0


def make_machine(seed: int = 1) -> Machine:
    """Make a machine in an empty directory in memory; ``seed`` is of the delays with which streams do their work."""
    folder = Path(tempfile.mkdtemp(prefix="simcuda-", dir="/dev/shm"))
    control = bytearray(_ACTIVITIES_AT + _ACTIVITIES * _ACTIVITY.size)
    _HEADER.pack_into(control, 0, 0, seed, 2, 0, 0, 0, _MACHINE_BYTES, 0, 0, 0)
    (folder / "control").write_bytes(control)
    for name in ("calls", "violations", "settings"):
        (folder / name).touch()
    return Machine(folder)


@contextlib.contextmanager
def running_machine(seed: int = 1) -> Iterator[Machine]:
    """Make a machine, and remove it with all its memory."""
    machine = make_machine(seed)
    try:
        yield machine
    finally:
        machine.remove()


@contextlib.contextmanager
def lawful_machine(seed: int = 1) -> Iterator[Machine]:
    """Make a machine on which no rule of the driver may be broken, and remove it."""
    with running_machine(seed) as machine:
        yield machine
        assert machine.violations() == []
