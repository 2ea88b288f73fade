"""The store of unpacked environments: what counts as whole, what is remembered, where it may lie."""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest

from gpubridge.engine.environments.provider import ModelEnvironments
from gpubridge.engine.environments.store import EntryFacts, EnvironmentStore, open_store
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError
from gpubridge.tensor.native import native_path
from tests.process.environments import borrowing_environment, pack

DIGEST = "a" * 64


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "cache")


@pytest.fixture
def entry(store):
    """A whole entry."""
    entry = store.entry(DIGEST)
    entry.begin()
    entry.complete(EntryFacts(str(entry.environment), "e.tar.gz", 1, 1))
    return entry


@pytest.fixture
def archive(tmp_path):
    """A file that has not changed for a while: its times cannot be set back, so ours is later."""
    path = tmp_path / "e.tar.gz"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def later(monkeypatch):
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)


def test_an_entry_is_whole_when_its_mark_says_so(store):
    entry = store.entry(DIGEST)
    assert entry.facts() is None
    entry.begin()
    assert entry.facts() is None
    facts = EntryFacts(str(entry.environment), "e.tar.gz", 1, 1)
    entry.complete(facts)
    assert store.entry(DIGEST).facts() == replace(facts, entries=1)
    entry.begin()
    assert store.entry(DIGEST).facts() is None


def test_an_entry_that_lost_files_is_not_whole(store):
    entry = store.entry(DIGEST)
    entry.begin()
    library = entry.environment / "lib"
    library.mkdir()
    (library / "one.py").touch()
    (library / "link.py").symlink_to("one.py")
    entry.complete(EntryFacts(str(entry.environment), "e.tar.gz", 1, 1))
    # What stubs write neither takes anything away nor makes up for what is missing.
    (library / "__pycache__").mkdir()
    (library / "__pycache__" / "one.pyc").touch()
    assert entry.facts() is not None
    (library / "link.py").unlink()
    assert entry.facts() is None


@pytest.mark.parametrize("mark", ["", "[]", "{}", '{"location": 1', "null"])
def test_a_mark_that_says_nothing_marks_nothing(entry, mark):
    (entry.environment.parent / "complete").write_text(mark)
    assert entry.facts() is None


def test_an_entry_that_was_moved_is_not_whole(store, entry, tmp_path):
    store.cache.rename(tmp_path / "moved")
    assert EnvironmentStore(tmp_path / "moved").entry(DIGEST).facts() is None


def test_an_archive_is_known_until_it_changes(store, entry, archive, later):
    assert store.find(archive) is None
    store.remember(archive, archive.stat(), DIGEST)
    assert store.find(archive).environment == entry.environment
    status = archive.stat()
    archive.write_bytes(b"CONTENT")
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.find(archive) is None


def test_an_archive_whose_environment_was_removed_is_not_known(store, entry, archive, later):
    store.remember(archive, archive.stat(), DIGEST)
    entry.remove()
    assert store.find(archive) is None


def test_an_archive_that_changed_just_now_is_not_remembered(store, entry, archive):
    # It may change again without another time.
    store.remember(archive, archive.stat(), DIGEST)
    assert store.find(archive) is None


def test_records_of_removed_environments_are_dropped(store, entry, archive, later):
    store.remember(archive, archive.stat(), "b" * 64)
    store.remember(archive, archive.stat(), DIGEST)
    other = archive.with_name("other")
    other.write_bytes(b"")
    store.remember(other, other.stat(), "c" * 64)
    store.remember(archive, archive.stat(), DIGEST)
    assert len(list((store.cache / "known").iterdir())) == 1


def test_one_holds_the_lock(store, entry):
    held = entry.lock(wait=False)
    assert held is not None
    assert store.entry(DIGEST).lock(wait=False) is None
    os.close(held)
    again = store.entry(DIGEST).lock(wait=True)
    assert again is not None
    os.close(again)


def test_orphans_are_removed_but_nothing_whole_and_nothing_that_is_worked_on(store, entry):
    os.close(entry.lock(wait=False))
    orphan, busy = store.entry("b" * 64), store.entry("c" * 64)
    for half in (orphan, busy):
        half.begin()
    os.close(orphan.lock(wait=False))
    held = busy.lock(wait=False)
    store.remove_orphans()
    assert entry.facts() is not None
    assert not orphan.environment.exists()
    assert busy.environment.exists()
    os.close(held)


@pytest.mark.parametrize("emptied", ["files", "entries", "cache"])
async def test_an_environment_is_unpacked_again_for_the_next_stub_when_the_cache_was_emptied(
    tmp_path, emptied
):
    archive = pack(tmp_path / "e.tar.gz", borrowing_environment())
    model = tmp_path / "m"
    model.mkdir()
    config = SimpleNamespace(
        name="m", backend_file=None, parameters={"EXECUTION_ENV_PATH": str(archive)}
    )
    environments = ModelEnvironments(tmp_path / "cache", 1 << 20, LoadThreads())
    environment = await environments.of_model(model, config)
    # It is our interpreter, whose module fits.
    assert environment.variables["GPUBRIDGE_STUB_MODULE"] == native_path()
    made = await environments.stat_interpreter(environment)
    # Nothing is missing: nothing is made again.
    assert await environments.restored(environment) == environment
    assert (await environments.stat_interpreter(environment)).st_ino == made.st_ino
    empty(tmp_path / "cache", emptied)
    assert await environments.restored(environment) == environment
    await environments.stat_interpreter(environment)
    # Other content of the archive is another environment.
    pack(archive, borrowing_environment(more="more"))
    empty(tmp_path / "cache", "cache")
    other = await environments.restored(environment)
    assert other.root != environment.root
    assert other.python == str(other.root / "bin" / "python3")
    assert other.variables["VIRTUAL_ENV"] == str(other.root)
    assert other.variables["GPUBRIDGE_STUB_MODULE"] == native_path()
    await environments.close()


def empty(cache, how):
    """Remove the files of the environments, what lies in the cache, or the cache."""
    if how == "files":
        for python in cache.glob("*/environment/bin/python3"):
            python.unlink()
    elif how == "entries":
        for entry in cache.iterdir():
            rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        rmtree(cache)


class TestWhere:
    def test_in_the_user_s_cache_directory(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        cache = open_store(None).cache
        assert cache == tmp_path / "xdg" / "gpubridge" / "environments"
        assert cache.stat().st_mode & 0o777 == 0o700
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert open_store(None).cache == tmp_path / ".cache" / "gpubridge" / "environments"

    def test_without_one_in_a_private_directory_for_temporary_files(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        cache = open_store(None).cache
        assert cache == tmp_path / "temporary" / f"gpubridge-environments-{os.getuid()}"
        assert cache.stat().st_mode & 0o777 == 0o700

    def test_never_where_somebody_else_can_write(self, tmp_path):
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o770)
        with pytest.raises(BridgeError, match=r"others may write to it \(mode 770\)"):
            open_store(shared)

    def test_never_in_somebody_else_s(self, tmp_path, monkeypatch):
        folder = tmp_path / "theirs"
        folder.mkdir()
        if os.geteuid() == 0:
            os.chown(folder, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(BridgeError, match="it belongs to user"):
            open_store(folder)

    def test_a_file_is_no_place(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BridgeError, match=r"cannot be unpacked to .*/file: "):
            open_store(tmp_path / "file")

    def test_a_link_to_a_directory_is_taken_for_what_it_leads_to(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "there")
        (tmp_path / "there").mkdir(mode=0o700)
        assert open_store(tmp_path / "link").cache == Path(tmp_path / "there")
