"""The repository's rules: what waits for what, and what goes with what; models that run nothing."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.models.dispatcher import Dispatcher
from gpubridge.engine.models.model import StubModel
from gpubridge.engine.repository import loader as model_loader
from gpubridge.engine.repository.loader import NotPrepared
from gpubridge.engine.repository.model_files import FileOverrides
from gpubridge.engine.repository.model_sources import ModelSources, RepositoryPoller
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.errors import BridgeError
from tests.unit.ensembles import ensemble, member
from tests.unit.repositories import make_repository


def served(repository):
    return [model.name for model in repository.loaded()]


def states(repository, name):
    """The states and reasons of a model's versions."""
    return {row.version: (row.state, row.reason) for row in repository.index() if row.name == name}


def chain(name, *members):
    """Return the configuration of an ensemble of members that follow each other, ``MODEL[:VERSION]``."""
    steps = [
        f"{model} {'A' if model[0] in 'eo' else 'X'}={f't{i}' if i else 'A'} "
        f"> {'B' if model[0] in 'eo' else 'Y'}={f't{i + 1}' if i + 1 < len(members) else 'B'}"
        for i, model in enumerate(members)
    ]
    return ensemble(*steps, name=name)


async def test_required_models_load_first_and_may_be_unloaded_too(tmp_path):
    models = [chain("o", "e", "b"), chain("e", "b"), member("b"), member("other")]
    repository, loader = make_repository(tmp_path, models)
    await repository.load("o")
    assert loader.up == ["b"]
    assert served(repository) == ["b", "e", "o"]
    await repository.unload("o")
    assert served(repository) == ["b", "e"]
    await repository.load("o")
    await repository.unload("o", dependents=True)
    assert served(repository) == []
    # Who was asked for itself stays.
    await repository.load("b")
    await repository.load("o")
    await repository.unload("o", dependents=True)
    assert served(repository) == ["b"]


async def test_a_model_goes_with_what_it_requires(tmp_path):
    models = [chain("e", "a"), member("a"), member("other")]
    repository, _ = make_repository(tmp_path, models)
    await asyncio.gather(repository.load("e"), repository.load("other"))
    await repository.unload("a")
    assert served(repository) == ["other"]


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({"o": ["e"], "e": ["e2"], "e2": ["e"]}, r"circular dependency between ensembles: e"),
        ({"o": ["e"], "e": ["o"]}, r": circular dependency between ensembles: e -> ... -> o -> e$"),
        ({"o": ["nope"]}, "contains models that are not available or ambiguous: nope"),
        ({"o": ["broken"]}, "depends on 'broken' which has no loaded version"),
        ({"o": ["plain:2"]}, "depends on 'plain' whose required version 2 is not loaded"),
    ],
)
async def test_a_model_whose_requirements_cannot_be_met_is_refused(tmp_path, models, told):
    ensembles = [chain(name, *members) for name, members in models.items()]
    plain = [member("broken"), member("plain")]
    repository, loader = make_repository(tmp_path, [*ensembles, *plain])
    loader.change("broken", failure="broken")
    with pytest.raises(NotPrepared, match=told):
        await asyncio.wait_for(repository.load("o"), 30)
    assert [name for name in served(repository) if name != "plain"] == []
    assert not repository.failures or {row.name for row in repository.failures} == {"broken"}


async def test_listeners_hear_of_a_change_in_the_step_in_which_it_happens(tmp_path):
    repository, loader = make_repository(tmp_path, [member("m")])
    heard = []

    def listen(name):
        try:
            heard.append(repository.find(name, None))
        except BridgeError as error:
            heard.append(error.message)

    repository.listen(listen)
    await repository.load("m")
    first = repository.find("m", None)
    loader.change("m")
    await repository.load("m")
    second = repository.find("m", None)
    assert first is not second
    await repository.unload("m")
    assert heard == [first, second, "Request for unknown model: 'm' has no available versions"]


async def test_a_caller_that_goes_away_does_not_stop_a_load(tmp_path):
    repository, loader = make_repository(tmp_path, [member("m")])
    loading = loader.context.loading
    loading.clear()
    caller = asyncio.create_task(repository.load("m"))
    await loader.begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    loading.set()
    await repository.unload("m")
    await repository.load("m")
    assert loader.up == ["m", "m"]
    # One that is not done when the server stops says so.
    loading.clear()
    loader.begun.clear()
    loader.change("m")
    caller = asyncio.create_task(repository.load("m"))
    await loader.begun.wait()
    await repository.close(1.0)
    with pytest.raises(BridgeError, match="the server is stopping"):
        await caller
    with pytest.raises(BridgeError, match="the server is stopping"):
        await repository.load("m")


async def test_a_poll_tells_what_has_changed_once(tmp_path):
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


async def test_all_models_give_up_their_requests_before_one_refuses_or_finalizes(
    tmp_path, monkeypatch
):
    told = []

    class Endless(StubModel):
        """A model with a request that is never answered."""

        whole = True

        async def load(self):
            async def stop(seconds):
                told.append("stop")

            give_up = partial(told.append, "give up")
            self.instances = [SimpleNamespace(give_up=give_up, stop=stop)]

    monkeypatch.setattr(Dispatcher, "pending", 1)
    monkeypatch.setattr(Dispatcher, "stop", lambda *_: None)
    monkeypatch.setattr(Dispatcher, "refuse_queued", lambda *_: told.append("refuse"))
    repository, loader = make_repository(tmp_path, [member("a"), member("b")])
    loader.model = lambda prepared, version: Endless(
        prepared.config, version, tmp_path, loader.context, str
    )
    for name in "ab":
        await repository.load(name)
    await repository.close(0.0)
    assert told[:6] == 2 * ["give up"] + 2 * ["refuse"] + 2 * ["stop"]


@pytest.mark.parametrize(("count", "lines"), [(20, 40), (200, 1)])
async def test_many_models_have_no_lines_of_their_own_at_the_start(tmp_path, caplog, count, lines):
    caplog.set_level("INFO", "gpubridge")
    repository, loader = make_repository(tmp_path, [member(f"m{n}") for n in range(count)], "none")
    await repository.load_initial()
    assert len(loader.up) == count
    assert len(caplog.records) <= lines
    assert ("many models" in caplog.text) == (count > 20)
