"""Remote repositories and their cache, on fsspec's file system in memory: hostile and broken contents."""

import errno
import os
import shutil
import stat
import threading

import pytest

from gpubridge.config.remote_url import RemoteUrl
from gpubridge.config.settings import RepositorySettings
from gpubridge.engine.repository import model_cache, remote
from gpubridge.engine.repository.remote import RemoteRepository
from gpubridge.errors import BridgeError

memory = pytest.importorskip("fsspec.implementations.memory")


class Storage(memory.MemoryFileSystem):
    """A file system of its own in memory, which counts downloads and may call a hook before each."""

    cachable = False

    def __init__(self):
        super().__init__()
        self.store, self.pseudo_dirs, self.got = {}, [""], []
        self.hook = lambda path: None

    def get_file(self, rpath, lpath, callback=None, **kwargs):
        self.got.append(rpath.removeprefix("b/models/"))
        self.hook(rpath)
        super().get_file(rpath, lpath, callback=callback, **kwargs)


@pytest.fixture
def storage():
    made = Storage()
    write(made, {"m/config.pbtxt": "backend: 'python'", "m/1/model.py": "first"})
    return made


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def opened(storage, cache):
    def make(**settings):
        url = RemoteUrl("s3://b/models", "s3", "b/models")
        values = {"model_repositories": (url,), "model_cache_dir": cache, **settings}
        return RemoteRepository(url, RepositorySettings(**values), lambda: storage)

    return make


def write(storage, files):
    for path, text in files.items():
        storage.pipe_file(f"b/models/{path}", text.encode())


def put_key(storage, key, content=b""):
    """Store an object under a key that no file system would take."""
    storage.store[f"/b/models/{key}"] = memory.MemoryFile(storage, key, content)


def download(repository, name="m", report=lambda done, total: None):
    return repository.download(repository.find(name), report)


def texts(directory):
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def failure(repository, name="m"):
    with pytest.raises(BridgeError) as caught:
        download(repository, name)
    return caught.value.message


def leftovers(cache):
    """Return what a cache has besides its locks."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]


def test_models_are_listed_by_folder(opened, storage):
    write(storage, {"n/1/model.py": "", "README": "no model", ".hidden/1/model.py": ""})
    put_key(storage, "folder/")
    assert [model.name for model in opened().models(required=True)] == ["m", "n"]


def test_a_snapshot_has_the_files_for_this_user_only(opened, storage, cache):
    write(storage, {"m/1/__pycache__/model.pyc": "stale"})
    snapshot = download(opened())
    assert texts(snapshot.model) == {"config.pbtxt": "backend: 'python'", "1/model.py": "first"}
    assert snapshot.model.name == "m"
    for path in cache.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_downloaded_again_unless_it_has_changed(opened, storage):
    first = download(opened())
    assert download(opened()).model == first.model
    assert sorted(storage.got) == ["m/1/model.py", "m/config.pbtxt"]
    storage.got.clear()
    write(storage, {"m/2/model.py": "second"})
    second = download(opened())
    assert storage.got == ["m/2/model.py"]
    assert texts(second.model) == {**texts(first.model), "2/model.py": "second"}
    # Nobody's stubs lose the files that they run on.
    assert texts(first.model)["1/model.py"] == "first"


def test_a_file_that_a_model_has_changed_is_downloaded_again(opened, storage):
    first = download(opened())
    (first.model / "1" / "model.py").write_text("worse")
    assert texts(download(opened()).model)["1/model.py"] == "first"


def test_a_snapshot_is_removed_once_nobody_uses_it(opened, storage):
    repository = opened()
    first = download(repository)
    write(storage, {"m/1/model.py": "second"})
    second = download(repository)
    assert first.model.is_dir()
    first.hold()
    first.release()
    first.release()
    write(storage, {"m/1/model.py": "third"})
    third = download(repository)
    assert not first.model.exists()
    assert second.model.is_dir()
    assert texts(third.model)["1/model.py"] == "third"


def test_what_a_killed_server_left_is_used_and_removed(opened, storage, cache):
    done = download(opened()).model.parent
    left = done.rename(done.with_name(".new-left"))
    (left / "m" / "1" / "model.py").write_text("half")
    storage.got.clear()
    assert texts(download(opened()).model)["1/model.py"] == "first"
    assert storage.got == ["m/1/model.py"]
    # Its lock is held by the first use of the snapshot, as by another server.
    assert left.exists()


def test_servers_that_download_the_same_model_do_so_once(opened, storage):
    entered, go = threading.Event(), threading.Event()
    found = []

    def hook(_):
        entered.set()
        go.wait(30)

    storage.hook = hook
    threads = [
        threading.Thread(target=lambda: found.append(download(opened()).model)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(30)
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(storage.got) == 2


@pytest.mark.parametrize("key", ["m/../../evil", "m/./x", "m//x", "m/1/../../../x", "m/x\0y"])
def test_a_key_that_is_no_path_is_refused(opened, storage, cache, key):
    put_key(storage, key)
    assert failure(opened()).startswith(
        f"s3://b/models/m has the key {key[2:]!a}: expected the path of a file in it"
    )
    assert not leftovers(cache)


def test_a_key_that_is_a_file_and_a_folder_is_refused(opened, storage, cache):
    put_key(storage, "m/1")
    assert failure(opened()) == (
        "s3://b/models/m: the key '1' is a file, and the folder of '1/model.py'"
    )
    assert not leftovers(cache)


def test_a_model_over_the_limit_is_refused(opened, storage, cache):
    told = "s3://b/models/m has 22 bytes: expected at most 21 (--remote-model-limit)"
    assert failure(opened(remote_model_limit=21)) == told
    assert storage.got == []
    assert download(opened(remote_model_limit=22))


def test_an_object_that_is_larger_than_it_was_listed_is_refused(opened, storage, cache):
    repository = opened()
    model = repository.find("m")
    write(storage, {"m/1/model.py": "longer than before"})
    with pytest.raises(BridgeError, match=r"got more than the 22 bytes that were listed"):
        repository.download(model, lambda done, total: None)
    assert not leftovers(cache)


def test_a_model_that_changes_meanwhile_is_downloaded_again(opened, storage):
    changes = iter(["other", "again"])

    def hook(path):
        # As long as before, so that only the checksum tells.
        if path.endswith("model.py"):
            text = next(changes, None)
            if text:
                write(storage, {"m/1/model.py": text})

    storage.hook = hook
    assert texts(download(opened()).model)["1/model.py"] == "again"


def test_a_model_that_always_changes_is_an_error(opened, storage, cache):
    storage.hook = lambda path: write(storage, {"m/1/model.py": os.urandom(4).hex()[:5]})
    assert failure(opened()).startswith("s3://b/models/m changes while it is downloaded")
    assert not leftovers(cache)


def test_a_network_that_is_lost_leaves_nothing(opened, storage, cache):
    def hook(path):
        if path.endswith("model.py"):
            raise ConnectionError("reset by peer")

    storage.hook = hook
    assert failure(opened()) == (
        "s3://b/models/m cannot be read: ConnectionError: reset by peer; check the URL and the network"
    )
    assert not leftovers(cache)
    storage.hook = lambda path: None
    assert download(opened())


@pytest.mark.parametrize("where", ["before", "meanwhile"])
def test_a_full_disk_is_named_with_what_to_do(opened, storage, cache, where, monkeypatch):
    if where == "before":
        free = shutil.disk_usage("/")._replace(free=10)
        monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda path: free)
    else:

        def hook(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        storage.hook = hook
    told = failure(opened())
    assert told.startswith("s3://b/models/m cannot be read: the cache cannot be written: ")
    assert told.endswith("free it, or choose another directory with --model-cache-dir")
    assert not leftovers(cache)


def test_a_cache_that_others_may_write_to_is_refused(opened, cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert failure(opened()) == (
        f"remote models cannot be kept in {cache}: others may write to it (mode 777); name a directory "
        "that only the server's user can write to with --model-cache-dir"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            FileNotFoundError("The specified bucket does not exist"),
            "there is no such bucket or key",
        ),
        (PermissionError("SignatureDoesNotMatch"), "access is denied"),
        (RuntimeError("Unable to locate credentials"), "access is denied"),
        (TimeoutError("no answer"), "check the URL and the network"),
    ],
)
def test_a_repository_that_cannot_be_read_says_why(opened, storage, error, told, monkeypatch):
    def find(*_, **__):
        raise error

    monkeypatch.setattr(storage, "find", find)
    for ask in (lambda: opened().models(required=True), lambda: opened().find("m")):
        with pytest.raises(BridgeError, match=f"s3://b/models cannot be read: .*{told}"):
            ask()
    assert opened().models(required=False) == []


def test_a_repository_that_is_lost_keeps_its_models(opened, storage, monkeypatch, caplog):
    repository = opened()
    before = repository.models(required=True)
    monkeypatch.setattr(storage, "find", lambda *_, **__: 1 / 0)
    assert [repository.models(required=True) for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1


def test_a_download_ends_when_the_server_does(opened, storage, cache):
    repository = opened()
    storage.hook = lambda path: repository.close()
    assert failure(repository) == "the server is stopping"
    assert not leftovers(cache)


def test_the_bytes_are_reported(opened, storage):
    reports = []
    download(opened(), report=lambda done, total: reports.append((done, total)))
    assert reports[-1] == (22, 22)
    assert reports == sorted(reports)


def test_a_package_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    url = RemoteUrl("az://c/models", "az", "c/models")
    with pytest.raises(BridgeError) as caught:
        remote.open_repositories(RepositorySettings(model_repositories=(url,)))
    assert caught.value.message == (
        "az://c/models needs the package adlfs: pip install 'gpubridge[azure]'"
    )
