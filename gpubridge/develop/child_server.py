"""A server as a child process, for tests, notebooks and scripts."""

from __future__ import annotations

import _thread
import argparse
import atexit
import contextlib
import difflib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from gpubridge.config.settings import RepositorySettings, ServerSettings
from gpubridge.develop.http_call import infer
from gpubridge.develop.sources import declarations, file_of, notebook_module
from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.flags import Flag, add_flags, declared_flags, from_flags
from gpubridge.one_file.adapter import loading_file
from gpubridge.own_command import own_command
from gpubridge.tensor.native import require_native

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

_FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
_SET_HERE = ("ports_file", "exit_with_parent")
_LOOK_SECONDS = 0.02
_END_SECONDS = 10
_LOG_LINES = 40


class Server:
    """A gpubridge server in a process of its own, for as long as a ``with`` block runs.

    Parameters
    ----------
    models : path, function or class, or a list of them
        A model repository, the directory of one model, a file with models (``app.py``, or
        ``app.py:NAME``), or what `gpubridge.model` has declared: in a module, a script (with its server
        under ``if __name__ == "__main__":``) or a notebook.
    start_timeout : float, optional
        Seconds until all models are loaded; None for no limit.
    **settings
        Flags of ``gpubridge serve`` with underscores: ``http_port=8000``, ``log_verbose=1``,
        ``load_model=["a", "b"]``. Ports that are not named are free ones, on loopback.

    Attributes
    ----------
    url : str
        ``http://127.0.0.1:PORT``; ``https`` with TLS.
    http_address, grpc_address, metrics_address : str
        ``HOST:PORT``, as tritonclient takes it; empty for an endpoint that is off.

    Raises
    ------
    TypeError
        If a setting has no flag.
    BridgeError
        If a setting is wrong; when it starts, if a model does not load or a port is taken, with the
        end of the server's log.

    Notes
    -----
    The process ends with the block, with `stop`, with the last reference (which waits for nothing), and
    with this process, however that ends. It has no controlling terminal: Ctrl-C reaches this process alone. A forked child
    has the addresses, and ends nothing.

    Examples
    --------
    >>> with gpubridge.Server("models") as server:  # doctest: +SKIP
    ...     server.infer("sum", {"NUMBERS": numbers})["TOTAL"]
    """

    def __init__(
        self,
        models: Any,
        *,
        start_timeout: float | None = None,
        **settings: Any,
    ) -> None:
        require_native()
        if loading_file():
            raise invalid(
                f"{loading_file()} starts a server while it is imported for its models: put that "
                'under if __name__ == "__main__":'
            )
        given = list(models) if isinstance(models, (list, tuple)) else [models]
        paths = [os.path.abspath(each) for each in given if isinstance(each, (str, os.PathLike))]  # noqa: PTH100
        missing = [
            path
            for path in paths
            if not os.path.exists(path) and not os.path.exists(path.rpartition(":")[0])  # noqa: PTH110
        ]
        if missing or not given:
            raise invalid(f"expected the path of models, got {', '.join(missing) or 'none'}")
        declared = declarations([x for x in given if not isinstance(x, (str, os.PathLike))])
        files = {each.name: file_of(each) for each in declared}
        self._models = paths + [f"{file}:{name}" for name, file in files.items() if file]
        cells = [each for each in declared if not files[each.name]]
        self._notebook = ",".join(each.name for each in cells), notebook_module(cells)
        self._words = _flag_words({**_FREE_PORTS, **settings})
        self._settings = _checked_settings(self._words)
        self._start_timeout = start_timeout
        self._child: _Child | None = None
        self.url = self.http_address = self.grpc_address = self.metrics_address = ""

    def start(self) -> Self:
        """Start the server, and wait until its models are loaded; ``with`` does so.

        Returns
        -------
        Server
            Itself.
        """
        if self._child is not None and not self._child.is_stopped:
            raise invalid("the server is running")
        words = [*self._models, *self._words, "--exit-with-parent"]
        self._child = child = _Child(
            words, self._settings.process.exit_timeout_secs, *self._notebook
        )
        child.end_with(self)
        try:
            addresses = child.wait_until_ready(self._start_timeout)
        except BaseException:
            self.stop()
            raise
        self.http_address = addresses.get("http", "")
        self.grpc_address = addresses.get("grpc", "")
        self.metrics_address = addresses.get("metrics", "")
        scheme = "https" if self._settings.http.tls.served else "http"
        self.url = f"{scheme}://{self.http_address}" if self.http_address else ""
        return self

    def stop(self) -> None:
        """Stop the server: requests in flight are answered, models are finalized. Idempotent."""
        if self._child is not None:
            self._child.stop()

    def log(self) -> str:
        """Return the output of the server and its models so far, also once it is stopped."""
        return "" if self._child is None else self._child.log()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Send a request over HTTP, and return its outputs.

        Parameters
        ----------
        model : str
        inputs : mapping of str to array-like
            By name; of the datatypes of their arrays.
        version : int, optional
            The latest one if not given.
        parameters : mapping, optional
            Of the request: ``sequence_id``, ``priority``, or a model's own.

        Returns
        -------
        dict of str to numpy.ndarray
            Strings are ``bytes`` in an array of objects.

        Raises
        ------
        BridgeError
            With the server's text, if it answers with an error or is not running.
        """
        if not self.url.startswith("http://") or self._child is None or self._child.is_stopped:
            raise unavailable("infer needs a running server that serves HTTP without TLS")
        where = f"/v2/models/{quote(model, safe='')}" + (
            "" if version is None else f"/versions/{version}"
        )
        return infer(self.http_address, f"{where}/infer", inputs, parameters or {})

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        self.stop()


class _Child:
    """The process of a server, its log and the file with its addresses."""

    def __init__(
        self, words: Sequence[str], exit_seconds: float, names: str = "", source: str = ""
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpubridge-server-"))
        self._has_notebook = bool(names)
        if names:
            notebook = self._folder / "notebook.py"
            notebook.write_text(source, encoding="utf-8")
            words = [f"{notebook}:{names}", *words]
        self._ports = self._folder / "ports.json"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        self._output = ""
        self._limit = exit_seconds + _END_SECONDS
        self._creator = os.getpid()
        # Reentrant, for handlers of signals; `_stopper` is the thread that stops the process.
        self._lock = threading.RLock()
        self._stopper = 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        try:
            self._process = _start(["serve", *words, f"--ports-file={self._ports}"], self._log)
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def is_stopped(self) -> bool:
        """Return whether `stop` has ended the process."""
        return self._log.closed

    def end_with(self, owner: object) -> None:
        """Stop when ``owner`` has no reference any more, and when the interpreter ends."""
        self._finalizer = weakref.finalize(owner, self._stop_beside)
        self._finalizer.atexit = False
        atexit.register(self.stop)

    def wait_until_ready(self, limit: float | None) -> dict[str, str]:
        """Return the addresses by endpoint; raises BridgeError if the server ends before."""
        since = time.monotonic()
        while not self._ports.exists():
            if self._ends_within(_LOOK_SECONDS) or self.is_stopped:
                # A thread that stops it goes first: it closes what tells the exit code.
                with self._lock:
                    raise self._failure(self._how_it_ended())
            if limit is not None and time.monotonic() - since > limit:
                raise self._failure(f"the server is not ready after {limit:g} s")
        with self._lock:
            if self.is_stopped:
                raise self._failure(self._how_it_ended())
            written = json.loads(self._ports.read_bytes())
            if not self._has_notebook:
                # Now: this process may be killed.
                shutil.rmtree(self._folder)
        return {name: _connectable(**at) for name, at in written.items() if name != "pid"}

    def log(self) -> str:
        """Return the output of the process, also once it is stopped."""
        if self._log.closed:
            return self._output
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def stop(self) -> None:
        """End the process and all that it started; idempotent, and nothing in a forked child.

        A second thread waits for the first; the handler of a signal that comes meanwhile does not. An
        interrupt of the wait kills what is left.
        """
        if os.getpid() != self._creator or self._stopper == threading.get_ident():
            return
        with self._lock:
            self._stopper = threading.get_ident()
            try:
                if not self.is_stopped:
                    self._stop()
            finally:
                self._stopper = 0

    def _stop(self) -> None:
        try:
            # To the server alone: it ends its stubs.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            self._ends_within(self._limit)
        finally:
            # Also of a server that has ended while it read a file of models.
            self._kill_group()
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._output = self.log()
            self._log.close()
            if self._finalizer is not None:
                self._finalizer.detach()
            atexit.unregister(self.stop)
            os.close(self._pidfd)

    def _stop_beside(self) -> None:
        """Stop in a thread: in the garbage collector nothing may wait, and no lock may be taken."""
        if os.getpid() == self._creator:
            _thread.start_new_thread(self.stop, ())

    def _ends_within(self, seconds: float) -> bool:
        """Wait for the process's end; it stays a zombie, whose number is no other's."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _how_it_ended(self) -> str:
        if self.is_stopped:
            return "the server was stopped while it started"
        return f"the server ended with exit code {self._exit_code()}"

    def _exit_code(self) -> int | None:
        """Return the exit code of a process that has ended."""
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            # Somebody else has waited for it: what Popen makes of that.
            return self._process.wait()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _kill_group(self) -> None:
        """Kill the process and its group for as long as their number is theirs: until it is reaped."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # Fails for a process that somebody else has waited for.
            signal.pidfd_send_signal(self._pidfd, 0)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, text: str) -> BridgeError:
        last = self.log().splitlines()[-_LOG_LINES:]
        return unavailable("\n".join([f"{text}; the end of its log:", *last]))


def _start(words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command of gpubridge in a session of its own."""
    return subprocess.Popen(
        [*own_command("gpubridge"), *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _connectable(address: str, port: int) -> str:
    """Return the ``HOST:PORT`` at which this machine connects to a listening address."""
    host = ip_address(address)
    if host.is_unspecified:
        host = ip_address("::1" if host.version == 6 else "127.0.0.1")
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"


def _flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of settings; raises TypeError for one without a flag."""
    flags = {each.key: each for each in declared_flags(ServerSettings)}
    words: list[str] = []
    for name, value in settings.items():
        if name not in flags or name in _SET_HERE:
            close = difflib.get_close_matches(name, flags.keys() - set(_SET_HERE), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"Server() has no setting '{name}'{hint}")
        words += _words_of(flags[name], value)
    return words


def _words_of(flag: Flag, value: Any) -> list[str]:
    if flag.options.get("action") == "store_true":
        if not isinstance(value, bool):
            raise invalid(f"{flag.key} expects True or False, got {value!r}")
        return [flag.name] * value
    several = flag.options.get("action") == "append"
    if several and isinstance(value, (list, tuple)):
        return [f"{flag.name}={each}" for each in value]
    expected = (str, os.PathLike) if several else _KINDS.get(type(flag.default), object)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        kind = "a list of texts" if several else f"of type {type(flag.default).__name__}"
        raise invalid(f"{flag.key} expects a value {kind}, got {value!r}")
    return [f"{flag.name}={value}"]


_KINDS: dict[type, Any] = {bool: bool, int: int, float: (int, float), str: (str, os.PathLike)}


def _checked_settings(words: Sequence[str]) -> ServerSettings:
    """Return the settings of a command line as the server will have them; raises BridgeError."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, ServerSettings)
    try:
        options = parser.parse_args(list(words))
    except argparse.ArgumentError as error:
        raise invalid(str(error)) from None
    # The paths of the models are arguments, not flags.
    repository = from_flags(RepositorySettings, options, model_directories=(Path(),))
    return from_flags(ServerSettings, options, repository=repository)
