"""Keep what a signal handler raises while the stub runs no code of the model, for its next batch."""

from __future__ import annotations


class Interruption:
    """Keeps an exception of a signal's handler for the next batch, which fails with it.

    So does Triton's stub, which runs handlers in ``execute`` only.

    - ``error``: the exception, if there is one.
    - ``keeps``: whether to keep any: not in a process that goes on after the stub, whose handlers are
      its own.
    """

    __slots__ = ("error", "keeps")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.keeps = True

    def keep(self, error: BaseException) -> bool:
        """Keep an exception, the first one; returns whether exceptions are kept."""
        if self.keeps:
            self.error = self.error or error
        return self.keeps

    def check(self) -> None:
        """Raise the exception, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error
