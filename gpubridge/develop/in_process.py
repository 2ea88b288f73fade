"""A model that runs in this process, without a server, and is called like a function."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpubridge.develop.model_run import Answer, ModelRun, Outputs
from gpubridge.develop.one_instance import one_model
from gpubridge.develop.settings import run_settings
from gpubridge.errors import BridgeError, invalid

if TYPE_CHECKING:
    from typing_extensions import Self


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

    Notes
    -----
    The model ends with `close`, a ``with`` block, or the last reference. A load that is interrupted is given
    up: the model's code runs on in its thread until it returns, and another model of this process waits
    for that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        load_models: Sequence[str] = (),
        gpu_fallback: Any = "none",
    ) -> None:
        with ExitStack() as files:
            directory, others = files.enter_context(one_model(os.fspath(path)))
            settings = run_settings(
                directory, repositories=others, load_models=load_models, gpu_fallback=gpu_fallback
            )
            owned = files.pop_all()
        self._run = run = ModelRun(directory, version, settings, owned)
        weakref.finalize(self, run.end).atexit = False
        try:
            run.start()
            run.started.result()
        except BridgeError:
            self.close()
            raise
        except BaseException:
            run.end()
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
    ) -> list[Answer]:
        """Execute several requests in one batch; return for each what a call returns, or its error."""
        if os.getpid() != self._run.process:
            raise invalid(
                f"the model runs in the process {self._run.process}, of which this one is a fork without its "
                "threads: call it there, or make an InProcessModel here"
            )
        return self._run.batch(requests, parameters or {})

    def close(self, timeout: float | None = None) -> None:
        """Finalize the model, and wait for its end; idempotent, and nothing in a forked child.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None for no limit.

        Raises
        ------
        BridgeError
            If the model's code still runs after that time, with the stack of its thread.
        """
        if os.getpid() == self._run.process:
            self._run.end()
            self._run.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
