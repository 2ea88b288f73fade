"""Servers that one test after another uses, each with its own models: a start costs more than most tests.

They belong to the run of tests, not to a worker: each has a place, a folder of the run with what a worker
needs to take it over, and a lock, which its user holds. The process that begins the run ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests import run_folder
from tests.process.server_process import Server
from tests.waits import poll

if TYPE_CHECKING:
    from tests.simcuda.machine import Machine

_KEPT = 64
"""Idle servers of a run: tests with the same flags lie together."""
_MOST_ALIKE = 1
"""Servers with the same flags, unless one worker needs more at once."""
_IDLE_SECONDS = 5
"""A server whose models are not gone by then is not lent again."""
_WAIT_SECONDS = 120
"""Who has waited for a server that long starts another one: a test may hang with it."""

_CONTROL = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
_CONTROL.add_argument("--model-control-mode")
_CONTROL.add_argument("--load-model", action="append", default=[])
_STATES = (
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status",
)

Start = Callable[..., Server]
Prepare = Callable[["Machine"], object]

_lent_here: list[_Place] = []


class _Place:
    """A folder for a server in explicit mode, whose repository is a link to that of the test that has it now.

    ``idle`` describes the server while nobody has it; a worker that dies with it leaves ``lent``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = (folder / "lock").open("a")

    @classmethod
    def take(cls, folder: Path) -> _Place | None:
        """Return the place, unless somebody else has it. The lock of those that are alike is held."""
        place = cls(folder)
        try:
            fcntl.flock(place._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            place.let_go()
            return None
        return place

    def let_go(self) -> None:
        self._lock.close()

    def is_idle(self) -> bool:
        return (self.folder / "idle").exists()

    def start(self, start: Start, flags: Sequence[str]) -> Server:
        link = self.folder / "models"
        link.symlink_to(self.folder)
        words = ["--model-repository", str(link), "--model-control-mode=explicit", *flags]
        server = start(words, self.folder, stays=True)
        (self.folder / "lent").write_text(
            json.dumps({"server": server.described(), "states": _read_states(server)})
        )
        return server

    def take_over(self) -> Server:
        """Return the server that is idle here, or was lent to a worker that is gone."""
        if self.is_idle():
            (self.folder / "idle").rename(self.folder / "lent")
        return Server.taken_over(self.folder, self._description()["server"])

    def is_as_before(self, server: Server) -> bool:
        return server.is_ready() and _read_states(server) == self._description()["states"]

    def put_back(self, server: Server) -> None:
        (self.folder / "lent").rename(self.folder / "idle")
        (self.folder / "idle").touch()
        server.process.let_go()

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _description(self) -> dict:
        return json.loads((self.folder / "lent").read_text())


def lend(
    start: Start,
    repository: Path,
    flags: Sequence[str],
    described: object = None,
    prepare: Prepare | None = None,
) -> AbstractContextManager[Server] | None:
    """Return a context with a server that has a directory's models; None if the flags name another mode.

    ``start`` starts one with the flags that it is given, in a folder, on a machine and in an environment as
    they are described, where none with those flags is idle. Clients' shared memory is allowed, unless a flag
    forbids it. ``prepare`` sets the machine up before the models are
    loaded.
    """
    asked, others = _CONTROL.parse_known_args(flags)
    # Repositories of other machines have addresses.
    if not repository.is_dir():
        return None
    if asked.model_control_mode not in (None, "explicit"):
        return None
    if not any(word.startswith("--allow-client-shm") for word in others):
        others = ["--allow-client-shm=true", *others]
    named = asked.model_control_mode and asked.load_model != ["*"]
    models = asked.load_model if named else _names(repository)
    digest = hashlib.sha256(repr((others, described)).encode()).hexdigest()
    alike = run_folder.path() / "servers" / digest[:16]

    def begin(place: _Place) -> Server:
        return place.take_over() if place.is_idle() else place.start(start, others)

    return _lent(alike, begin, lambda server: _begin(server, repository, models, prepare))


def close_idle_servers() -> None:
    """Stop all servers of the run: nobody has one any more."""
    with ThreadPoolExecutor(8) as pool:
        # Each waits for the end of its processes.
        list(pool.map(_end, map(_Place, (run_folder.path() / "servers").glob("*/*/"))))


@contextmanager
def _lent(
    alike: Path, begin: Callable[[_Place], Server], prepare: Callable[[Server], Server]
) -> Iterator[Server]:
    place = _place(alike)
    _lent_here.append(place)
    server = None
    as_before = False
    try:
        server = begin(place)
        yield prepare(server)
        as_before = _unload(server) and place.is_as_before(server)
    finally:
        _lent_here.remove(place)
        if as_before:
            place.put_back(server)
            place.let_go()
        else:
            _end(place, server)
        _end_oldest()


def _place(alike: Path) -> _Place:
    """Return a place with an idle server, or an empty one; wait for a server unless this worker has another."""
    alike.mkdir(parents=True, exist_ok=True)
    found: list[_Place] = []

    def find(most: int = _MOST_ALIKE) -> bool:
        with run_folder.locked(alike / "lock"):
            folders = sorted(alike.glob("*/"))
            taken = next(filter(None, map(_Place.take, folders)), None)
            if taken is None and (_lent_here or len(folders) < most):
                folder = alike / str(max((int(each.name) for each in folders), default=0) + 1)
                folder.mkdir()
                taken = _Place.take(folder)
        if taken is not None:
            found.append(taken)
        return bool(found)

    if not poll(find, _WAIT_SECONDS):
        find(sys.maxsize)
    (place,) = found
    if not place.is_idle() and (place.folder / "lent").exists():
        # Its worker has died.
        _end(place)
        return _place(alike)
    return place


def _end(place: _Place, server: Server | None = None) -> None:
    try:
        if server is None and ((place.folder / "lent").exists() or place.is_idle()):
            server = place.take_over()
        if server is not None:
            server.end()
    finally:
        with run_folder.locked(place.folder.parent / "lock"):
            place.remove()
            place.let_go()


def _end_oldest() -> None:
    """End the servers that nobody has had for longest, if there are too many."""
    idle = []
    for path in (run_folder.path() / "servers").glob("*/*/idle"):
        # Another worker may take it.
        with contextlib.suppress(FileNotFoundError):
            idle.append((path.stat().st_mtime_ns, path.parent))
    for _, folder in sorted(idle)[: max(len(idle) - _KEPT, 0)]:
        with run_folder.locked(folder.parent / "lock"):
            place = _Place.take(folder) if folder.exists() else None
        if place is not None:
            _end(place)


def _begin(
    server: Server, repository: Path, models: Sequence[str], prepare: Prepare | None
) -> Server:
    """Load a test's models; return a server whose log begins here."""
    link = server.folder / "models"
    following = link.with_name("next")
    following.symlink_to(repository.absolute())
    following.rename(link)
    server = server.lent(repository)
    if prepare is not None:
        prepare(server.machine)
    for name, (status, answer) in _control(server, models, "load"):
        assert status == 200, f"{name} cannot be loaded: {answer}\n{server.log()}"
    return server


def _unload(server: Server) -> bool:
    """Unload all models; return whether they are gone in time."""
    if server.process.poll() is not None:
        return False
    names = {
        name
        for (name, _), row in server.index().items()
        if row.get("reason", "unloaded") != "unloaded" or row.get("state") == "READY"
    }
    _control(server, sorted(names), "unload")
    return poll(server.has_unloaded, _IDLE_SECONDS)


def _control(
    server: Server, names: Sequence[str], verb: str
) -> list[tuple[str, tuple[int, bytes]]]:
    def ask(name: str) -> tuple[int, bytes]:
        status, _, body = server.request("POST", f"/v2/repository/models/{quote(name)}/{verb}")
        return status, body

    if not names:
        return []
    with ThreadPoolExecutor(8) as pool:
        return list(zip(names, pool.map(ask, names), strict=True))


def _read_states(server: Server) -> str:
    own = [server.request("GET", path)[2] for path in _STATES]
    machine = server.machine
    return repr([*own, *(() if machine is None else (machine.state(), machine.violations()))])


def _names(repository: Path) -> list[str]:
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )
