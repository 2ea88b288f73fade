"""One run of a model: the engine in a thread, the model in the main thread, requests and answers."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpubridge.config import ServerSettings
from gpubridge.develop.one_instance import OneInstanceLoader, StubStarter, engine
from gpubridge.develop.printed import output_arrays, print_response, save_outputs
from gpubridge.develop.requests import RequestMaker, follow, read_input, submit
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.errors import BridgeError
from gpubridge.request import InferResponse, Outcome
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.transport.channel import ChannelClosed

_PATIENCE_SECONDS = 365 * 86400.0
"""No limit: a model may be stopped in a debugger."""
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run of a version (None for the highest) of the model in a directory.

    - ``inputs``: ``NAME=VALUE``; see :func:`~gpubridge.develop.requests.read_input`.
    - ``outputs``: files to write outputs to, by output name.
    - ``repeat``, ``batch``: number of executions, and of requests in each.
    """

    directory: Path
    version: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: Mapping[str, Path] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 1
    batch: int = 1


class Session:
    """Runs a model once in the main thread; ``server`` has the settings of a server."""

    def __init__(
        self,
        settings: RunSettings,
        server: ServerSettings,
        telemetry: ServerTelemetry,
        note: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._server = server
        self._telemetry = telemetry
        self._note = note
        self._starter = StubStarter()
        self._failed = False
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Load the model, execute it, finalize it; return the exit code."""
        engine = threading.Thread(target=self._run_engine, name="gpubridge-engine")
        engine.start()
        try:
            self._serve_stubs()
        except KeyboardInterrupt:
            self._interrupted = True
            # Threads of the model that still run cannot send any more: their errors say nothing new.
            logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)
            if self._loop is not None and self._work is not None:
                self._loop.call_soon_threadsafe(self._work.cancel)
        engine.join()
        return _INTERRUPTED if self._interrupted else int(self._failed)

    def _serve_stubs(self) -> None:
        while (stub := self._starter.stubs.get()) is not None:
            stub.run(self._note_raised)

    def _note_raised(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            # It was raised in the model's code, where it counts as an error.
            self._interrupted = True
        if not isinstance(error, ChannelClosed):
            self._note(error)

    def _run_engine(self) -> None:
        try:
            asyncio.run(self._engine())
        except BridgeError as error:
            self._fail(error.message)
        except BaseException as error:
            self._failed = True
            if not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._starter.stubs.put(None)

    async def _engine(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task()
        settings = self._settings
        loader = partial(OneInstanceLoader, self._starter, settings.directory, settings.version)
        async with engine(
            self._server, self._telemetry, self._starter, loader, self._close_seconds
        ) as repository:
            for row in repository.failures:
                self._fail(f"model '{row.name}' was not loaded: {row.reason}")
            if not self._failed:
                await self._execute(repository)

    def _close_seconds(self) -> float:
        return 0.0 if self._interrupted else _PATIENCE_SECONDS

    async def _execute(self, repository: ModelRepository) -> None:
        settings = self._settings
        model = repository.find(settings.directory.name, None)
        maker = RequestMaker(
            [read_input(text, model.config) for text in settings.inputs],
            settings.parameters,
            model.config,
        )
        arena = repository.regions.arena(model.name)
        several = settings.repeat > 1 or settings.batch > 1
        number = 0
        for _ in range(settings.repeat):
            if self._interrupted:
                return
            requests, done = [], []
            for _ in range(settings.batch):
                number += 1
                answers = _Answers(self, model, number if several else 0)
                requests.append(maker.make(arena))
                done.append(follow(requests[-1], answers.tell))
            submit(model, requests)
            await asyncio.gather(*done)

    def answered(self, model: Model, head: str, outcome: Outcome) -> None:
        """Print a response or an error; runs in the engine's thread."""
        try:
            if isinstance(outcome, BridgeError):
                raise outcome
            text = print_response(outcome, model.config)
            save_outputs(output_arrays(outcome, model.config), self._settings.outputs, model.config)
        except BridgeError as error:
            self._fail(f"{_prefix(head)}{error.code.name}: {error.message}{_advice(error.message)}")
            return
        sys.stdout.write(f"{head}:\n{text}\n" if head else f"{text}\n")
        sys.stdout.flush()
        if not (outcome.signature.tensors or model.config.decoupled):
            names = ", ".join(f"'{spec.name}'" for spec in model.config.outputs)
            self._fail(f"{_prefix(head)}the response has none of the outputs {names}")

    def _fail(self, text: str) -> None:
        self._failed = True
        sys.stdout.flush()
        sys.stderr.write(f"error: {text.rstrip()}\n")


def _prefix(head: str) -> str:
    return f"{head}: " if head else ""


class _Answers:
    """Prints the responses to one request."""

    def __init__(self, session: Session, model: Model, number: int) -> None:
        self._session = session
        self._model = model
        self._number = number
        self._responses = 0

    def tell(self, outcome: Outcome | None) -> None:
        """Print a response; None for the end of a request."""
        if outcome is None:
            if not self._responses:
                sys.stdout.write("the model ended the request without a response\n")
            return
        self._responses += 1
        head = f"request {self._number}" if self._number else ""
        if self._model.config.decoupled and isinstance(outcome, InferResponse):
            head += f"{', ' if head else ''}response {self._responses}"
        self._session.answered(self._model, head, outcome)


def _advice(message: str) -> str:
    """Return advice about a model that a call did not find."""
    missing = re.search(r"Request for unknown model: '([^']+)' is not found", message)
    return f"\n(--load-model {missing[1]} loads it, for the model to call)" if missing else ""
