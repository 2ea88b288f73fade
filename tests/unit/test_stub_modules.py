"""The compiled module of stubs in models' own interpreters: which one, and how it is built and kept."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from gpubridge.engine.environments import stub_modules
from gpubridge.engine.environments.interpreter import Interpreter, inspect, load_failure
from gpubridge.engine.environments.module_cache import ModuleCache
from gpubridge.engine.environments.stub_modules import StubModules
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.tensor import native

FOREIGN = Interpreter("3.10.1", "cpython", "", "cpython-310-x86_64-linux-gnu", "/include")
KEY, NAME = "a" * 64, "_native.abi3.so"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A package whose sources of the module are quickly compiled."""
    folder = tmp_path / "package" / "stub_source"
    for file in ("csrc/module.cpp", "nanobind/src/nb_combined.cpp"):
        (folder / file).parent.mkdir(parents=True)
    (folder / "csrc/module.cpp").write_text('extern "C" int gpubridge_built() { return 1; }\n')
    (folder / "nanobind/src/nb_combined.cpp").write_text("")
    monkeypatch.setattr(stub_modules, "native_path", lambda: str(folder.with_name("_native.x.so")))
    return folder


@pytest.fixture
def pipe(source, monkeypatch):
    """What the compiler reads, once; to open it for writing waits for that."""
    path = source / "csrc/slow.h"
    os.mkfifo(path)
    (source / "csrc/module.cpp").write_text('#include "slow.h"\n')
    # It would read the pipe, too.
    monkeypatch.setattr(stub_modules, "_digest", lambda _: "0")
    return path


async def loads(_):
    return ""


async def choose(cache, *interpreters, patience=300.0, loads=loads):
    """Return what is chosen for interpreters that are asked for at once."""
    modules = StubModules(cache, LoadThreads(), patience)
    chosen = await asyncio.gather(*(modules.choose(each, loads) for each in interpreters))
    await modules.close()
    return chosen


@pytest.mark.parametrize(
    ("interpreter", "name"),
    [
        (FOREIGN, "_native.cpython-310-x86_64-linux-gnu.so"),
        (Interpreter("3.12.0", "cpython", "", "cpython-312-x"), "_native.abi3.so"),
        (Interpreter("3.20.1", "cpython", "", "cpython-320-x"), "_native.abi3.so"),
        (Interpreter("3.13.0", "cpython", "d", "cpython-313d-x"), "_native.cpython-313d-x.so"),
    ],
)
async def test_a_module_that_the_package_carries_is_chosen_by_its_abi(
    source, interpreter, name, tmp_path
):
    carried = source.with_name("stub_modules") / name
    assert await StubModules(tmp_path, LoadThreads(), 300.0).find(interpreter, loads) == ""
    carried.parent.mkdir()
    carried.touch()
    assert await choose(tmp_path, interpreter) == [str(carried)]
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_module_is_built_once_for_all_who_ask_and_kept(tmp_path, pipe, servers):
    waiting = [asyncio.ensure_future(choose(tmp_path, FOREIGN, FOREIGN)) for _ in range(servers)]
    # A second compiler would wait for ever.
    await asyncio.to_thread(pipe.write_text, "int made;\n")
    chosen = {path for paths in await asyncio.gather(*waiting) for path in paths}
    assert chosen == set(await choose(tmp_path, FOREIGN))
    assert Path(chosen.pop()).parents[1] == tmp_path / "native"


def test_other_sources_are_another_module(source):
    before = stub_modules._key(FOREIGN)
    (source / "csrc/module.cpp").write_text("int other;\n")
    stub_modules._digest.cache_clear()
    assert stub_modules._key(FOREIGN) != before


async def test_a_failed_build_is_told_with_the_compiler_s_error_and_not_tried_again(
    source, tmp_path
):
    (source / "csrc/module.cpp").write_text("#error no such luck\n")
    modules = StubModules(tmp_path, LoadThreads(), 300.0)
    reason = await modules.choose(FOREIGN, loads)
    assert "failed: " in reason
    assert "no such luck" in reason
    (source / "csrc/module.cpp").write_text("")
    assert await modules.choose(FOREIGN, loads) == reason
    # Another server may have a better compiler.
    assert (await choose(tmp_path, FOREIGN))[0].startswith("/")


async def test_a_load_does_not_wait_for_a_long_build_and_later_processes_have_it(tmp_path, pipe):
    modules = StubModules(tmp_path, LoadThreads(), 1e-9)
    reason = await modules.choose(FOREIGN, loads)
    assert "its build takes longer than 1e-09 s; processes that start after it use it" in reason
    (build,) = modules._running.values()
    await asyncio.to_thread(pipe.write_text, "int made;\n")
    assert await build == ""
    assert (await modules.choose(FOREIGN, loads)).startswith("/")
    await modules.close()


async def test_a_server_that_stops_ends_its_build(source, tmp_path, pipe):
    modules = StubModules(tmp_path, LoadThreads(), 300.0)
    waiting = asyncio.ensure_future(modules.choose(FOREIGN, loads))
    with await asyncio.to_thread(pipe.open, "w"):
        await modules.close()
        assert await waiting == "the server is stopping"
    # What it left is removed by the next one.
    assert list((tmp_path / "native").glob("*.new-*"))
    (source / "csrc/module.cpp").write_text("")
    assert (await choose(tmp_path, FOREIGN))[0].startswith("/")
    assert not list((tmp_path / "native").glob("*.new-*"))


async def test_a_module_that_does_not_load_is_not_chosen_and_told(source, tmp_path):
    async def refuses(path):
        return f"undefined symbol in {Path(path).name}"

    (reason,) = await choose(tmp_path, FOREIGN, loads=refuses)
    assert "does not load" in reason
    assert "undefined symbol in _native.cpython-310-x86_64-linux-gnu.so" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flags": "t"}, "is free-threaded, and compiled modules would turn its lock on"),
        ({"implementation": "pypy"}, "compiled modules are for CPython, this is pypy"),
        ({"version": "3.9.1"}, "compiled modules are for CPython 3.10 and newer, this is 3.9.1"),
        ({"include": ""}, "has no Python.h to build one with; install its headers"),
    ],
)
async def test_an_interpreter_without_a_module_has_the_reason_and_the_cure(
    source, tmp_path, change, reason
):
    fields = {name: getattr(FOREIGN, name) for name in Interpreter.__dataclass_fields__}
    (said,) = await choose(tmp_path, Interpreter(**{**fields, **change}))
    assert reason in said


async def test_without_a_compiler_or_sources_it_says_so(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stub_modules, "compiler_command", lambda: None)
    assert "install g++, or: " in (await choose(tmp_path, FOREIGN))[0]
    (source / "csrc/module.cpp").unlink()
    assert "its source is absent, too" in (await choose(tmp_path, FOREIGN))[0]


async def test_none_is_built_where_the_setting_forbids_it(source, tmp_path):
    (reason,) = await choose(tmp_path, FOREIGN, patience=0.0)
    assert "none is built, as --backend-config=python,module-build-seconds=0 says" in reason


async def test_a_read_only_cache_is_read_and_the_lack_of_another_told(
    source, tmp_path, monkeypatch
):
    (built,) = await choose(tmp_path, FOREIGN)
    refused = monkeypatch.setattr
    refused(os, "access", lambda *_: False)
    assert await choose(tmp_path, FOREIGN) == [built]
    other = Interpreter("3.11.1", "cpython", "", "cpython-311-x", "/include")
    assert "cannot be written to; name a directory" in (await choose(tmp_path, other))[0]


def test_an_interpreter_tells_what_it_is():
    found = asyncio.run(inspect(sys.executable, os.environ))
    assert found.numbers == sys.version_info[:3]
    assert (found.refusal() == "") == (sys.implementation.name == "cpython" and not found.flags)
    module = native.native_path()
    assert asyncio.run(load_failure(sys.executable, os.environ, module)) == ""
    assert "No such file" in asyncio.run(load_failure(sys.executable, os.environ, "/none.so"))


class TestCache:
    @pytest.fixture
    def entry(self, tmp_path):
        with ModuleCache(tmp_path).new_entry(KEY, NAME) as path:
            path.write_bytes(b"module")
        assert ModuleCache(tmp_path).find(KEY, NAME) == tmp_path / KEY / NAME
        return tmp_path / KEY

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda entry: (entry / NAME).chmod(0o777),
            lambda entry: entry.chmod(0o777),
            lambda entry: (entry / "sha256").unlink(),
            lambda entry: (entry / "sha256").write_bytes(b"0"),
            lambda entry: os.truncate(entry / NAME, 3),
            lambda entry: (entry / NAME).rename(entry / "x") and (entry / NAME).symlink_to("x"),
            lambda entry: entry.rename(f"{entry}x") and entry.symlink_to(f"{entry}x"),
            lambda entry: (entry / NAME).unlink() or os.mkfifo(entry / NAME),
            lambda entry: (entry / NAME).unlink() or (entry / NAME).mkdir(),
            pytest.param(
                lambda entry: os.chown(entry / NAME, 12345, -1),
                marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
            ),
        ],
    )
    def test_an_entry_that_others_could_have_written_is_not_used_but_replaced(
        self, entry, spoil, tmp_path
    ):
        spoil(entry)
        cache = ModuleCache(tmp_path)
        assert cache.find(KEY, NAME) is None
        with cache.new_entry(KEY, NAME) as path:
            path.write_bytes(b"again")
        assert cache.find(KEY, NAME) == entry / NAME

    def test_an_interrupted_build_leaves_the_entry_as_it_was(self, entry, tmp_path):
        left = tmp_path / f"{KEY}.new-left"
        left.mkdir()

        def interrupt():
            with ModuleCache(tmp_path).new_entry(KEY, NAME) as path:
                path.write_bytes(b"half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert ModuleCache(tmp_path).find(KEY, NAME) == entry / NAME
        assert [path.name for path in tmp_path.iterdir()] == [KEY]
