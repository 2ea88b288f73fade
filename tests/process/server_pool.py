"""Servers that one test after another uses, each with its own models: a start costs more than most tests."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.waits import poll

if TYPE_CHECKING:
    from tests.process.server import Server
    from tests.simcuda.machine import Machine

__all__ = ["Prepare", "Start", "close_idle_servers", "lend"]

_KEPT = 6
"""Idle servers of one worker: tests with the same flags lie together."""
_IDLE_SECONDS = 5
"""A server whose models are not gone by then is not lent again."""

_CONTROL = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
_CONTROL.add_argument("--model-control-mode")
_CONTROL.add_argument("--load-model", action="append", default=[])
_STATES = (
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status",
)

Start = Callable[..., AbstractContextManager["Server"]]
Prepare = Callable[["Machine"], object]

_Key = tuple[tuple[str, ...], Hashable]

_idle: list[_Lendable] = []


class _Lendable:
    """A server in explicit mode; its repository is a link to that of the test that has it now."""

    def __init__(self, start: Start, flags: tuple[str, ...], machine: Hashable) -> None:
        self.key = flags, machine
        self._stack = ExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._link = folder / "models"
            self._link.symlink_to(folder)
            words = ["--model-repository", str(self._link), "--model-control-mode=explicit", *flags]
            self.server = self._stack.enter_context(start(words))
            self._states = self._read_states()
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def begin(
        self, repository: Path, load: Sequence[str] | None, prepare: Prepare | None
    ) -> Server:
        """Load a test's models, all of them without ``load``; return a server whose log begins here."""
        following = self._link.with_name("next")
        following.symlink_to(repository.absolute())
        following.rename(self._link)
        server = self.server.lent(repository)
        if prepare is not None:
            prepare(server.machine)
        for name, (status, answer) in self._control(
            _names(repository) if load is None else load, "load"
        ):
            assert status == 200, f"{name} cannot be loaded: {answer}\n{server.log()}"
        return server

    def end(self) -> bool:
        """Unload the models; return whether the server is as it was before."""
        if self.server.process.poll() is not None:
            return False
        names = {
            name
            for (name, _), row in self.server.index().items()
            if row.get("reason", "unloaded") != "unloaded" or row.get("state") == "READY"
        }
        self._control(sorted(names), "unload")
        ended = poll(self.server.has_unloaded, _IDLE_SECONDS)
        return ended and self.server.is_ready() and self._read_states() == self._states

    def _control(self, names: Sequence[str], verb: str) -> list[tuple[str, tuple[int, bytes]]]:
        def ask(name: str) -> tuple[int, bytes]:
            status, _, body = self.server.request(
                "POST", f"/v2/repository/models/{quote(name)}/{verb}"
            )
            return status, body

        if not names:
            return []
        with ThreadPoolExecutor(8) as pool:
            return list(zip(names, pool.map(ask, names), strict=True))

    def _read_states(self) -> list[object]:
        own = [self.server.request("GET", path)[2] for path in _STATES]
        machine = self.server.machine
        return [*own, *(() if machine is None else (machine.state(), machine.violations()))]


def lend(
    start: Start,
    repository: Path,
    flags: Sequence[str],
    machine: Hashable = None,
    prepare: Prepare | None = None,
) -> AbstractContextManager[Server] | None:
    """Return a context with a server that has a directory's models; None if the flags name another mode.

    ``start`` starts one with the flags that it is given, on a machine as it is described, where none with
    those flags on such a machine is idle. ``prepare`` sets that machine up before the models are loaded.
    """
    asked, others = _CONTROL.parse_known_args(flags)
    # Repositories of other machines have addresses.
    if not repository.is_dir():
        return None
    if asked.model_control_mode not in (None, "explicit"):
        return None
    named = asked.model_control_mode and asked.load_model != ["*"]
    load = asked.load_model if named else None
    return _lent(start, repository, load, (tuple(others), machine), prepare)


def close_idle_servers() -> None:
    """Stop all servers that are not lent."""
    while _idle:
        _idle.pop().close()


@contextmanager
def _lent(
    start: Start, repository: Path, load: Sequence[str] | None, key: _Key, prepare: Prepare | None
) -> Iterator[Server]:
    lendable = next((each for each in _idle if each.key == key), None)
    if lendable is None:
        lendable = _Lendable(start, *key)
    else:
        _idle.remove(lendable)
    as_before = False
    try:
        yield lendable.begin(repository, load, prepare)
        as_before = lendable.end()
    finally:
        if as_before:
            _idle.append(lendable)
        else:
            lendable.close()
        while len(_idle) > _KEPT:
            _idle.pop(0).close()


def _names(repository: Path) -> list[str]:
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )
