"""Unpacks archives in separate processes: several concurrently, each archive once."""

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
from gpubridge.engine.environments.store import Entry, EnvironmentStore, is_whole, open_store
from gpubridge.engine.load_progress import load_step, readable_size
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError, ErrorCode, unavailable

_logger = logging.getLogger(__name__)

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from gpubridge.engine.environments.unpack_process import main; sys.exit(main(sys.argv[2:]))"
)
"""Its path has the standard library and this package only."""

_STOP_SECONDS = 5.0
_SILENT_SECONDS = 10.0
"""Longest time without progress; a longer one means that the process waits for a file or the disk."""


class Unpacker:
    """Unpacks archives into a store; owns the processes.

    ``cache``: see :func:`open_store`, called for each archive.
    """

    def __init__(self, cache: Path | None, limit: int, threads: LoadThreads) -> None:
        self._cache = cache
        self._told = False
        self._limit = limit
        self._threads = threads
        self._running: dict[Path, asyncio.Task[Path]] = {}
        self._readers: dict[Path, _ProgressReader] = {}
        # One per core.
        self._slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def unpack(self, archive: Path) -> Path:
        """Return the directory of an archive's contents, unpacked now or before.

        Continues if the caller is cancelled, as other callers may wait for the same archive.

        Raises BridgeError for an invalid archive or a disk error.
        """
        task = self._running.get(archive)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._unpack(archive))
            self._running[archive] = task
            task.add_done_callback(lambda done: self._forget(archive, done))
        try:
            with load_step(partial(self._step, archive)):
                return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise unavailable("the server is stopping") from None
            raise

    async def restore(self, archive: Path, root: Path) -> Path:
        """Return ``root``, where an archive was unpacked, or if that was emptied since, unpack it again.

        Raises BridgeError as `unpack`.
        """
        what = f"looking whether the unpacked contents of {archive} are whole"
        whole = await self._threads.run(what, partial(is_whole, root))
        return root if whole else await self.unpack(archive)

    async def close(self) -> None:
        """Stop running processes; they remove partial contents."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _step(self, archive: Path) -> tuple[str, float | None]:
        reader = self._readers.get(archive)
        return (f"environment {archive}", None) if reader is None else reader.step()

    def _forget(self, archive: Path, task: asyncio.Task[Path]) -> None:
        del self._running[archive]
        self._readers.pop(archive, None)
        # Mark the exception as retrieved, as all callers may be cancelled.
        if not task.cancelled():
            task.exception()

    async def _unpack(self, archive: Path) -> Path:
        what = f"looking for the unpacked contents of {archive}"
        store, found = await self._threads.run(what, partial(self._find, archive))
        if found is not None:
            return found.environment
        async with _UnpackSlot(self._slots) as slot:
            reader = self._readers[archive] = _ProgressReader(archive, slot)
            process = await self._start(archive, store)
            try:
                answer = await reader.follow(process)
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
        """Return the store, and the entry of an archive that was unpacked before; runs in a thread."""
        # Opened each time, as someone may have removed the directory.
        store = open_store(self._cache)
        if not self._told:
            self._told = True
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
    """Terminate a process; kill it if it does not clean up in time."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except asyncio.TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        # Limited: a process that waits for a device or a mount survives even SIGKILL.
        await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_STOP_SECONDS)


class _UnpackSlot:
    """A slot for concurrent unpacking, released early by a process that waits for a file."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def __aenter__(self) -> _UnpackSlot:
        await self._slots.acquire()
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot for another archive; idempotent."""
        if self._held:
            self._held = False
            self._slots.release()


class _ProgressReader:
    """Reads the output of an unpacking process."""

    def __init__(self, archive: Path, slot: _UnpackSlot) -> None:
        self._archive = archive
        self._slot = slot
        self._clock = asyncio.get_running_loop().time
        self._begin = self._clock()
        self._begun = False
        self._fields: dict[str, Any] = {}

    def step(self) -> tuple[str, float | None]:
        """Return what the process does, and the part that is done."""
        fields = self._fields
        doing = f"environment {self._archive}: {fields.get('doing', 'opening it')}"
        if "part" not in fields:
            return doing, None
        size = readable_size(fields["nbytes"])
        return f"{doing}, {fields['members']} files and directories, {size}", fields["part"]

    async def follow(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """Read until the end; return the fields of the last line; empty if there was none."""
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        while True:
            doing = self._fields.get("doing", "opening it")
            silence = loop.call_later(_SILENT_SECONDS, self._on_silence, doing)
            line = await process.stdout.readline()
            silence.cancel()
            if not line:
                break
            self._fields = json.loads(line)
            if "doing" in self._fields:
                self._report(self._fields["doing"])
        fields = self._fields
        if fields.get("unpacked"):
            # A quick one has not told that it began.
            self._report("unpacking")
            _logger.info(
                "environment %s is unpacked after %.1f s: %d files and directories, %s, in %s",
                self._archive,
                self._clock() - self._begin,
                fields["members"],
                readable_size(fields["nbytes"]),
                fields["environment"],
            )
        return fields

    def _on_silence(self, doing: str) -> None:
        self._slot.release()
        _logger.warning(
            "environment %s: %s for %g s without progress",
            self._archive,
            doing,
            _SILENT_SECONDS,
        )

    def _report(self, doing: str) -> None:
        if doing == "unpacking" and not self._begun:
            self._begun = True
            # As Triton says it.
            _logger.info("Extracting Python execution env %s", self._archive)
        if doing == "waiting":
            _logger.info(
                "environment %s is being unpacked by another process: waiting", self._archive
            )
