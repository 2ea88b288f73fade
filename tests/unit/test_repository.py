"""The repository's rules: what waits for what, and what goes with what; models that run nothing."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.repository import loader as model_loader
from gpubridge.engine.repository.loader import NotPrepared, PreparedModel
from gpubridge.engine.repository.model_files import FileOverrides, ModelFiles
from gpubridge.engine.repository.model_sources import ModelSources, RepositoryPoller
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.errors import BridgeError
from gpubridge.schema import message_class
from tests.unit.server_settings import server_settings


class FakeModel:
    """A version of a model that comes up at once, and ends at its deadline or when it is released."""

    def __init__(self, config, version):
        self.config, self.name, self.version = config, config.name, version
        self.over = asyncio.Event()
        self.over.set()

    async def unload(self, seconds):
        await self.over.wait()

    def set_deadline(self, seconds):
        self.over.set()


class FakeLoader:
    """Prepares the models of a dictionary: name to those that they require."""

    def __init__(self, required, broken=()):
        self.context = SimpleNamespace(
            threads=(threads := LoadThreads()),
            environments=ModelEnvironments(None, 1, threads),
            regions=SimpleNamespace(arena=None, close=lambda: None),
            backend=SimpleNamespace(execute_timeout_seconds=None),
            telemetry=SimpleNamespace(log=SimpleNamespace(on_change=lambda listener: None)),
            metrics=SimpleNamespace(close=lambda: None),
            devices=DeviceManager(0),
            progress=LoadProgress(),
        )
        self._required = required
        self._broken = broken
        self.up = []

    async def prepare(self, name, source):
        message = message_class("ModelConfig")(name=name)
        for other in self._required[name]:
            message.ensemble_scheduling.step.add(model_name=other)
        config = SimpleNamespace(name=name, message=message)
        files = ModelFiles(versions={1: ((str(len(self.up)), 0, 0),)})
        return PreparedModel(source, config, (1,), files)

    def model(self, prepared, version, members):
        return FakeModel(prepared.config, version)

    async def load_versions(self, models):
        self.up += [model.name for model in models]
        return {m.version: BridgeError("broken") for m in models if m.name in self._broken}


@pytest.fixture
def made(tmp_path):
    def make(required, broken=()):
        for name in required:
            (tmp_path / name).mkdir()
        loader = FakeLoader(required, broken)
        return ModelRepository(
            server_settings({"repository.model_control_mode": "explicit"}, (tmp_path,)), loader
        ), loader

    return make


def served(repository):
    return [model.name for model in repository.loaded()]


def test_required_models_load_first_and_may_be_unloaded_too(made):
    async def work():
        repository, loader = made({"top": ["a", "b"], "a": ["b"], "b": [], "other": []})
        await repository.load("top")
        assert loader.up == ["b", "a", "top"]
        await repository.unload("top")
        assert served(repository) == ["a", "b"]
        await repository.load("top")
        await repository.unload("top", dependents=True)
        assert served(repository) == []
        # Who was asked for itself stays.
        await repository.load("b")
        await repository.load("top")
        await repository.unload("top", dependents=True)
        assert served(repository) == ["b"]

    asyncio.run(work())


def test_a_model_goes_with_what_it_requires(made):
    async def work():
        repository, _ = made({"top": ["a"], "a": [], "other": []})
        await asyncio.gather(repository.load("top"), repository.load("other"))
        await repository.unload("a")
        assert served(repository) == ["other"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("required", "told"),
    [
        ({"top": ["a"], "a": ["b"], "b": ["a"]}, "contains models that are not available or ambig"),
        ({"top": ["nope"]}, "contains models that are not available or ambiguous: "),
        ({"top": ["broken"], "broken": []}, "depends on 'broken' which has no loaded version"),
    ],
)
def test_a_model_whose_requirements_cannot_be_met_is_refused(made, required, told):
    async def work():
        repository, _ = made(required, {"broken"})
        with pytest.raises(NotPrepared, match=told):
            await asyncio.wait_for(repository.load("top"), 30)
        assert served(repository) == []

    asyncio.run(work())


def test_listeners_hear_of_a_change_in_the_step_in_which_it_happens(made):
    async def work():
        repository, _ = made({"m": []})
        heard = []

        def listen(name):
            try:
                heard.append(repository.find(name, None))
            except BridgeError as error:
                heard.append(error.message)

        repository.listen(listen)
        await repository.load("m")
        first = repository.find("m", None)
        await repository.load("m")
        second = repository.find("m", None)
        assert first is not second
        await repository.unload("m")
        assert heard == [first, second, "Request for unknown model: 'm' has no available versions"]

    asyncio.run(work())


def test_a_caller_that_goes_away_does_not_stop_a_load(made):
    async def work():
        repository, loader = made({"m": []})
        begun, go_on = asyncio.Event(), asyncio.Event()
        at_once = loader.load_versions

        async def later(models):
            begun.set()
            await go_on.wait()
            return await at_once(models)

        loader.load_versions = later
        caller = asyncio.create_task(repository.load("m"))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        go_on.set()
        await repository.unload("m")
        await repository.load("m")
        assert loader.up == ["m", "m"]
        # One that is not done when the server stops says so.
        go_on.clear()
        caller = asyncio.create_task(repository.load("m"))
        begun.clear()
        await begun.wait()
        await repository.close(1.0)
        with pytest.raises(BridgeError, match="the server is stopping"):
            await caller
        with pytest.raises(BridgeError, match="the server is stopping"):
            await repository.load("m")

    asyncio.run(work())


def test_a_poll_tells_what_has_changed_once(tmp_path):
    async def work():
        for name in ("same", "changed", "gone"):
            (tmp_path / name / "1").mkdir(parents=True)
        holder = _Holder()
        poller = RepositoryPoller(ModelSources(LoadThreads(), [tmp_path]), holder)
        await poller.look()
        await poller.poll()
        (tmp_path / "changed" / "1" / "model.py").write_text("")
        (tmp_path / "gone").rename(tmp_path / "new")
        for _ in range(3):
            await poller.poll()
        # A model that is still being worked on is looked at again when that is over.
        assert sorted(holder.told) == ["changed", "new", "without gone"]
        (tmp_path / "changed" / "1" / "model.py").write_text("more")
        await poller.poll()
        assert len(holder.told) == 3
        holder.done.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await poller.poll()
        await asyncio.sleep(0)
        assert holder.told[3:] == ["changed"]

    asyncio.run(work())


class _Holder:
    def __init__(self):
        self.told = []
        self.done = asyncio.Event()

    async def reload(self, name):
        self.told.append(name)
        await self.done.wait()
        raise BridgeError("it does not load")

    async def withdraw(self, name):
        self.told.append(f"without {name}")


@pytest.mark.parametrize("draft", [False, True])
def test_progress_names_what_is_waited_for(draft):
    instances = [
        SimpleNamespace(name="m_0", state=InstanceState.READY),
        SimpleNamespace(name="m_1", state=InstanceState.STARTING),
        SimpleNamespace(name="m_2", state=InstanceState.STARTING),
        SimpleNamespace(name="m_3", state=InstanceState.READY),
    ]
    model = SimpleNamespace(instances=instances, config=SimpleNamespace(draft=draft))
    where = "auto_complete_config" if draft else "initialize"
    assert model_loader.starting_step(model) == (f"instances m_1, m_2 in {where}", 0.5)


def test_a_clients_files_go_with_the_last_who_needs_them(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    overrides = FileOverrides()
    made = overrides.write("m", {"file:1/sub/x.bin": b"\0", "file:1/model.py": b""})
    assert (made.model / "1" / "sub" / "x.bin").read_bytes() == b"\0"
    made.hold()
    made.release()
    assert made.model.is_dir()
    made.release()
    assert not made.model.exists()
    overrides.write("n", {"file:1/model.py": b""})
    overrides.close()
    overrides.close()
    assert list(tmp_path.iterdir()) == []
