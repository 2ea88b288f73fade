"""Ensembles whose members are loaded, replaced and unloaded: what serves them, and their requests under way."""

import asyncio

import pytest

from gpubridge.engine.ensemble import ensemble_model
from gpubridge.engine.repository.loader import LoadFailed, NotPrepared
from gpubridge.errors import BridgeError
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


async def test_ensembles_follow_a_replaced_member_in_the_step_in_which_it_is_replaced(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    heard = {}

    def listen(name):
        heard[name] = repository.find("outer", None).members[0].members[0]

    repository.listen(listen)
    loader.change("a")
    await repository.load("a")
    assert heard == dict.fromkeys(["a", "e", "outer"], repository.find("a", None))


async def test_what_is_not_affected_stays_as_it_is(tmp_path):
    repository, loader = await loaded(
        tmp_path, [A, B, E, ensemble("a X=A > Y=B", name="other")], "e", "other"
    )
    ensembles = [repository.find(name, None) for name in ("e", "other")]
    loader.change("b")
    await repository.load("b")
    assert repository.find("other", None) is ensembles[1]
    await repository.load("other")
    assert repository.find("other", None) is ensembles[1]
    assert repository.find("e", None) is not ensembles[0]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            member("b", outputs="Y:INT32[-1]"),
            "tensor B: inconsistent data type: TYPE_FP32 is inferred",
        ),
        (member("b", outputs="Z"), "tensor B is mapped from non-existing output Y in model b"),
        (member("b", inputs="Z"), "tensor t is mapping to non-existing input X in model b"),
        (member("b", inputs="X Z"), "input Z in model b is not mapped to any ensemble tensors"),
        (member("b", batch=2), "allows maximum batch size 4, but it contains model b which only"),
        (member("b", outputs="Y:FP32[2]", batch=4), "tensor B: inconsistent shape"),
    ],
)
async def test_an_ensemble_that_no_longer_fits_is_unloaded_until_it_does(tmp_path, changed, told):
    batched = [member(name, batch=4) for name in "ab"]
    e = ensemble("a X=A > Y=t", "b X=t > Y=B", batch=4, outputs="B:FP32[3]")
    outer = ensemble("e A=A > B=B", batch=4, name="outer")
    repository, loader = await loaded(tmp_path, [*batched, e, outer], "outer", "a")
    before = ClientRequest(repository.find("outer", None))
    members = [repository.find(name, None) for name in "ab"]
    loader.change("b", changed)
    await repository.load("b")
    assert served(repository) == ["a", "b"]
    assert told in reason(repository, "e")
    assert "depends on 'e' which has no loaded version" in reason(repository, "outer")
    with pytest.raises(BridgeError, match="'e' has no available versions"):
        repository.find("e", None)
    # What had begun is answered by those that it had begun with.
    answer_all(*members)
    assert is_answered(before)
    loader.change("b", member("b", batch=4))
    await repository.load("b")
    assert served(repository) == ["a", "b", "e", "outer"]
    assert not repository.failures


async def test_a_bug_in_building_an_ensemble_concerns_that_ensemble_only(tmp_path, monkeypatch):
    repository, loader = await loaded(tmp_path, [A, B, C, E, OUTER], "outer")

    def recurse(*_):
        raise RecursionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(ensemble_model, "wire", recurse)
        loader.change("b")
        await repository.load("b")
    assert served(repository) == ["a", "b"]
    assert "internal error: RecursionError: planted" in reason(repository, "e")
    heard = []
    repository.listen(heard.append)
    # Whatever looks at the ensembles next.
    await repository.load("c")
    assert served(repository) == ["a", "b", "c", "e", "outer"]
    assert sorted(heard) == ["c", "e", "outer"]
    before = [repository.find(name, None) for name in ("e", "outer")]
    await repository.load("e")
    assert [repository.find(name, None) for name in ("e", "outer")] == before


async def test_versions_that_are_named(tmp_path):
    pinned = ensemble("a:1 X=A > Y=B", name="pinned")
    free = ensemble("a X=A > Y=B", name="free")
    repository, loader = await loaded(tmp_path, [A, pinned, free], "pinned", "free")
    first = repository.find("a", 1)
    loader.change("a", versions=(1, 2))
    await repository.load("a")
    assert [repository.find(n, None).members[0].version for n in ("pinned", "free")] == [1, 2]
    loader.change("a", versions=(2,))
    await repository.load("a")
    assert "'a' whose required version 1 is not loaded" in reason(repository, "pinned")
    loader.change("a", versions=(1,))
    await repository.load("a")
    pinned, free = (repository.find(name, None) for name in ("pinned", "free"))
    assert pinned.members == free.members == (repository.find("a", 1),) != (first,)


async def test_members_are_unloaded_after_the_requests_that_need_them(tmp_path):
    repository, _ = await loaded(tmp_path, [A, B, C, E, OUTER], "outer", "c")
    first, second, other = (repository.find(name, None) for name in "abc")
    request = ClientRequest(repository.find("outer", None))
    await repository.unload("b")
    await repository.unload("c")
    # Whatever drains without waiting for a request has ended by the time this has.
    await other.unloaded.wait()
    assert not second.unloaded.is_set()
    answer_all(first, second)
    assert is_answered(request)
    await second.unloaded.wait()


async def test_the_end_of_the_server_waits_for_requests_in_the_order_of_their_steps(tmp_path):
    repository, _ = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    first, second = (repository.find(name, None) for name in "ab")
    request = ClientRequest(repository.find("outer", None))
    closing = asyncio.ensure_future(repository.close(3600.0))
    while first.held or second.held:
        answer_all(first)
        assert not second.unloaded.is_set()
        answer_all(second)
    await closing
    assert is_answered(request)


async def test_the_end_of_the_server_has_its_time(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    request = ClientRequest(repository.find("outer", None))
    # One drains already, without a limit.
    loader.change("a")
    await repository.load("a")
    await repository.close(0.0)
    assert request.over
    assert isinstance(request.outcomes[0], BridgeError)
    assert all(each.unloaded.is_set() for each in loader.made)


async def test_a_deadline_counts_that_passes_while_requests_are_looked_up(tmp_path, monkeypatch):
    repository, _ = await loaded(tmp_path, [A, B, E], "e")
    model, loop = repository.find("e", None), asyncio.get_running_loop()
    request, looked_up = ClientRequest(model), asyncio.Event()
    monkeypatch.setattr(model, "_looked_up", looked_up.wait)
    unloading = asyncio.ensure_future(model.unload(None))
    model.set_deadline(0.0)
    # Due after the deadline.
    loop.call_at(loop.time(), looked_up.set)
    await unloading
    assert isinstance(request.outcomes[0], BridgeError)


@pytest.mark.parametrize("control", ["explicit", "poll"])
async def test_an_ensemble_waits_for_a_member_that_is_broken_or_missing(tmp_path, control):
    repository, loader = make_repository(tmp_path, [A, B, E, OUTER], control)
    load = repository.reload if control == "poll" else repository.load
    loader.change("b", failure="it is broken")
    (tmp_path / "a").rename(tmp_path / ".a")
    with pytest.raises(NotPrepared, match="models that are not available or ambiguous: a"):
        await load("e")
    with pytest.raises(NotPrepared, match="depends on 'e' which has no loaded version"):
        await load("outer")
    (tmp_path / ".a").rename(tmp_path / "a")
    await load("a")
    assert served(repository) == ["a"]
    assert "depends on 'b' which has no loaded version" in reason(repository, "e")
    loader.change("b")
    await load("b")
    assert served(repository) == ["a", "b", "e", "outer"]
    assert not repository.failures


async def test_a_server_misses_an_ensemble_that_it_was_started_with(tmp_path):
    repository, loader = make_repository(tmp_path, [A, B, E, OUTER], "none")
    loader.change("b", failure="it is broken")
    await repository.load_initial()
    missed = [("b", 1), ("e", 1), ("outer", 1)]
    assert [(row.name, row.version) for row in repository.failures] == missed
    # That somebody tries it again changes nothing.
    with pytest.raises(NotPrepared):
        await repository.reload("outer")
    assert [(row.name, row.version) for row in repository.failures] == missed
    loader.change("b")
    await repository.reload("b")
    assert not repository.failures


async def test_a_model_that_was_to_become_an_ensemble_stays_one_that_runs(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B], "a")
    (tmp_path / "b").rename(tmp_path / ".b")
    loader.models["a"] = (ensemble("b X=A > Y=B", name="a"), (1,), "")
    with pytest.raises(NotPrepared, match="not available or ambiguous: b"):
        await repository.load("a")
    (tmp_path / ".b").rename(tmp_path / "b")
    first = repository.find("a", 1)
    # It is a plain model again, and another version of it loads while the member comes.
    loader.models["a"] = (A, (1, 2), "")
    at_once, gate = loader.context.loading, asyncio.Event()
    loader.context.loading = gate
    loader.begun.clear()
    load = asyncio.ensure_future(repository.load("a"))
    await loader.begun.wait()
    loader.context.loading = at_once
    await repository.load("b")
    gate.set()
    await load
    assert repository.find("a", 1) is first
    assert not first.unloaded.is_set()
    assert repository.versions("a") == [1, 2]


async def test_an_unloaded_ensemble_waits_for_nothing(tmp_path):
    repository, _ = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    await repository.unload("b")
    await repository.unload("e")
    await repository.load("b")
    assert served(repository) == ["a", "b"]
    assert "depends on 'e' which has no loaded version" in reason(repository, "outer")
    # It was loaded as a member; now it is loaded for itself.
    await repository.load("e")
    assert served(repository) == ["a", "b", "e", "outer"]


async def test_an_ensemble_comes_back_as_it_was_loaded(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E], "e")
    await repository.unload("b")
    # Files count when they are loaded.
    loader.change("e", ensemble("nope X=A > Y=B"))
    await repository.load("b")
    assert served(repository) == ["a", "b", "e"]
    assert [each.name for each in repository.find("e", None).members] == ["a", "b"]


async def test_an_ensemble_of_a_clients_files_comes_back_with_its_member(tmp_path):
    repository = make_repository(tmp_path, [A, B, E, OUTER])[0]
    await repository.load("e", "{}", {"file:1/x": b""})
    await repository.unload("b")
    await repository.load("b")
    assert served(repository) == ["a", "b", "e"]
    source = repository.find("e", None)
    await repository.load("outer")
    assert repository.find("e", None) is source


async def test_an_ensemble_cannot_require_one_that_requires_it(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    before = repository.find("e", None)
    loader.change("e", ensemble("outer A=A > B=B"))
    with pytest.raises(NotPrepared, match="circular dependency between ensembles: outer -> "):
        await repository.load("e")
    assert repository.find("e", None) is before
    loader.change("outer", ensemble("a X=A > Y=B", name="outer"))
    await repository.load("outer")
    assert repository.find("e", None).members == (repository.find("outer", None),)


async def test_members_of_an_ensemble_are_loaded_beside_its_unload(tmp_path):
    repository, loader = make_repository(tmp_path, [A, B, E])
    loader.context.loading.clear()
    load = asyncio.ensure_future(repository.load("e"))
    await loader.begun.wait()
    assert {row.state for row in repository.index()} == {"LOADING"}
    await repository.unload("e")
    loader.context.loading.set()
    await load
    assert "e" not in served(repository)
    assert reason(repository, "e") == "unloaded"


@pytest.mark.parametrize("left", [(1,), (1, 3), ()])
async def test_a_failed_version_that_is_gone_is_not_missed(tmp_path, left):
    repository, loader = make_repository(tmp_path, [A])
    if 1 in left:
        await repository.load("a")
    loader.change("a", versions=(1, 2) if 1 in left else (2,), failure="it is broken")
    with pytest.raises(LoadFailed):
        await repository.load("a")
    assert [(row.name, row.version) for row in repository.failures][-1] == ("a", 2)
    loader.change("a", versions=left)
    if left:
        await repository.load("a")
    else:
        with pytest.raises(NotPrepared, match="at least one version"):
            await repository.load("a")
    assert not repository.failures


async def test_a_load_tries_a_model_that_waits_for_its_restart(tmp_path):
    repository, loader = await loaded(tmp_path, [A], "a")
    repository.find("a", None).whole_now = False
    loader.models["a"] = (A, (1,), "it still dies")
    with pytest.raises(LoadFailed, match="it still dies"):
        await repository.load("a")
    assert served(repository) == ["a"]
    loader.models["a"] = (A, (1,), "")
    await repository.load("a")
    assert repository.find("a", None) is loader.made[-1]
    # One that works is not loaded again.
    await repository.load("a")
    assert len(loader.made) == 3


async def test_a_load_of_an_ensemble_tries_a_member_that_waits_for_its_restart(tmp_path):
    repository, loader = await loaded(tmp_path, [A, B, E, OUTER], "outer")
    before = {name: repository.find(name, None) for name in "ab"}
    before["b"].whole_now = False
    loader.models["b"] = (B, (1,), "it still dies")
    with pytest.raises(LoadFailed, match=r"load failed for model 'b'.*it still dies"):
        await repository.load("outer")
    assert served(repository) == ["a", "b", "e", "outer"]
    loader.models["b"] = (B, (1,), "")
    await repository.load("outer")
    assert repository.find("b", None) is loader.made[-1]
    assert repository.find("a", None) is before["a"]
    assert repository.find("e", None).members[1] is loader.made[-1]
    # They were loaded for it only, as before.
    await repository.unload("outer", dependents=True)
    assert served(repository) == []
