"""Has archives unpacked by processes of their own: several at once, each archive once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gpubridge
from gpubridge.engine.environments.store import Entry, EnvironmentStore, open_store
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError, ErrorCode, unavailable

_logger = logging.getLogger(__name__)

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from gpubridge.engine.environments.unpacking import main; sys.exit(main(sys.argv[2:]))"
)
"""Nothing but the standard library and this package is on its path."""

_TELL_EVERY = 5.0
_STOP_SECONDS = 5.0
_SILENT_SECONDS = 10.0
"""Longest silence of the process that unpacks, unless it waits for the archive or the disk."""


class Unpacker:
    """Unpacks archives into a store; owns the processes that do.

    ``cache``: see :func:`open_store`, which is called for the first archive.
    """

    def __init__(self, cache: Path | None, limit: int, threads: LoadThreads) -> None:
        self._cache = cache
        self._store: EnvironmentStore | None = None
        self._limit = limit
        self._threads = threads
        self._running: dict[Path, asyncio.Task[Path]] = {}
        # More at a time would only wait for each other.
        self._room = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def unpack(self, archive: Path) -> Path:
        """Return the directory of an archive's content, unpacked now or before.

        Goes on when the caller is cancelled, as others may wait for the same.

        Raises BridgeError with what is wrong with the archive, or with the disk.
        """
        task = self._running.get(archive)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._unpack(archive))
            self._running[archive] = task
            task.add_done_callback(lambda done: self._forget(archive, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise unavailable("the server is stopping") from None
            raise

    async def close(self) -> None:
        """Stop what runs; nothing half unpacked is left."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, archive: Path, task: asyncio.Task[Path]) -> None:
        del self._running[archive]
        # Asked for, so that nobody complains when nobody waits any more.
        if not task.cancelled():
            task.exception()

    async def _unpack(self, archive: Path) -> Path:
        what = f"looking for what was unpacked of {archive}"
        store, found = await self._threads.run(what, partial(self._find, archive))
        if found is not None:
            return found.environment
        async with _Turn(self._room) as turn:
            process = await self._start(archive, store)
            try:
                answer = await _Follower(archive, turn).follow(process)
                code = await process.wait()
            finally:
                await _end(process)
        if "environment" in answer:
            return Path(answer["environment"])
        if "error" in answer:
            raise BridgeError(answer["error"], ErrorCode(answer["code"]))
        raise unavailable(
            f"environment {archive} was not unpacked: the process that did it ended with code {code}"
        )

    def _find(self, archive: Path) -> tuple[EnvironmentStore, Entry | None]:
        """Return the store, and in it what an archive was unpacked to before; in a thread."""
        store = self._store
        if store is None:
            store = self._store = open_store(self._cache)
            _logger.info("unpacked environments are kept in %s", store.cache)
        return store, store.find(archive)

    async def _start(self, archive: Path, store: EnvironmentStore) -> asyncio.subprocess.Process:
        package = Path(gpubridge.__file__).parents[1]
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(package)),
                *(str(archive), str(store.cache), str(self._limit), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise unavailable(
                f"environment {archive} cannot be unpacked: no process can be started: {error}"
            ) from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process that is not wanted any more; it gets a moment to clean up."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except asyncio.TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        # Not longer: while it waits for a device or a mount, not even that ends it.
        await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_STOP_SECONDS)


class _Turn:
    """One of the archives that are unpacked at a time; whoever waits for a file lets others."""

    def __init__(self, room: asyncio.Semaphore) -> None:
        self._room = room
        self._held = False

    async def __aenter__(self) -> _Turn:
        await self._room.acquire()
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_way()

    def give_way(self) -> None:
        """Let another archive be unpacked; idempotent."""
        if self._held:
            self._held = False
            self._room.release()


class _Follower:
    """Reads what an unpacking process prints, and tells of it in the log while it takes long."""

    def __init__(self, archive: Path, turn: _Turn) -> None:
        self._archive = archive
        self._turn = turn
        self._clock = asyncio.get_running_loop().time
        self._begin = self._clock()
        self._next = self._begin + _TELL_EVERY
        self._begun = False

    async def follow(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """Return the last line, once there are no more; empty if there was none."""
        assert process.stdout is not None
        fields: dict[str, Any] = {}
        loop = asyncio.get_running_loop()
        while True:
            doing = fields.get("doing", "opening it")
            silence = loop.call_later(_SILENT_SECONDS, self._on_silence, doing)
            line = await process.stdout.readline()
            silence.cancel()
            if not line:
                break
            fields = json.loads(line)
            if "doing" in fields:
                self._report(fields)
        if fields.get("unpacked"):
            _logger.info(
                "environment %s is unpacked after %.1f s: %d files and directories, %s, in %s",
                self._archive,
                self._clock() - self._begin,
                fields["members"],
                _readable(fields["nbytes"]),
                fields["environment"],
            )
        return fields

    def _on_silence(self, doing: str) -> None:
        self._turn.give_way()
        _logger.warning(
            "environment %s: %s for %g s without news",
            self._archive,
            doing,
            _SILENT_SECONDS,
        )

    def _report(self, fields: dict[str, Any]) -> None:
        doing = fields["doing"]
        if doing == "unpacking" and not self._begun:
            self._begun = True
            _logger.info("environment %s is being unpacked", self._archive)
        now = self._clock()
        if doing == "waiting":
            _logger.info(
                "environment %s is being unpacked by another process: waiting", self._archive
            )
        elif now >= self._next:
            self._next = now + _TELL_EVERY
            _logger.info(
                "environment %s: %s for %.0f s, %.0f %%, %d files and directories, %s so far",
                self._archive,
                doing,
                now - self._begin,
                100 * fields["part"],
                fields["members"],
                _readable(fields["nbytes"]),
            )


def _readable(nbytes: int) -> str:
    """Write a number of bytes for people."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
