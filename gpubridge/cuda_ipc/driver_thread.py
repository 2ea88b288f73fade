"""A thread that calls the driver: what it is given is done in that order."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Callable


class DriverThread:
    """Runs one call after the other on a thread of its own, which sleeps while there is none."""

    def __init__(self) -> None:
        # Its `put` takes no lock that an interrupted `put` could hold: for finalizers.
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Do something later, without a result; finalizers may call this, on any thread."""
        self._queue.put(work)

    def finish(self) -> None:
        """Wait until all is done that was submitted before."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def close(self) -> None:
        """End the thread when it has done what it was given; what comes later is not done."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                # Stubs that log nothing so do not load it.
                import logging  # noqa: PLC0415

                logging.getLogger(__name__).exception("a call of the driver failed")
            # What it refers to may be the last of some memory.
            del work
