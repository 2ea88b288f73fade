"""Answers the requests of coroutines that outlive their ``execute``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from gpubridge.stub.model_loop import ModelLoop
from gpubridge.stub.response_encoder import ContractError, ModelIdentity
from gpubridge.stub.response_stream import RequestHandle, ResponseWriter
from gpubridge.stub.returned import checked_answers
from gpubridge.transport.channel import ChannelClosed


class CoroutineAnswers:
    """Runs coroutines of ``execute`` beside each other; each answers its own requests when it ends.

    Of a model that is not decoupled a limited number runs: further requests stay in the queue of the server.

    ``raised``: gets what a coroutine raised, with which a model may tell that it writes to its inputs.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        writer: ResponseWriter,
        coroutines: ModelLoop,
        raised: Callable[[BaseException], object],
    ) -> None:
        self._identity = identity
        self._writer = writer
        self._coroutines = coroutines
        self._raised = raised
        self._running = 0
        self._ended = threading.Condition()

    def start(self, coroutine: Coroutine[Any, Any, Any], handles: list[RequestHandle]) -> None:
        """Run a coroutine for requests, then wait until there is a place for another one."""

        def done(result: Any, error: BaseException | None) -> None:
            try:
                # Without a server nobody waits for an answer.
                with contextlib.suppress(ChannelClosed):
                    self._answer(handles, result, error)
            finally:
                # Deleted senders end their requests.
                handles.clear()
                with self._ended:
                    self._running -= 1
                    self._ended.notify()

        with self._ended:
            self._running += 1
        self._coroutines.start(coroutine, done)
        with self._ended:
            self._ended.wait_for(self._has_place)

    def _has_place(self) -> bool:
        return self._identity.decoupled or self._running < self._identity.coroutines

    def _answer(
        self, handles: list[RequestHandle], result: Any, error: BaseException | None
    ) -> None:
        answers: list[Any] = []
        if error is None:
            try:
                answers = checked_answers(self._identity, result, handles)
            except ContractError as wrong:
                error = wrong
        if error is not None:
            self._raised(error)
            failure = self._identity.known(error)
            for handle in handles:
                handle.fail(failure)
        for response, handle in zip(answers, handles):
            if response is not None:
                self._writer.send(handle.record, response, final=True)
