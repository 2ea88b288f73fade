"""An error in our own code while a model is loaded: it is that model's, and no end of the server."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.config import Backends
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.repository import loader as model_loader
from gpubridge.engine.repository.loader import ModelLoader, ModelSource, NotPrepared
from tests.unit.server_settings import server_settings


@pytest.fixture
def loader(tmp_path):
    settings = server_settings(repositories=(tmp_path,))
    context = SimpleNamespace(settings=settings, threads=LoadThreads(), progress=LoadProgress())
    return ModelLoader(context, lambda: 0, "none", Backends())


def test_of_its_files(loader, monkeypatch, tmp_path):
    def recurse(*_, **__):
        raise RecursionError("planted")

    monkeypatch.setattr(model_loader, "load_model_config", recurse)
    with pytest.raises(NotPrepared, match=r"failed to load 'm'.*internal error: RecursionError"):
        asyncio.run(loader.prepare("m", ModelSource(tmp_path)))


def test_of_its_processes(loader):
    async def load():
        raise ValueError("planted")

    model = SimpleNamespace(name="m", version=3, load=load)
    errors = asyncio.run(loader.load_versions([model]))
    assert "internal error: ValueError: planted; this is a bug of gpubridge" in errors[3].message
