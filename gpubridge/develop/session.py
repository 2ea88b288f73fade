"""One run of a model: the engine in a thread, the model in the main thread, requests, their answers."""

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
from gpubridge.develop.one_instance import Here, OneInstanceLoader
from gpubridge.develop.printed import output_arrays, print_response, save_outputs
from gpubridge.develop.requests import RequestMaker, read_input
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, invalid
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.server import build_repository
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.transport.channel import ChannelClosed
from gpubridge.transport.control import TICKETS

_PATIENCE_SECONDS = 365 * 86400.0
"""No limit: a model may be stopped in a debugger."""
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run of a version (None for the highest) of the model in a directory.

    - ``inputs``: ``NAME=VALUE``; see :func:`~gpubridge.develop.requests.read_input`.
    - ``outputs``: files that outputs are written to, by name.
    - ``repeat``, ``batch``: how often it is executed, and how many requests it gets each time.
    """

    directory: Path
    version: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: Mapping[str, Path] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 1
    batch: int = 1


class Session:
    """Runs a model once in the main thread; ``server`` is what a server would be started with."""

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
        self._here = Here()
        self._failed = False
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Load the model, have it answer, finalize it; returns the exit code."""
        engine = threading.Thread(target=self._run_engine, name="gpubridge-engine")
        engine.start()
        try:
            self._serve_stubs()
        except KeyboardInterrupt:
            self._interrupted = True
            # What still runs of the model finds nobody to send to any more: no news.
            logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)
            if self._loop is not None and self._work is not None:
                self._loop.call_soon_threadsafe(self._work.cancel)
        engine.join()
        return _INTERRUPTED if self._interrupted else int(self._failed)

    def _serve_stubs(self) -> None:
        while (stub := self._here.stubs.get()) is not None:
            stub.run(self._note_raised)

    def _note_raised(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            # It struck the model, to which it is an error like others.
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
            self._here.stubs.put(None)

    async def _engine(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task()
        settings = self._settings
        # The model's own errors are told in full, with what the client would get.
        for room in ("model_loader", "repository"):
            logging.getLogger(f"gpubridge.engine.{room}").setLevel(logging.CRITICAL)
        workers = Workers()
        repository = build_repository(
            self._server,
            self._telemetry,
            workers,
            self._here.start,
            partial(OneInstanceLoader, self._here, settings.directory, settings.version),
        )
        try:
            await repository.load_initial()
            for row in repository.failures:
                self._fail(f"model '{row.name}' was not loaded: {row.reason}")
            if not self._failed:
                await self._execute(repository)
        finally:
            await repository.close(0.0 if self._interrupted else _PATIENCE_SECONDS)
            workers.close()

    async def _execute(self, repository: ModelRepository) -> None:
        settings = self._settings
        model = repository.find(settings.directory.name, None)
        maker = RequestMaker(
            [read_input(text, model.config) for text in settings.inputs],
            settings.parameters,
            model.config,
        )
        self._check_batch(model, maker.form.batch_size)
        several = settings.repeat > 1 or settings.batch > 1
        number = 0
        for _ in range(settings.repeat):
            if self._interrupted:
                return
            answers = []
            requests = []
            for _ in range(settings.batch):
                number += 1
                answers.append(_Answers(self, model, number if several else 0))
                requests.append(maker.make(repository.regions.arena(model.name)))
                answers[-1].follow(requests[-1])
            if settings.batch > 1:
                # By hand: what the batcher of a server does with requests that come together.
                model.instances[0].feed.submit(requests)
            else:
                model.submit(requests[0])
            await asyncio.gather(*(each.done for each in answers))

    def _check_batch(self, model: Model, rows: int) -> None:
        """Refuse what no server would put into one ``execute``."""
        count = self._settings.batch
        if count == 1:
            return
        config = model.config
        if not model.instances:
            raise invalid(f"--batch: '{config.name}' is an ensemble, which executes nothing itself")
        if config.message.WhichOneof("scheduling_choice") == "sequence_batching":
            raise invalid(
                f"--batch: '{config.name}' has sequence batching, whose batches are of different "
                "sequences; send one request at a time"
            )
        if count * rows > min(config.max_batch_size, TICKETS):
            raise invalid(
                f"--batch {count}: expected at most max_batch_size {config.max_batch_size} of "
                f"'{config.name}', got {count} requests of {rows}"
            )

    def answered(self, model: Model, head: str, outcome: Outcome) -> None:
        """Print a response or an error; in the engine's thread."""
        try:
            if isinstance(outcome, BridgeError):
                raise outcome
            text = print_response(outcome, model.config)
            save_outputs(output_arrays(outcome, model.config), self._settings.outputs, model.config)
        except BridgeError as error:
            self._fail(f"{told_of(head)}{error.code.name}: {error.message}{_advice(error.message)}")
            return
        sys.stdout.write(f"{head}:\n{text}\n" if head else f"{text}\n")
        sys.stdout.flush()
        if not (outcome.signature.tensors or model.config.decoupled):
            names = ", ".join(f"'{spec.name}'" for spec in model.config.outputs)
            self._fail(f"{told_of(head)}the response has none of the outputs {names}")

    def _fail(self, text: str) -> None:
        self._failed = True
        sys.stdout.flush()
        sys.stderr.write(f"error: {text.rstrip()}\n")


def told_of(head: str) -> str:
    """Return the beginning of an error that is told of a response."""
    return f"{head}: " if head else ""


class _Answers:
    """Takes what a model answers to one request, response by response."""

    def __init__(self, session: Session, model: Model, number: int) -> None:
        self._session = session
        self._model = model
        self._number = number
        self._responses = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def follow(self, request: InferRequest) -> None:
        """Hear of what becomes of a request."""

        def respond(outcome: Outcome) -> None:
            self._tell(outcome)
            request.passed_on(1)

        request.on_partial = respond
        request.on_done = self._finish

    def _finish(self, outcome: Outcome | None) -> None:
        try:
            if outcome is not None:
                self._tell(outcome)
            elif not self._responses:
                sys.stdout.write("the model ended the request without a response\n")
        finally:
            if not self.done.done():
                self.done.set_result(None)

    def _tell(self, outcome: Outcome) -> None:
        self._responses += 1
        head = f"request {self._number}" if self._number else ""
        if self._model.config.decoupled and isinstance(outcome, InferResponse):
            head += f"{', ' if head else ''}response {self._responses}"
        self._session.answered(self._model, head, outcome)


def _advice(message: str) -> str:
    """Say what to do about a model that a call did not find."""
    missing = re.search(r"Model '([^']+)' is not ready", message)
    return f"\n(--load-model {missing[1]} loads it, for the model to call)" if missing else ""
