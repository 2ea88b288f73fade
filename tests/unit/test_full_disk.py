"""A disk that takes no more: who caused the write is told, nothing half-written stays, and it is tried again."""

import json
import logging
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpubridge.engine.environments import store
from gpubridge.engine.repository import one_file
from gpubridge.engine.repository.model_files import FileOverrides
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.traces import TraceWriter
from tests.waits import poll

LONG = "x" * 5000


@contextmanager
def full_disk(nbytes):
    """Let this process make files no longer than so many bytes: as on a full disk, a write may end within."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_files_of_a_client_are_refused_as_the_servers_fault_and_taken_later(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    overrides = FileOverrides()
    sent = {"file:1/model.py": b"pass", "file:1/weights": LONG.encode()}
    with full_disk(4096), pytest.raises(BridgeError, match="set TMPDIR") as caught:
        overrides.write("m", sent)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert files(tmp_path) == ["lock"]
    assert (overrides.write("m", sent).model / "1" / "weights").read_text() == LONG
    with pytest.raises(BridgeError, match="Invalid file parameter") as caught:
        overrides.write("m", {"file:1": b"", "file:1/model.py": b""})
    assert caught.value.code is ErrorCode.INVALID_ARG
    overrides.close()


def test_a_folder_that_cannot_be_locked_is_not_left(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    overrides, before = FileOverrides(), descriptors()
    with monkeypatch.context() as full:
        full.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(BridgeError, match="No space left"):
            overrides.write("m", {"file:1/model.py": b""})
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before
    overrides.close()


def test_a_changed_file_with_models_is_taken_once_there_is_space(monkeypatch, tmp_path):
    source, model = tmp_path / "app.py", tmp_path / "m"
    (model / "1").mkdir(parents=True)
    source.touch()
    (model / "config.pbtxt").write_text("old")
    (model / "1" / "gpubridge.declared_in").symlink_to(source)
    (model / "1" / "gpubridge.served").write_text('["m"]')
    monkeypatch.setattr(one_file, "_declared", lambda _: {"m": {"name": LONG}})
    with full_disk(1000), pytest.raises(BridgeError, match="free space there"):
        one_file.renew(model)
    assert files(model) == ["config.pbtxt", "gpubridge.declared_in", "gpubridge.served"]
    assert (model / "config.pbtxt").read_text() == "old"
    one_file.renew(model)
    assert LONG in (model / "config.pbtxt").read_text()


@pytest.mark.parametrize("numbered", [False, True])
def test_a_file_of_traces_is_whole_and_goes_on(tmp_path, caplog, numbered):
    writer, path = TraceWriter(), tmp_path / "t"

    def put(record):
        writer.put(str(path), [record], numbered=numbered)

    put({"id": 1})
    assert poll(lambda: files(tmp_path) and (tmp_path / files(tmp_path)[0]).stat().st_size > 2, 30)
    before = descriptors()
    for times in (1, 2):
        with full_disk(100):
            put({"text": LONG})
            assert poll(lambda times=times: len(caplog.messages) == times, 30)
        assert "traces are lost: cannot write" in caplog.messages[-1]
        put({"id": 1 + times})
        assert poll(lambda times=times: f'"id":{1 + times}' in read(tmp_path), 30)
    assert descriptors() == before
    writer.close()
    whole = [json.loads((tmp_path / name).read_bytes()) for name in files(tmp_path)]
    assert [each["id"] for array in whole for each in array] == [1, 2, 3]


def read(folder):
    return "".join((folder / name).read_text() for name in files(folder))


def test_an_archive_whose_record_cannot_be_written_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_TIME_GRANULARITY_NS", -(10**18))
    archive = tmp_path / "archive"
    archive.touch()
    cache = store.EnvironmentStore(tmp_path / "cache")
    (cache.cache / "known").mkdir(parents=True)
    with full_disk(10):
        cache.remember(archive, archive.stat(), "d" * 64)
    assert files(cache.cache) == []
    cache.remember(archive, archive.stat(), "d" * 64)
    assert len(files(cache.cache)) == 1


def test_lines_of_a_log_are_lost_with_one_word_and_whole_again_later(tmp_path, capsys):
    file = tmp_path / "log"
    log, logger = ServerLog(LogSettings(file=str(file))), logging.getLogger("gpubridge.test")
    logger.info("first")
    for _ in range(2):
        with full_disk(file.stat().st_size + 10):
            for _ in range(3):
                logger.info(LONG * 2)
        said = capsys.readouterr().err
        assert said == f"lines of the log are lost: cannot write {file}: File too large\n"
        logger.info("later")
    with full_disk(file.stat().st_size):
        logger.info("the rest")
        log.close()
    assert file.read_text().count("] later\n") == 2
