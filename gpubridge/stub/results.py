"""Sends results to the server: gathers those of short batches, but never delays them for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpubridge.stub.limits import LIMITS
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.control import FRAME_HEAD, GATHERED_BYTES, ControlPage
from gpubridge.transport.messages import Kind, encode_frame, encode_responses


class ResultSender:
    """Gathers encoded results and sends them as one message.

    The executing thread adds results. After a slow batch, a second thread watches the next batches:
    during another slow one it sends the gathered results, so that they do not wait for another
    request. It runs only then, since it costs a tenth of the throughput of short batches.
    """

    def __init__(self, channel: Channel, control: ControlPage) -> None:
        self._channel = channel
        self._control = control
        self._lock = threading.Lock()
        self._results: list[bytes] = []
        self._size = FRAME_HEAD
        self._since = 0
        self._gathering = threading.Event()
        self._watched = 0
        self._has_watcher = False

    def add(self, result: bytes, started_at: int, ended_at: int, last: bool) -> None:
        """Add the result and times of a batch; the last one of a message sends all."""
        if ended_at - started_at > LIMITS.long_ns:
            self._watched = LIMITS.watched_batches
        # Without a thread that would send it during a slow batch, none is kept.
        last = last or (self._watched > 0 and not self._is_watched())
        with self._lock:
            if last and not self._results:
                self._channel.send(encode_frame(Kind.RESULTS, (result,)))
                return
            self._results.append(result)
            self._since = self._since or started_at
            begin, self._size = self._size, self._size + len(result)
            if last or ended_at - self._since > LIMITS.gathered_ns or self._size > GATHERED_BYTES:
                self._send()
                return
            # The server reads them here if this process dies before it sends them.
            control = self._control
            control.gathered[begin : self._size] = result
            control.gathered_word[0] = len(self._results) << 32 | self._size
        if self._watched:
            self._watched -= 1
            if not self._gathering.is_set():
                self._gathering.set()

    def respond(self, record: bytes, copied: int) -> None:
        """Send a response of a response sender immediately; any thread may."""
        self._channel.send(encode_responses([record], copied))

    def disown(self) -> None:
        """Discard the gathered results: for a forked child, whose parent sends them."""
        self._lock = threading.Lock()
        self._results = []
        self._size = FRAME_HEAD

    def _is_watched(self) -> bool:
        self._has_watcher = self._has_watcher or start_watcher(self._watch)
        return self._has_watcher

    def _send(self) -> None:
        results, self._results = self._results, []
        self._size, self._since = FRAME_HEAD, 0
        self._channel.send(encode_frame(Kind.RESULTS, results))
        self._control.gathered_word[0] = 0

    def _watch(self) -> None:
        quiet = 0
        while True:
            self._gathering.wait()
            before = self._results
            time.sleep(LIMITS.patience_ns / 1e9)
            with self._lock:
                if self._results:
                    quiet = 0
                    if self._results is before:
                        try:
                            self._send()
                        except ChannelClosed:
                            return
                else:
                    quiet += 1
                    if quiet > LIMITS.quiet_looks:
                        self._gathering.clear()


def start_watcher(run: Callable[[], None]) -> bool:
    """Start the thread that sends finished results during a slow batch; False: the system has none."""
    try:
        threading.Thread(target=run, name="gpubridge-results", daemon=True).start()
    except RuntimeError:
        return False
    return True
