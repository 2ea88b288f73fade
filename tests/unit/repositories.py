"""A repository in one process: real ensembles on members whose requests a test answers."""

import asyncio
from types import SimpleNamespace

from gpubridge.config import Backends
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.ensemble.graph import draw_graph, is_ensemble
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.memory.placed_response import PlacedResponse
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.loader import ModelLoader, PreparedModel, load_refused
from gpubridge.engine.repository.model_files import ModelFiles
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.errors import BridgeError
from gpubridge.request import NO_BYTES, NO_CONTEXT, NO_OPTIONS, InferRequest, InferResponse
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings
from gpubridge.telemetry.traces import Traces
from gpubridge.transport.signatures import encode_tensors, parse_signature
from tests.unit.server_settings import server_settings

__all__ = [
    "ClientRequest",
    "VirtualLoader",
    "VirtualMember",
    "answer_all",
    "is_answered",
    "loaded",
    "make_repository",
    "reason",
    "served",
]


class VirtualMember(Model):
    """A version of a model whose requests wait for the test; ``held`` are they, the oldest first.

    ``loading``: set, unless the test lets loads wait; ``failure``: raised by the load.
    """

    def __init__(self, config, version, context, failure):
        super().__init__(config, version, context)
        self.submit = self._submit
        self.failure = failure
        self.held = []
        self.received = []
        self.whole_now = True
        self.loading = context.loading
        self.unloaded = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline = False

    async def load(self):
        await self.loading.wait()
        if self.failure:
            raise BridgeError(self.failure)

    async def unload(self, deadline):
        self._deadline = deadline is not None
        while self.held and not self._deadline:
            await self._changed.wait()
            self._changed.clear()
        self.unloaded.set()

    def set_deadline(self, deadline):
        self._deadline = True
        self._changed.set()

    ready = True
    executed_by = ()

    @property
    def whole(self):
        return self.whole_now

    @property
    def pending(self):
        return len(self.held)

    def ready_checks(self):
        return []

    def _submit(self, request, origin=None):
        assert not self.unloaded.is_set()
        self.received.append(request.identifier)
        self.held.append(request)

    def respond(self, request):
        """Send a response after which others come."""
        request.respond(self._response())

    def answer(self, request):
        """Send the last response of a request."""
        self.held.remove(request)
        self._changed.set()
        request.finish(self._response())

    def _response(self):
        (output,) = self.config.outputs
        shape = _shape(self)
        signature = parse_signature(encode_tensors([(output.name, output.datatype, shape)])[0])
        return PlacedResponse(signature, (shape,), [memoryview(b"")], None, [NO_BYTES])


def _shape(model):
    """Return the shape of a tensor without elements."""
    return (1, 0) if model.config.max_batch_size else (0,)


class ClientRequest:
    """A request to an ensemble of one input ``A``; ``outcomes`` has what it got."""

    def __init__(self, model, identifier=""):
        self.outcomes = []
        self.over = False
        signature, dims = encode_tensors([("A", "FP32", _shape(model))])
        self.request = InferRequest(
            signature,
            None,
            0,
            ((0, 0),),
            self._finish,
            identifier,
            NO_CONTEXT,
            0,
            1,
            NO_OPTIONS,
            dims,
        )
        if model.config.decoupled:
            self.request.on_partial = self._respond
        model.submit(self.request)

    def _respond(self, outcome):
        self.outcomes.append(outcome)
        self.request.passed_on(1)

    def _finish(self, outcome):
        assert not self.over
        self.over = True
        if outcome is not None:
            self.outcomes.append(outcome)


class VirtualLoader(ModelLoader):
    """Loads models from ``models``: by name the configuration, the versions and the reason of a failure.

    - ``made``: the versions of plain models that were made, in order.
    - ``up``: their names, where they were loaded, in order.
    - ``begun``: set when one is made.
    """

    def __init__(self, models):
        threads = LoadThreads()
        loading = asyncio.Event()
        loading.set()
        context = SimpleNamespace(
            loading=loading,
            threads=threads,
            environments=ModelEnvironments(None, 1, threads),
            regions=SimpleNamespace(arena=lambda name: None, close=lambda: None),
            backend=SimpleNamespace(execute_timeout_seconds=None),
            telemetry=SimpleNamespace(
                log=SimpleNamespace(on_change=lambda listener: None),
                metrics=MetricsSettings(),
                traces=Traces(TraceSettings()),
            ),
            metrics=SimpleNamespace(close=lambda: None),
            devices=DeviceManager(0),
            progress=LoadProgress(),
            cache=None,
        )
        super().__init__(context, lambda: 0, "none", Backends())
        self.models = models
        self.revisions = {}
        self.made = []
        self.begun = asyncio.Event()

    @property
    def up(self):
        return [model.name for model in self.made if not model.failure]

    def change(self, name, config=None, versions=(1,), failure=""):
        """Change a model's files."""
        self.models[name] = config or self.models[name][0], versions, failure
        self.revisions[name] = self.revisions.get(name, 0) + 1

    async def prepare(self, name, source, was=None):
        config, versions, _ = self.models[name]
        state = ((str(self.revisions.get(name)), 0, 0),)
        files = ModelFiles(versions=dict.fromkeys(versions, state))
        try:
            graph = draw_graph(config) if is_ensemble(config) else None
        except BridgeError as error:
            raise load_refused(name, error.message, versions) from error
        if not versions:
            raise load_refused(name, "at least one version must be available", ())
        return PreparedModel(source, config, versions, files, graph)

    def model(self, prepared, version):
        failure = self.models[prepared.config.name][2]
        self.begun.set()
        self.made.append(VirtualMember(prepared.config, version, self.context, failure))
        return self.made[-1]


def make_repository(folder, models, control="explicit"):
    """Return a repository and its loader.

    - ``folder``: gets a directory for each model.
    - ``models``: their configurations.
    """
    loader = VirtualLoader({config.name: (config, (1,), "") for config in models})
    for name in loader.models:
        (folder / name).mkdir()
    settings = server_settings({"repository.model_control_mode": control}, (folder,))
    return ModelRepository(settings, loader), loader


async def loaded(folder, models, *names):
    """Return a repository in which these are loaded, and its loader."""
    repository, loader = make_repository(folder, models)
    for name in names:
        await repository.load(name)
    return repository, loader


def served(repository):
    return [model.name for model in repository.loaded()]


def reason(repository, name):
    """Why a model is not served."""
    (row,) = (row for row in repository.index() if row.name == name)
    assert row.state in ("UNLOADING", "UNAVAILABLE")
    return row.reason


def answer_all(*members):
    """Answer the waiting requests, until there are none."""
    while any(each.held for each in members):
        for each in members:
            for request in list(each.held):
                each.answer(request)


def is_answered(request, responses=1):
    return (
        request.over
        and len(request.outcomes) == responses
        and all(isinstance(outcome, InferResponse) for outcome in request.outcomes)
    )
