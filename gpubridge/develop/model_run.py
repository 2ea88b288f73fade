"""The engine and the stub of one model in threads of this process, from its load to its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpubridge.config.settings import ServerSettings
from gpubridge.develop.arrays import encode_array
from gpubridge.develop.one_instance import OneInstanceLoader, StubStarter, engine
from gpubridge.develop.printed import output_arrays
from gpubridge.develop.requests import InputTensor, RequestMaker, follow, submit
from gpubridge.develop.settings import run_telemetry
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.request import Outcome
from gpubridge.tensor.dtypes import numpy_dtype

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]
Answer = Outputs | list[Outputs] | BridgeError

_CLOSE_SECONDS = 30.0
# By process, since a forked child does not have the threads of its parent's.
_running: dict[int, ModelRun] = {}


class ModelRun:
    """Runs one instance of a model; at its end it restores the process, whoever waits for that.

    Owns ``files``, its threads, and the process's place for a model. Its threads do not refer to who
    started it, so that a model which nobody refers to any more can be ended. Handlers of signals may
    interrupt any of its methods, and call `end` and `wait` in them.
    """

    def __init__(
        self, directory: Path, version: int | None, settings: ServerSettings, files: ExitStack
    ) -> None:
        self.process = os.getpid()
        self.started: Future[tuple[ModelRepository, Model]] = Future()
        self.ended = threading.Event()
        self._engine_ended = threading.Event()
        self._directory = directory
        self._files = files
        self._ending = False
        self._starter = StubStarter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        # The calls without an answer.
        self._calls: set[Future[list[Answer]]] = set()
        # Taken by who restores the process: the engine's thread, or `start` if that never begins.
        self._restorer = threading.Lock()
        self._imported: tuple[list[str], set[str]] | None = None
        loader = partial(OneInstanceLoader, self._starter, directory, version)
        self._stubs = threading.Thread(target=self._run_stubs, daemon=True)
        self._engine = threading.Thread(
            target=self._run_engine, args=(settings, loader), daemon=True
        )

    # -- in the threads of callers -----------------------------------------------------------------

    def start(self) -> None:
        """Take the process's place for a model, and begin to load; `started` has the outcome.

        Raises BridgeError: INVALID_ARG if another model runs in this process.
        """
        try:
            self._take_place()
            self._imported = list(sys.path), set(sys.modules)
            # Threads at work in compiled code when the interpreter ends can take the process down.
            atexit.register(self._leave)
            self._engine.start()
        except BaseException:
            self.end()
            # After an interrupt the thread may begin all the same, later than this.
            if self._restorer.acquire(blocking=False):
                self._restore()
            raise

    def batch(self, requests: Sequence[Inputs], parameters: Mapping[str, Any]) -> list[Answer]:
        """Execute requests in one batch; UNAVAILABLE once the model is closed."""
        work = self._execute(requests, parameters)
        try:
            if self._ending:
                raise RuntimeError("closed")
            assert self._loop is not None  # it has started
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            # Or its loop has just been closed.
            work.close()
            raise _closed(self._directory.name) from None
        # Without a lock, which a handler of a signal could find held. The engine sets the event before it
        # cancels the calls, so that one of both finds this one.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self._engine_ended.is_set():
            call.cancel()
        try:
            return call.result()
        except CancelledError:
            raise _closed(self._directory.name) from None

    def end(self) -> None:
        """Begin to end, and wait for nothing: also in the garbage collector; nothing in a forked child.

        Idempotent; may be interrupted and repeated.
        """
        if os.getpid() != self.process:
            return
        self._ending = True
        # The engine looks at `_ending` after it has set `_loop`.
        if self._loop is not None:
            # It may be closed, since the load has failed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended; may be interrupted and repeated.

        Raises BridgeError: UNAVAILABLE if it still runs after that many seconds; None for no limit.
        """
        if not self.ended.wait(seconds):
            raise unavailable(
                f"model '{self._directory.name}' of this process was closed, but still runs after {seconds:g} s: "
                f"wait until it returns, or end the process; {self._where()}"
            )
        if self._engine.ident is not None:
            self._engine.join()

    def _leave(self) -> None:
        """End with the interpreter, which does not wait for code of the model."""
        if os.getpid() == self.process:
            self.end()
            self._engine_ended.wait(_CLOSE_SECONDS)

    def _take_place(self) -> None:
        """Become the model of this process, after one that is ending."""
        while (other := _running.setdefault(self.process, self)) is not self:
            if not other._ending:
                # Maybe nobody refers to it any more, but for a cycle.
                gc.collect()
            if not other._ending:
                raise invalid("another model runs in this process: close it first")
            # Again, as an interrupt may have cut it short.
            other.end()
            if not other.ended.wait(_CLOSE_SECONDS):
                raise invalid(
                    f"another model of this process, '{other._directory.name}', was closed or given up, but "
                    f"its code still runs after {_CLOSE_SECONDS:g} s: wait until it returns; {other._where()}"
                )

    def _where(self) -> str:
        """Return the stack of the thread that has not ended: the model's, or else the engine's."""
        thread = self._stubs if self._stubs.is_alive() else self._engine
        frame = sys._current_frames().get(thread.ident or 0)
        return (
            "its thread stands at\n" + "".join(traceback.format_stack(frame))
            if frame
            else "its thread has just ended"
        )

    # -- in threads of its own ---------------------------------------------------------------------

    def _run_stubs(self) -> None:
        while (stub := self._starter.stubs.get()) is not None:
            stub.run(None)

    def _run_engine(self, settings: ServerSettings, loader: Any) -> None:
        if not self._restorer.acquire(blocking=False):
            # Its start was interrupted.
            return
        try:
            self._stubs.start()
            telemetry = run_telemetry(0)
            try:
                asyncio.run(self._serve(settings, telemetry, loader))
            finally:
                telemetry.close()
        except BaseException as error:  # noqa: BLE001  (raised where the model was asked for)
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            self._ending = True
            self._starter.stubs.put(None)
            self._engine_ended.set()
            for call in list(self._calls):
                call.cancel()
            if self._stubs.ident is not None:
                self._stubs.join()
            self._restore()

    async def _serve(self, settings: ServerSettings, telemetry: Any, loader: Any) -> None:
        self._work = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self._ending:
            return
        async with engine(
            settings, telemetry, self._starter, loader, self._close_seconds
        ) as repository:
            for row in repository.failures:
                raise invalid(f"model '{row.name}' was not loaded: {row.reason}")
            self.started.set_result((repository, repository.find(self._directory.name, None)))
            await self._loop.create_future()  # until it is cancelled

    def _cancel(self) -> None:
        # Once: a second time it would interrupt what the first one ends.
        work, self._work = self._work, None
        if work is not None:
            work.cancel()

    def _close_seconds(self) -> float:
        # It ends already, which is not to be cancelled.
        self._work = None
        # Nobody waits for a model that was given up while it was loading.
        return _CLOSE_SECONDS if self.started.done() else 0.0

    def _restore(self) -> None:
        """Give back what the model has of the process."""
        if self._imported is not None:
            # Files of another model, or of another state of this one, may have the same names.
            paths, modules = self._imported
            sys.path[:] = paths
            for name in sys.modules.keys() - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if name.isdecimal() or file.startswith(f"{self._directory}{os.sep}"):
                    del sys.modules[name]
        # With the descriptors of what refers to itself.
        gc.collect()
        self._files.close()
        atexit.unregister(self._leave)
        if _running.get(self.process) is self:
            del _running[self.process]
        self.ended.set()

    async def _execute(
        self, requests: Sequence[Inputs], parameters: Mapping[str, Any]
    ) -> list[Answer]:
        repository, model = self.started.result()
        arena = repository.regions.arena(model.config.name)
        makers = [
            RequestMaker(_tensors(each, model), parameters, model.config) for each in requests
        ]
        made = [maker.make(arena) for maker in makers]
        outcomes: list[list[Outcome | None]] = [[] for _ in made]
        done = [follow(*each) for each in zip(made, (to.append for to in outcomes), strict=True)]
        submit(model, made)
        await asyncio.gather(*done)
        return [_answer(each, model) for each in outcomes]


def _closed(name: str) -> BridgeError:
    return unavailable(f"model '{name}' of this process is closed: make another InProcessModel")


def _tensors(inputs: Inputs, model: Model) -> list[InputTensor]:
    datatypes = {spec.name: spec.datatype for spec in model.config.inputs}
    tensors = []
    for name, value in inputs.items():
        datatype = datatypes.get(name)
        if datatype is not None and not hasattr(value, "dtype"):
            value = np.asarray(value, numpy_dtype(datatype))  # noqa: PLW2901
        tensors.append(InputTensor(name, *encode_array(name, value, datatype or "an input")))
    return tensors


def _answer(outcomes: Sequence[Outcome | None], model: Model) -> Answer:
    responses = []
    for outcome in outcomes:
        if isinstance(outcome, BridgeError):
            return outcome
        if outcome is not None:
            responses.append(output_arrays(outcome, model.config))
    return responses if model.config.decoupled else responses[0]
