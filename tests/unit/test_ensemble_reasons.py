"""What the index says of ensembles that are not served, as their members load, fail, drain and come back."""

import asyncio

import pytest

from gpubridge.engine.ensemble import ensemble_model
from gpubridge.engine.repository.loader import LoadFailed, NotPrepared
from tests.unit.ensembles import ensemble, member
from tests.unit.repositories import (
    ClientRequest,
    answer_all,
    is_answered,
    loaded,
    make_repository,
    reason,
    served,
)

E = ensemble("a X=A > Y=t", "b X=t > Y=B")
OUTER = ensemble("e A=A > B=B", name="outer")
A, B, C = member("a"), member("b"), member("c")


async def test_listeners_hear_of_an_ensemble_that_is_served_when_reasons_are_listed(
    tmp_path, monkeypatch
):
    repository, loader = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    with monkeypatch.context() as patched:
        patched.setattr(ensemble_model, "wire", lambda *_: 1 / 0)
        loader.change("b")
        await repository.load("b")
    heard = []
    repository.listen(heard.append)
    repository.list_reasons()
    assert served(repository) == ["a", "b", "e", "outer"]
    assert sorted(heard) == ["e", "outer"]


async def test_the_reason_follows_the_state_of_the_member(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E], "e")
    unloaded = repository.find("b", None)
    await repository.unload("b")
    assert reason(repository, "e").endswith("version 1 is at UNLOADING state: ;")
    await unloaded.unloaded.wait()
    assert reason(repository, "e").endswith("version 1 is at UNAVAILABLE state: unloaded;")
    loader.change("b", failure="it is broken")
    with pytest.raises(LoadFailed):
        await repository.load("b")
    assert reason(repository, "e").endswith("version 1 is at UNAVAILABLE state: it is broken;")


async def test_the_reason_follows_a_member_that_was_loading(tmp_path):
    repository, loader = make_repository(tmp_path, [A, B, C, E, OUTER])
    loader.change("b", failure="it is broken")
    with pytest.raises(NotPrepared):
        await repository.load("outer")
    at_once, gate = loader.context.loading, asyncio.Event()
    loader.context.loading = gate
    loader.begun.clear()
    load = asyncio.ensure_future(repository.load("e"))
    await loader.begun.wait()
    loader.context.loading = at_once
    await repository.load("c")
    assert "depends on 'e' which has no loaded version" in reason(repository, "outer")
    assert "version 1 is at LOADING state" in reason(repository, "outer")
    gate.set()
    with pytest.raises(NotPrepared):
        await load
    assert "LOADING" not in reason(repository, "outer")
    assert "version 1 is at UNAVAILABLE state: it is broken" in reason(repository, "outer")


async def test_an_ensemble_that_was_not_served_is_listed_as_unloaded(tmp_path):
    repository, _ = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    first, second = (repository.find(name, None) for name in "ab")
    request = ClientRequest(repository.find("outer", None))
    await repository.unload("b")
    await repository.unload("e")
    assert reason(repository, "e") == ""
    answer_all(first, second)
    await second.unloaded.wait()
    assert is_answered(request)
    assert reason(repository, "e") == "unloaded"
    # Neither of them drains any more.
    await repository.unload("outer")
    assert reason(repository, "outer") == "unloaded"
    await repository.load("b")
    assert {reason(repository, name) for name in ("e", "outer")} == {"unloaded"}
