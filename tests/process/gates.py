"""Gates: models wait at one until the test opens it, without a look from time to time."""

import fcntl
from pathlib import Path


def waiting_at(path: Path) -> str:
    """Return the code, an expression, with which a model waits while a gate with this path is there and closed."""
    return f"__import__('fcntl').flock(open({str(path)!r}), {fcntl.LOCK_SH})"


class Gate:
    """A lock of a file, held by the test until `open`; it is open, too, once the test's process has ended.

    ``wait`` is the code, an expression, with which a model waits until the gate is open.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.wait = waiting_at(path)

    def open(self) -> None:
        """Let all go on that wait, now or later; opening it again has no effect."""
        self._file.close()
