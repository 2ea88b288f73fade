"""Surroundings at the start of a server: signals that its parent blocked, limits without room for it."""

import resource
import signal
import subprocess
import sys

import pytest

from gpubridge import cli
from gpubridge.cli.limits import check_limits, own_signals
from gpubridge.host_shm import Segment

MASK = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
KINDS = {"-n": resource.RLIMIT_NOFILE, "-v": resource.RLIMIT_AS, "-f": resource.RLIMIT_FSIZE}
MANY = resource.RLIM_INFINITY


def test_signals_are_taken_whatever_the_parent_blocked():
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    ended = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with own_signals():
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
            printed = subprocess.run(
                [sys.executable, "-c", f"{MASK}; exit(7)"], capture_output=True, check=False
            )
            # Processes of models begin with none, and their exit codes are known.
            assert (printed.stdout, printed.returncode) == (b"0\n", 7)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= blocked
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def limits(monkeypatch):
    """Limits by their kind, as this process says that it has them; those that it sets."""
    given, made = {}, []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: given.get(kind, (MANY, MANY)))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: made.append(limit))
    return given, made


@pytest.mark.parametrize("flag", KINDS)
@pytest.mark.parametrize("command", ["serve", "tritonserver"])
def test_a_limit_without_room_for_a_server_ends_its_start(limits, capsys, flag, command):
    limits[0][KINDS[flag]] = (10, 20)
    assert cli.main([command, "--model-repository=/nowhere"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: this process may have ")
    assert f"(ulimit {flag}): a server needs at least " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("soft", "hard", "set_to"), [(8, MANY, 32), (8, 64, 32), (64, 64, None)])
def test_more_files_are_opened_where_that_is_allowed(limits, soft, hard, set_to):
    given, made = limits
    given[resource.RLIMIT_NOFILE] = (soft, hard)
    check_limits()
    assert made == ([] if set_to is None else [(resource.RLIMIT_NOFILE, (set_to, hard))])


@pytest.mark.parametrize(("flag", "limit", "size"), [("-f", 1 << 20, 2 << 20), ("-n", 3, 4096)])
def test_memory_that_a_limit_forbids_names_the_limit(flag, limit, size):
    before = resource.getrlimit(KINDS[flag])
    resource.setrlimit(KINDS[flag], (limit, before[1]))
    try:
        with pytest.raises(Exception, match=rf"\(ulimit {flag}\)$"):
            Segment.create(0, size)
    finally:
        resource.setrlimit(KINDS[flag], before)
