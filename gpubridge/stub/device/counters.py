"""Shows the server what a stub has done on its GPU: words of the control page."""

from __future__ import annotations

from collections.abc import Sequence

from gpubridge.cuda_ipc import CopyStream

__all__ = ["show_work"]


def show_work(streams: Sequence[CopyStream], words: memoryview) -> None:
    """Write bytes by kind, copies by kind, and waits, as `gpubridge.telemetry.statistics` reads them."""
    kinds = streams[0].copied
    for index, kind in enumerate(kinds):
        words[index] = sum(stream.copied[kind] for stream in streams)
        words[index + len(kinds)] = sum(stream.copies[kind] for stream in streams)
    words[2 * len(kinds)] = sum(stream.waits for stream in streams)
