"""A server that is forked with its imports made, and whose stubs are forked, too.

The process from which it is forked has imported what stubs import first, and then what servers import.
The server's fork server (`gpubridge.stub.fork_server`) is forked before the server runs, without the latter,
and gets its socket when the server starts its first stub.
"""

import contextlib
import importlib
import os
import socket
import sys
from pathlib import Path

from gpubridge.transport.fork_requests import MARK

_STUB = ("numpy", "gpubridge.stub.fork_server", "gpubridge.stub.process")
_SERVER = (
    "uvloop",
    "gpubridge.cli.run",
    "gpubridge.cli.serve",
    "gpubridge.develop.one_instance",
    "gpubridge.develop.session",
    "gpubridge.engine.repository.one_file",
    "gpubridge.engine.supervisor.fork_servers",
    "gpubridge.server",
    "gpubridge.telemetry.server_telemetry",
)

PLAIN = "TESTS_PLAIN_SERVER"
"""A variable: the server starts its stubs and fork servers as servers of users do."""

for _name in _STUB:
    importlib.import_module(_name)
_OF_STUBS = frozenset(sys.modules)
for _name in _SERVER:
    importlib.import_module(_name)
with contextlib.suppress(ImportError):
    # Not the driver itself.
    importlib.import_module("cuda.bindings.driver")


def main() -> int:
    """Run a command as `gpubridge` does; returns its exit code. In a stub, returns the stub's."""
    if sys.argv[1] == "run" or os.environ.pop(PLAIN, ""):
        del os.environ[MARK]
        return importlib.import_module("gpubridge.cli").main()
    server = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        return _become_fork_server(theirs, server)
    theirs.close()
    # It had to be there when the process started from which all are forked.
    del os.environ[MARK]
    _start_by(ours, pid)
    try:
        return importlib.import_module("gpubridge.cli").main()
    finally:
        if ours.fileno() >= 0:
            # No stub was started. What a test looks for after the server's end is not to include it.
            ours.close()
            os.waitpid(pid, 0)


def _become_fork_server(start: socket.socket, server: int) -> int:
    stub = importlib.import_module("gpubridge.stub.process")
    forks = importlib.import_module("gpubridge.stub.fork_server")
    for name in sys.modules.keys() - _OF_STUBS:
        del sys.modules[name]
    os.setsid()
    Path("/proc/self/comm").write_text("gpubridge-forks")
    sys.argv = [""]
    message, fds, _, _ = socket.recv_fds(start, 1, 3, socket.MSG_CMSG_CLOEXEC)
    start.close()
    if not message:
        return 0
    control, *streams = fds
    for standard, fd in enumerate(streams, start=1):
        os.dup2(fd, standard)
        os.close(fd)
    return stub.run(forks.fork_stubs(control, server, list, []), server)


def _start_by(start: socket.socket, pid: int) -> None:
    """Have the server's first fork server be the process that waits for this socket's message."""
    servers = importlib.import_module("gpubridge.engine.supervisor.fork_servers")
    variables, execute = dict(os.environ), servers.execute

    def wake(environment, arguments, fds, output, mark):
        usual = environment.python == sys.executable and environment.variables == variables
        if not usual or start.fileno() < 0:
            return execute(environment, arguments, fds, output, mark)
        with start:
            socket.send_fds(start, [b"1"], [*fds, *output.write_ends])
        return servers.ForkedStub(pid)

    def is_wanted(forks, key):
        return usual_is_wanted(forks, key) or (
            key[0] == sys.executable and dict(key[1]) == variables
        )

    usual_is_wanted = servers.ForkServers._is_wanted
    servers.ForkServers._is_wanted = is_wanted
    # The server may be lent to one test after another for longer than a fork server lives.
    servers._IDLE_SECONDS = servers._LONGEST_SECONDS = 3600.0
    servers.execute = wake
    gpubridge = importlib.import_module("gpubridge.server")
    start_stub = gpubridge.start_stub

    def start_any(environment, model, instance, sock, again, forks=None):
        # Stubs that follow a dead one are forked, too.
        del again
        return start_stub(environment, model, instance, sock, again=False, forks=forks)

    gpubridge.start_stub = start_any
