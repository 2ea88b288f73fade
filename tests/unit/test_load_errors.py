"""An error in our own code while a model is loaded: it is that model's, and no end of the server."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.config import Backends
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.repository import loader as model_loader
from gpubridge.engine.repository.loader import (
    LoadFailed,
    ModelLoader,
    ModelSource,
    NotPrepared,
)
from tests.unit.model_configs import write_model
from tests.unit.server_settings import server_settings


@pytest.fixture
def loader(tmp_path):
    settings = server_settings(repositories=(tmp_path,))
    devices = SimpleNamespace(gpus=SimpleNamespace(log_absence=lambda: None))
    context = SimpleNamespace(
        settings=settings, threads=LoadThreads(), progress=LoadProgress(), devices=devices
    )
    return ModelLoader(context, lambda: 0, "none", Backends())


def test_of_its_files(loader, monkeypatch, tmp_path):
    def recurse(*_, **__):
        raise RecursionError("planted")

    monkeypatch.setattr(model_loader, "load_model_config", recurse)
    with pytest.raises(NotPrepared, match=r"failed to load 'm'.*internal error: RecursionError"):
        asyncio.run(loader.prepare("m", ModelSource(tmp_path)))


BASE = """backend: "python" max_batch_size: 0
input { name: "A" data_type: TYPE_INT32 dims: 1 } output { name: "B" data_type: TYPE_INT32 dims: 1 }
"""


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("instance_group { kind: KIND_GPU }", "has kind KIND_GPU but no GPUs are available"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "has kind KIND_CPU but specifies"),
        ("instance_group { kind: KIND_CPU count: 99999 }", "asks for 99999 instances"),
        ('runtime: "other.so"', "unable to find backend library 'other.so'"),
        ("model_repository_agents { agents { } }", "no agents are run"),
    ],
)
def test_what_cannot_be_served_fails_each_version(loader, tmp_path, more, text):
    directory = write_model(tmp_path, BASE + more)
    (directory / "2").mkdir()
    with pytest.raises(LoadFailed, match="version 2 is at UNAVAILABLE state: ") as raised:
        asyncio.run(loader.prepare("m", ModelSource(directory)))
    assert list(raised.value.reasons) == [2]
    assert text in raised.value.why(2)


def test_a_configuration_of_a_client_stays_while_the_files_stay_the_same(loader, tmp_path):
    directory = write_model(tmp_path, BASE)
    (directory / "1" / "model.py").touch()
    sent = '{"backend":"python","max_batch_size":7}'

    def batch(was, config=None):
        source = ModelSource(directory, config)
        prepared = asyncio.run(loader.prepare("m", source, was))
        return prepared, prepared.config.max_batch_size

    loaded, _ = batch(None)
    loaded, size = batch(loaded, sent)
    assert size == 7
    loaded, size = batch(loaded)
    assert (size, loaded.source.config) == (7, sent)
    with pytest.raises(NotPrepared, match="Invalid config override"):
        batch(loaded, "")
    (directory / "1" / "model.py").write_text("# changed")
    loaded, size = batch(loaded)
    assert (size, loaded.source.config) == (0, None)


def test_of_its_processes(loader):
    async def load():
        raise ValueError("planted")

    model = SimpleNamespace(name="m", version=3, load=load)
    errors = asyncio.run(loader.load_versions([model]))
    assert "internal error: ValueError: planted; this is a bug of gpubridge" in errors[3].message
