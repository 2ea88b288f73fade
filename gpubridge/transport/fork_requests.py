"""Messages between the server and a fork server, and what marks a stub's processes."""

from __future__ import annotations

__all__ = ["DESCRIPTORS", "FORKS", "MARK", "NOT_FORKED", "READY"]

FORKS = "--forks"
"""First argument of the bootstrap for a fork server, in place of a stub."""
MARK = "GPUBRIDGE_STUB"
"""Variable by which the server finds the processes that a stub leaves; its values are of one length."""
READY = b"ready"
"""The fork server's first message."""
NOT_FORKED = b"0"
"""Its answer in place of a process id: the server has to start this stub anew."""
DESCRIPTORS = 4
"""Descriptors with each request: the stub's channel, standard output, standard error, and its begin."""
