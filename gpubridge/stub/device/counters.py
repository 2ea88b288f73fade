"""Shows the server what a stub has done on its GPU: words of the control page."""

from __future__ import annotations

from gpubridge.cuda_ipc import CopyStream

__all__ = ["show_work"]


def show_work(stream: CopyStream, words: memoryview) -> None:
    """Write bytes by kind, copies by kind, and waits, as `gpubridge.telemetry.device_work` reads them."""
    kinds = len(stream.copied)
    for index, kind in enumerate(stream.copied):
        words[index] = stream.copied[kind]
        words[index + kinds] = stream.copies[kind]
    words[2 * kinds] = stream.waits
