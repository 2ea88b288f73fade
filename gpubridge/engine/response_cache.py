"""Response cache: answers to requests that are equal to earlier ones, without executing the model."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.engine.memory.device_region import OF_CLIENTS, ON_DEVICE
from gpubridge.engine.memory.placed_response import (
    PlacedResponse,
    is_in_host_memory,
    placed_response,
    private_response,
)
from gpubridge.engine.workers import HEAVY_BYTES, TaskSet, Workers
from gpubridge.errors import BridgeError
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.request import InferRequest, InferResponse, LongParameters
from gpubridge.transport.signatures import parse_signature

if TYPE_CHECKING:
    from gpubridge.engine.models.dispatcher import Submission
    from gpubridge.engine.models.model import Model
    from gpubridge.engine.models.tracing import Origin

_FORMS_KEPT = 512
_SHOWN = 128
"""Letters of an identifier that are shown for a slow request."""
_ENTRY_BYTES = 1024
_OUTPUT_BYTES = 256
"""Counted for the objects of an entry, and of each of its outputs."""
_clock = time.monotonic_ns


class _Entry(NamedTuple):
    """A response in private memory, and what the limit counts for it; ``model`` answered it."""

    model: Model
    response: PlacedResponse
    nbytes: int


class ResponseCache:
    """The least recently used responses of all models, in at most ``limit`` bytes.

    Attribute ``generation``: changes with the served models. A response to a request that was submitted
    before is not stored: an ensemble may have asked a member that is replaced.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.generation = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def find(self, key: bytes) -> PlacedResponse | None:
        """Return the response of an equal request, if it is stored."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.response

    def add(self, key: bytes, model: Model, response: PlacedResponse) -> None:
        """Store a response in place of the least recently used ones, if it fits into the limit."""
        parameters = len(repr(response.parameters)) if response.parameters else 0
        nbytes = _ENTRY_BYTES + parameters
        nbytes += sum(_OUTPUT_BYTES + len(buffer) for buffer in response.buffers)
        if nbytes > self.limit or key in self._entries:
            return
        while self.used + nbytes > self.limit:
            self._remove(next(iter(self._entries)))
        self._entries[key] = _Entry(model, response, nbytes)
        self.used += nbytes

    def model_changed(self, name: str) -> None:
        """Remove the responses of a model whose served versions have changed, and of all ensembles."""
        self.generation += 1
        for key, entry in list(self._entries.items()):
            if entry.model.name == name or entry.model.executed_by != (entry.model.name,):
                self._remove(key)

    def _remove(self, key: bytes) -> None:
        self.used -= self._entries.pop(key).nbytes


class CachedSubmission:
    """Submits requests of one model version, or answers them from the cache.

    - ``submit``: executes a request.
    - ``arena_of``: returns the arena for the requests of a model.

    Attribute ``finished``: waits until no request is looked up by a worker.

    Equal requests that arrive before the first one is answered are all executed. Requests with tensors
    in client memory or on a device, or with a sequence, are not looked up.
    """

    def __init__(
        self,
        cache: ResponseCache,
        model: Model,
        submit: Submission,
        arena_of: Callable[[str], RequestArena],
        workers: Workers,
    ) -> None:
        self._cache = cache
        self._model = model
        self._submit = submit
        self._arena_of = arena_of
        self._workers = workers
        self._tasks = TaskSet()
        self.finished = self._tasks.finished
        # Keys of other versions, and of models that are loaded again, begin with another secret.
        self._begun = blake2b(os.urandom(32), digest_size=16)
        self._forms = _Forms([output.name for output in model.config.outputs])

    def __call__(self, request: InferRequest, origin: Origin | None = None) -> None:
        """Submit a request: frees its slot and calls its ``on_done``."""
        inputs = _inputs(request)
        if inputs is None:
            self._submit(request, origin)
        elif sum(map(len, inputs)) > HEAVY_BYTES:
            self._tasks.start(self._look_up_later(request, origin, inputs))
        else:
            self._look_up(request, origin, _clock(), self._key(request, inputs))

    async def _look_up_later(
        self, request: InferRequest, origin: Origin | None, inputs: list[memoryview]
    ) -> None:
        begun = _clock()
        key = await self._workers.outcome(partial(self._key, request, inputs))
        self._look_up(request, origin, begun, key)

    def _key(self, request: InferRequest, inputs: list[memoryview]) -> bytes:
        """Return the key of a request: names, datatypes, shapes, outputs, parameters, bytes."""
        digest = self._begun.copy()
        form, parameters = self._forms[request.signature], request.context.parameters
        digest.update(b"%b%b%d " % (form, request.dims, len(parameters)))
        if parameters:
            digest.update(parameters.encode() if isinstance(parameters, str) else parameters)
        # Shapes and datatypes say where each tensor ends; strings have their lengths before them.
        for view in inputs:
            digest.update(view)
        return digest.digest()

    def _look_up(
        self, request: InferRequest, origin: Origin | None, begun: int, key: bytes | BridgeError
    ) -> None:
        """Answer a request, or have it executed and its response stored."""
        response = None if isinstance(key, BridgeError) else self._cache.find(key)
        if response is not None:
            self._answer(request, origin, begun, response)
            return
        if not isinstance(key, BridgeError) and request.on_done is not None:
            self._model.statistics.cache_missed(_clock() - begun)
            generation = self._cache.generation
            request.on_done = partial(self._store, key, generation, request.on_done)
        self._submit(request, origin)

    def _answer(
        self, request: InferRequest, origin: Origin | None, begun: int, found: PlacedResponse
    ) -> None:
        model = self._model
        request.arrived = begun
        model.begin(request, origin)
        slot, request.slot = request.slot, None
        request.ranges = None
        if slot is not None:
            self._arena_of(model.name).free(slot)
        model.statistics.copied(request.copied)
        consumer = request.context.outputs_for
        try:
            response = found if not consumer else placed_response(found, self._arena_of(consumer))
        except BridgeError as error:
            model.statistics.failed("OTHER", _clock() - begun)
            model.statistics.note_error(error, request.identifier)
            request.finish(error)
            return
        trace = request.trace
        request.finish(response)
        if trace is not None:
            trace.completed(None)
        now = _clock()
        model.statistics.cache_hit(now - begun)
        model.statistics.passed_on(request.identifier[:_SHOWN], now, now - begun, 0, 0)

    def _store(
        self, key: bytes, generation: int, on_done: Callable[[Any], None], outcome: Any
    ) -> None:
        """Copy a response for the cache, then deliver it: its next reader may write to its memory."""
        if not isinstance(outcome, InferResponse) or not self._is_storable(outcome):
            on_done(outcome)
        elif sum(map(len, outcome.buffers)) > HEAVY_BYTES:
            delivered = partial(self._stored, key, generation, on_done, outcome)
            self._workers.run(partial(private_response, outcome), delivered)
        else:
            self._stored(key, generation, on_done, outcome, private_response(outcome))

    def _is_storable(self, response: InferResponse) -> bool:
        small = sum(map(len, response.buffers)) < self._cache.limit
        return (
            is_in_host_memory(response)
            and small
            and not isinstance(response.parameters, LongParameters)
        )

    def _stored(
        self,
        key: bytes,
        generation: int,
        on_done: Callable[[Any], None],
        outcome: InferResponse,
        copy: PlacedResponse | BridgeError,
    ) -> None:
        if generation == self._cache.generation and not isinstance(copy, BridgeError):
            self._cache.add(key, self._model, copy)
        on_done(outcome)


class _Forms(dict[bytes, bytes]):
    """Signatures of requests as keys have them: the outputs that are requested in no order."""

    def __init__(self, outputs: Sequence[str]) -> None:
        super().__init__()
        self._outputs = outputs

    def __missing__(self, raw: bytes) -> bytes:
        signature = parse_signature(raw)
        if len(self) >= _FORMS_KEPT:
            self.clear()
        wanted = sorted(signature.wanted or self._outputs)
        form = self[raw] = repr((signature.tensors, wanted)).encode()
        return form


def _inputs(request: InferRequest) -> list[memoryview] | None:
    """Return the bytes of a request's inputs; None for a request that is not looked up."""
    context = request.context
    if request.client is not None or context.flags or context.correlation:
        return None
    ranges = request.ranges
    if ranges is None:
        if request.slot is None:
            return []
        memory, start = request.slot.memory, request.start
        return [memory[start + at : start + at + nbytes] for at, nbytes in request.places]
    if any(isinstance(part.segment, (*OF_CLIENTS, *ON_DEVICE)) for part in ranges):
        return None
    return [
        part.segment.view[part.offset : part.offset + part.nbytes]
        for part in ranges
        if part.segment is not None
    ]
