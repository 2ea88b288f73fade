"""The one error of the benchmark: a figure could not be taken, and why."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A server, a load generator or an answer is not as a measurement needs it.

    Raised with what was expected, what came, where, and what to do. A row that raises it has no
    figures; the other rows go on.
    """
