"""A fork server by its messages: which processes it makes, and which of them become stubs."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpubridge
from gpubridge.transport.fork_requests import FORKS, MARK, NOT_FORKED, READY
from tests.process.server import alive, wait_until

BOOTSTRAP = Path(gpubridge.__file__).parent / "stub" / "bootstrap.py"
SUBREAPER = 36
MARKS = ["00000000.00000001", "00000000.00000002"]
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def fork_server(*before):
    """The socket to a fork server, which has the attribute ``process``; this process adopts its forks."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(150)
    with ours:
        with theirs:
            words = (FORKS, str(theirs.fileno()), str(os.getpid()), "-" * 200)
            process = subprocess.Popen(
                [*before, sys.executable, str(BOOTSTRAP), *words],
                env={**os.environ, MARK: MARKS[0]},
                pass_fds=(theirs.fileno(),),
            )
        assert ours.recv(64) == READY
        yield ours, process
    process.wait(150)
    prctl(SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def control():
    with fork_server() as (control, _):
        yield control


class Asked:
    """A stub that was asked for: its process id, and the other ends of what it was given."""

    def __init__(self, control, *, without=0):
        self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        begin, self.begin = os.pipe()
        message = json.dumps({"mark": MARKS[1], "words": ["python", "stub", "m_0"]}).encode()
        with channel:
            fds = (channel.fileno(), 1, 2, begin)
            socket.send_fds(control, [message], fds[: len(fds) - without])
            self.answer = control.recv(64)
        os.close(begin)

    def close(self):
        os.close(self.begin)
        self.channel.close()

    def end(self):
        self.close()
        return self.code()

    def code(self):
        """Wait for its end; return its exit code."""
        status = os.waitpid(int(self.answer), 0)[1]
        return os.waitstatus_to_exitcode(status)


def test_a_stub_begins_when_it_is_told(control):
    asked = Asked(control)
    pid = int(asked.answer)
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
    # It has not looked at its channel: what it would refuse lies there.
    asked.channel.send(b"no message")
    os.write(asked.begin, b"1")
    asked.channel.settimeout(150)
    assert asked.channel.recv(1 << 16) == b"" or alive(pid)
    assert asked.end() != 0


def test_a_stub_that_is_not_wanted_ends_without_a_look_at_its_channel(control):
    asked = Asked(control)
    # What it would refuse; to do so, it needs a channel that is open.
    asked.channel.send(b"for another one")
    os.close(asked.begin)
    assert asked.code() == 0
    asked.channel.settimeout(150)
    with pytest.raises(ConnectionResetError):
        # The end of a channel whose other side left something unread.
        asked.channel.recv(1 << 16)
    asked.channel.close()


def test_none_is_forked_without_all_descriptors(control):
    refused = Asked(control, without=1)
    assert refused.answer == NOT_FORKED
    refused.close()
    assert Asked(control).end() == 0


def test_its_own_name_is_that_of_no_stub_and_it_ends_with_its_socket():
    with fork_server() as (control, process):
        words = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert words.rstrip("\0") == "gpubridge-forks"
        assert Path(f"/proc/{process.pid}/comm").read_text() == "gpubridge-forks\n"
        control.close()
        assert process.wait(150) == 0


def test_it_forks_where_the_ends_of_children_are_ignored():
    with fork_server(sys.executable, "-c", IGNORING) as (control, _):
        asked = Asked(control)
        status = Path(f"/proc/{int(asked.answer)}/status")

        def ignores():
            ignored = int(status.read_text().partition("SigIgn:")[2].split()[0], 16)
            return ignored >> (signal.SIGCHLD - 1) & 1

        wait_until(ignores, "it to ignore the signal as what started it")
        assert asked.end() == 0
