"""A model that runs in this process, without a server, and is called like a function."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.config.settings import ServerSettings
from gpubridge.develop.arrays import encode_array
from gpubridge.develop.one_instance import OneInstanceLoader, StubStarter, engine, one_model
from gpubridge.develop.printed import output_arrays
from gpubridge.develop.requests import InputTensor, RequestMaker, follow, submit
from gpubridge.develop.settings import run_settings, run_telemetry
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.errors import BridgeError, invalid
from gpubridge.request import Outcome
from gpubridge.tensor.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    Outputs = dict[str, NDArray[Any]]

_CLOSE_SECONDS = 30.0
_running = threading.Lock()


class InProcessModel:
    """One instance of a model in a thread of this process; models that it calls are processes.

    Requests take the way of a client's: the same parsing, checks and texts. Only one model at a time:
    what `pb_utils` gives to a model belongs to the process.

    Parameters
    ----------
    path : path
        The model's directory, or ``app.py:NAME``.
    version : int, optional
        The highest if not given.
    load_models : sequence of str, optional
        Models beside it that this one calls, or ``["*"]``.
    gpu_fallback : {"none", "host"}, optional
        As ``--gpu-fallback``.

    Raises
    ------
    BridgeError
        If the model does not load, or another one runs in this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        load_models: Sequence[str] = (),
        gpu_fallback: Any = "none",
    ) -> None:
        if not _running.acquire(blocking=False):
            raise invalid("another model runs in this process: close it first")
        self._files = ExitStack()
        self._threads: list[threading.Thread] = []
        try:
            self._directory, others = self._files.enter_context(one_model(os.fspath(path)))
            settings = run_settings(
                self._directory,
                repositories=others,
                load_models=load_models,
                gpu_fallback=gpu_fallback,
            )
        except BaseException:
            self._files.close()
            _running.release()
            raise
        self._imported = list(sys.path), set(sys.modules)
        self._starter = StubStarter()
        self._started: Future[tuple[ModelRepository, Model]] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        loader = partial(OneInstanceLoader, self._starter, self._directory, version)
        self._threads = [
            threading.Thread(target=self._run_engine, args=(settings, loader), daemon=True),
            threading.Thread(target=self._run_stubs, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._repository, self._model = self._started.result()
        except BaseException:
            self.close()
            raise

    def __call__(
        self, inputs: Mapping[str, Any], *, parameters: Mapping[str, Any] | None = None
    ) -> Outputs | list[Outputs]:
        """Execute a request.

        Parameters
        ----------
        inputs : mapping of str to array-like
            With the batch dimension, if the model has one. What has no dtype of its own (a list, a
            number) gets that of the configuration.
        parameters : mapping, optional
            Of the request.

        Returns
        -------
        dict of str to numpy.ndarray, or list of them
            The outputs; for a decoupled model those of each response.

        Raises
        ------
        BridgeError
            With the text that a client gets.
        """
        (answer,) = self.batch([inputs], parameters=parameters)
        if isinstance(answer, BridgeError):
            raise answer
        return answer

    def batch(
        self, requests: Sequence[Mapping[str, Any]], *, parameters: Mapping[str, Any] | None = None
    ) -> list[Outputs | list[Outputs] | BridgeError]:
        """Execute several requests in one batch; return for each what a call returns, or its error."""
        work = self._execute(requests, parameters or {})
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Finalize the model; idempotent."""
        threads, self._threads = self._threads, []
        if not threads:
            return
        if self._started.done() and self._started.exception() is None:
            self._loop.call_soon_threadsafe(self._end.set)
        for thread in threads:
            thread.join()
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
        _running.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_stubs(self) -> None:
        while (stub := self._starter.stubs.get()) is not None:
            stub.run(None)

    def _run_engine(self, settings: ServerSettings, loader: Any) -> None:
        telemetry = run_telemetry(0)
        try:
            asyncio.run(self._serve(settings, telemetry, loader))
        except BaseException as error:  # noqa: BLE001  (raised where the model was asked for)
            self._started.set_exception(error)
        finally:
            self._starter.stubs.put(None)
            telemetry.close()

    async def _serve(self, settings: ServerSettings, telemetry: Any, loader: Any) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        limit = partial(float, _CLOSE_SECONDS)
        async with engine(settings, telemetry, self._starter, loader, limit) as repository:
            for row in repository.failures:
                raise invalid(f"model '{row.name}' was not loaded: {row.reason}")
            self._started.set_result((repository, repository.find(self._directory.name, None)))
            await self._end.wait()

    async def _execute(
        self, requests: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]
    ) -> list[Outputs | list[Outputs] | BridgeError]:
        config = self._model.config
        arena = self._repository.regions.arena(config.name)
        makers = [RequestMaker(self._tensors(each), parameters, config) for each in requests]
        made = [maker.make(arena) for maker in makers]
        outcomes: list[list[Outcome | None]] = [[] for _ in made]
        done = [follow(*each) for each in zip(made, (to.append for to in outcomes), strict=True)]
        submit(self._model, made)
        await asyncio.gather(*done)
        return [self._answer(each) for each in outcomes]

    def _tensors(self, inputs: Mapping[str, Any]) -> list[InputTensor]:
        datatypes = {spec.name: spec.datatype for spec in self._model.config.inputs}
        tensors = []
        for name, value in inputs.items():
            datatype = datatypes.get(name)
            if datatype is not None and not hasattr(value, "dtype"):
                value = np.asarray(value, numpy_dtype(datatype))  # noqa: PLW2901
            tensors.append(InputTensor(name, *encode_array(name, value, datatype or "an input")))
        return tensors

    def _answer(self, outcomes: Sequence[Outcome | None]) -> Outputs | list[Outputs] | BridgeError:
        responses = []
        for outcome in outcomes:
            if isinstance(outcome, BridgeError):
                return outcome
            if outcome is not None:
                responses.append(output_arrays(outcome, self._model.config))
        return responses if self._model.config.decoupled else responses[0]
