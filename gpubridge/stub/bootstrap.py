"""First file that the interpreter of a stub, or of a fork server, runs; started by path, never imported.

The interpreter may be the model's own. It loads the gpubridge package from its folder, whose parent
is not added to sys.path: packages installed beside it stay invisible. This file runs on any Python
3, so that an unsupported one reports what is wrong.
"""

import gc
import importlib.util
import json
import os
import socket
import sys

_FAILED = 17
_FORKS = "--forks"
_MODULE = "GPUBRIDGE_STUB_MODULE"
_FORKS_NAME = "gpubridge-forks"


def main():
    """Load the package and become a stub; returns the exit code."""
    # Imports leave next to no garbage.
    gc.disable()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    forks = sys.argv[1] == _FORKS
    fd, server_pid = map(int, sys.argv[1 + forks : 3 + forks])
    if forks:
        with open("/proc/self/comm", "w") as name:
            name.write(_FORKS_NAME)
        imported = state_of_imports()
        # Of a sitecustomize, for example: the forks would not have it, but locks that it holds.
        if len(os.listdir("/proc/self/task")) > 1:
            return 1
    # A model may parse sys.argv as its own command line; Triton's stubs have none either.
    sys.argv = [""]
    problem = _problem()
    if problem is not None:
        # Instead of a fork server, the server starts the stub itself, which tells the problem.
        if not forks:
            message = bytes((_FAILED,)) + json.dumps({"error": problem}).encode()
            socket.socket(fileno=fd).send(message)
        return 1
    _restore_library_path()
    root = os.path.dirname(here)
    spec = importlib.util.spec_from_file_location(
        "gpubridge", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    package = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["gpubridge"] = package
    spec.loader.exec_module(package)  # type: ignore[union-attr]

    module = os.environ.pop(_MODULE, "")
    if module:
        from gpubridge.tensor.native import use_module

        use_module(module)
    from gpubridge.stub.process import run

    if forks:
        from gpubridge.stub.fork_server import fork_stubs

        # Returns in each stub.
        fd = fork_stubs(fd, server_pid, state_of_imports, imported)
    gc.enable()
    return run(fd, server_pid)


def _restore_library_path():
    """Remove the environment's libraries from LD_LIBRARY_PATH, which child programs inherit."""
    own = os.path.join(os.environ.get("VIRTUAL_ENV", ""), "lib")
    first, colon, rest = os.environ.get("LD_LIBRARY_PATH", "").partition(":")
    if first == own:
        if colon:
            os.environ["LD_LIBRARY_PATH"] = rest
        else:
            del os.environ["LD_LIBRARY_PATH"]


def state_of_imports():
    """Return the inodes and times of the interpreter and of the folders that modules are imported from."""
    found = []
    for path in [sys.executable, *sys.path]:
        try:
            state = os.stat(path or ".")
            found.append((path, state.st_ino, state.st_mtime_ns))
        except OSError:
            found.append((path, 0, 0))
    return found


def _problem():
    """Return the reason why this interpreter cannot run a stub, or None."""
    version = "%d.%d" % sys.version_info[:2]
    if sys.version_info < (3, 9):
        return (
            "the model's interpreter %s is Python %s; a stub needs Python 3.9 or newer: make the "
            "environment that EXECUTION_ENV_PATH names with a newer one" % (sys.executable, version)
        )
    try:
        _import_numpy()
    except ImportError as error:
        return (
            "the model's interpreter %s (Python %s) cannot import numpy: %s; install numpy into "
            "that environment" % (sys.executable, version, error)
        )
    return None


def _import_numpy():
    """Import numpy; raises ImportError.

    Waiting threads of its OpenBLAS, which reads this variable when it is loaded, would spin for 2^26 ticks (25 ms), on
    processors that other stubs need; 2^20 still span the calls of one ``execute``.
    """
    name = "OPENBLAS_THREAD_TIMEOUT"
    given = name in os.environ
    os.environ.setdefault(name, "20")
    try:
        import numpy  # noqa: F401
    finally:
        if not given:
            del os.environ[name]


if __name__ == "__main__":
    sys.exit(main())
