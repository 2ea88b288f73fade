"""An error in our own code while a model is loaded: it is that model's, and no end of the server."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.config import Backends, ServerSettings
from gpubridge.engine import model_loader
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.engine.model_loader import ModelLoader, ModelSource, NotPrepared


@pytest.fixture
def loader(tmp_path):
    settings = ServerSettings(model_repositories=(tmp_path,))
    context = SimpleNamespace(settings=settings, threads=LoadThreads())
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
    errors = asyncio.run(loader.bring_up([model]))
    assert "internal error: ValueError: planted; this is a bug of gpubridge" in errors[3].message
