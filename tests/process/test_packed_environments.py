"""Models in packed environments: unpacked once, kept, shared, begun anew, refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.environments import (
    borrowing_environment,
    environment_parameter,
    other_minors,
    pack,
    shared_environment,
)
from tests.process.server import (
    alive,
    children,
    descendants,
    is_fork_server,
    running_server,
    wait_until,
    write_code_model,
)

WHERE = "self.said = os.environ['VIRTUAL_ENV']"
UNPACKED = "is unpacked after"
HANGS = "import signal; open('{mark}', 'w').close(); signal.pause()"


class Place:
    """A folder with a repository, a cache, and the flag that names it."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.models = folder / "models"
        self.cache = cache
        self._flag = f"--backend-config=python,environment-cache={cache}"

    def serve(self, *flags, **options):
        return running_server(self.models, self._flag, *flags, **options)

    def entries(self):
        return sorted(path for path in self.cache.glob("?" * 64) if path.is_dir())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, tmp_path / "cache")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("environments")


@pytest.fixture
def shared(tmp_path, cache):
    """A place whose cache others have used: their servers have the same flags."""
    return Place(tmp_path, cache)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_packed_environment_of_another_python_runs_the_model(shared, tmp_path_factory):
    folders = (shared_environment(tmp_path_factory, minor) for minor in other_minors())
    folder = next(filter(None, folders), None)
    if folder is None:
        pytest.skip("no other Python from 3.9 on is on PATH")
    config = environment_parameter("$$TRITON_MODEL_DIRECTORY/environment.tar.gz")
    model = write_code_model(shared.models, config=config)
    archive = pack(model / "environment.tar.gz", folder)
    root = str(shared.cache / digest(archive) / "environment")
    with shared.serve() as server:
        code = "import json; self.said = json.dumps([sys.version_info[1], sys.prefix, np.__file__])"
        minor, prefix, numpy = json.loads(server.ask(code)[1])
        assert minor in other_minors()
        assert prefix == root
        assert numpy.startswith(root)
        assert server.log().count(UNPACKED) == 1


def test_one_content_is_unpacked_once_for_all_models_servers_and_starts(place):
    one = pack(place.folder / "one.tar.gz", borrowing_environment())
    two = place.folder / "two.tar.gz"
    two.write_bytes(one.read_bytes())
    for name, path in {"a": one, "b": one, "c": two}.items():
        write_code_model(place.models, name, config=environment_parameter(path))
    root = place.cache / digest(one) / "environment"
    with ExitStack() as stack:
        servers = [stack.enter_context(place.serve(ready=False)) for _ in range(2)]
        for server in servers:
            wait_until(server.is_ready, "the models", server)
            assert {server.ask(WHERE, name) for name in "abc"} == {(200, str(root))}
        assert sum(server.log().count(UNPACKED) for server in servers) == 1
    with place.serve("--model-control-mode=explicit", "--load-model=a") as server:
        assert server.ask(WHERE, "a") == (200, str(root))
        assert "unpacked after" not in server.log()
    assert place.entries() == [root.parent]
    assert place.cache.stat().st_mode & 0o777 == 0o700


def test_several_are_unpacked_at_the_same_time(shared):
    # Each waits for the other: to open a pipe takes two.
    pipes = [str(shared.folder / name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)
    for name, modes in (("a", "rw"), ("b", "wr")):
        script = f"for way in {list(zip(pipes, modes, strict=True))}: open(*way).close()"
        files = borrowing_environment(python='#!/bin/sh\nexec "$(dirname "$0")/python3" "$@"\n')
        files["bin/conda-unpack"] = script.encode()
        path = pack(shared.folder / f"{name}.tar.gz", files)
        write_code_model(shared.models, name, config=environment_parameter(path))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one at a time on one processor")
    with shared.serve() as server:
        assert server.log().count(UNPACKED) == 2


def test_other_content_of_the_same_file_is_another_environment(shared):
    archive = pack(shared.folder / "e.tar.gz", borrowing_environment())
    model = write_code_model(shared.models, config=environment_parameter(archive))
    with shared.serve("--model-control-mode=explicit", "--load-model=m") as server:
        before = server.ask(WHERE)[1]
        pack(archive, borrowing_environment(more="more"))
        (model / "1" / "model.py").touch()
        assert server.request("POST", "/v2/repository/models/m/load")[0] == 200
        after = server.ask(WHERE)[1]
        assert before != after == str(shared.cache / digest(archive) / "environment")
        assert [path.name for path in (Path(before) / "bin").iterdir()] == ["python3"]
        # The next stub finds it again when someone has deleted it meanwhile.
        shutil.rmtree(Path(after).parent)
        assert server.ask("os._exit(3)")[0] == 503
        wait_until(lambda: server.ask(WHERE) == (200, after), "another stub to start", server)


def test_an_interrupted_unpacking_starts_over(place):
    archive = pack(place.folder / "e.tar.gz", borrowing_environment())
    write_code_model(place.models, config=environment_parameter(archive))
    half, orphan = place.cache / digest(archive), place.cache / ("0" * 64)
    for entry in (half, orphan):
        (entry / "environment").mkdir(parents=True)
        (entry / "environment" / "half").touch()
        entry.with_name(entry.name + ".lock").touch()
    with place.serve() as server:
        assert server.ask(WHERE) == (200, str(half / "environment"))
    assert [path.name for path in (half / "environment").iterdir()] == ["bin"]
    assert place.entries() == [half]


def test_conda_unpack_is_run_where_the_environment_is(shared):
    script = "import os, sys; open(__file__ + '.ran', 'w').write(os.getcwd()); print('said')"
    files = borrowing_environment(python='#!/bin/sh\nexec "$(dirname "$0")/python3" "$@"\n')
    archive = pack(shared.folder / "e.tar.gz", {**files, "bin/conda-unpack": script.encode()})
    write_code_model(shared.models, config=environment_parameter(archive))
    with shared.serve() as server:
        assert (Path(server.ask(WHERE)[1]) / "bin" / "conda-unpack.ran").exists()


def hanging_model(place):
    """A model whose environment's conda-unpack never ends; returns the file that it makes first."""
    mark = place.folder / "mark"
    files = borrowing_environment(python='#!/bin/sh\nexec "$(dirname "$0")/python3" "$@"\n')
    files["bin/conda-unpack"] = HANGS.format(mark=mark).encode()
    archive = pack(place.folder / "e.tar.gz", files)
    write_code_model(place.models, config=environment_parameter(archive))
    return mark


def test_a_server_that_is_told_to_stop_leaves_nothing_half_unpacked(place):
    mark = hanging_model(place)
    with place.serve(ready=False) as server:
        wait_until(mark.exists, "the unpacking", server)
        working = descendants(server.pid)
        assert [is_fork_server(pid) for pid in working].count(False) == 2
        assert server.stop() == 0
        assert "Traceback" not in server.log()
    assert not any(map(alive, working))
    assert place.entries() == []


def test_the_unpacking_process_dies_with_the_server(place):
    mark = hanging_model(place)
    with place.serve(ready=False) as server:
        wait_until(mark.exists, "the unpacking", server)
        working = descendants(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        for pid in working:
            wait_until(lambda pid=pid: not alive(pid), "the end of what unpacks")
        server.process.wait()
    archive = pack(place.folder / "e.tar.gz", borrowing_environment())
    with place.serve() as server:
        assert server.ask(WHERE)[0] == 200
    # The half of the other content is gone, too.
    assert place.entries() == [place.cache / digest(archive)]


def test_requests_of_other_models_are_answered_meanwhile(shared):
    mark = hanging_model(shared)
    write_code_model(shared.models, "other")
    with shared.serve(ready=False) as server:
        wait_until(mark.exists, "the unpacking", server)
        wait_until(lambda: server.is_ready("other"), "the other model", server)
        assert server.ask("self.said = 'yes'", "other") == (200, "yes")


def bad_archives(folder):
    """Paths of archives that cannot be used, each with what is to be said of it."""
    good = pack(folder / "good.tar.gz", borrowing_environment()).read_bytes()

    def write(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    def packed(name, **scripts):
        return pack(folder / f"{name}.tar.gz", borrowing_environment(**scripts))

    os.mkfifo(folder / "pipe")
    failing = packed("failing", python='#!/bin/sh\necho "no prefix" >&2; exit 3\n', conda_unpack="")
    nested = pack(folder / "nested.tar.gz", {"mine/bin/python3": b""})
    escaping = pack(folder / "escaping.tar.gz", {"../../evil": b"x"})
    large = pack(folder / "large.tar.gz", {"bin/python3": bytes(200_000)})
    return {
        "missing": (
            folder / "no.tar.gz",
            "no.tar.gz does not exist. The Python environment should",
        ),
        "text": (
            write("text.tar.gz", b"text"),
            "is no archive: expected a tar archive, packed with",
        ),
        "empty": (write("empty.tar.gz", b""), "got an empty file"),
        "short": (write("short.tar.gz", good[:-20]), "is cut short"),
        "zip": (write("zip.tar.gz", b"PK\x03\x04"), "is a zip archive"),
        "pipe": (folder / "pipe", "is neither a directory nor a file"),
        "relative": ("good.tar.gz", "Failed to get the canonical path for good.tar.gz."),
        "failing": (failing, "its bin/conda-unpack failed: it ended with code 3: no prefix"),
        "nested": (
            nested,
            "holds no bin/python3: expected a virtual environment (venv, uv or conda),",
        ),
        "escaping": (escaping, "member '../../evil' is refused: Path contains '..'"),
        "large": (large, "expected at most 100000 bytes in all, got 0 and 200000 more; raise"),
    }


def test_an_archive_that_cannot_be_used_is_refused_with_the_reason(place):
    cases = bad_archives(place.folder)
    for name, (path, _) in cases.items():
        write_code_model(place.models, name, config=environment_parameter(path))
    write_code_model(
        place.models, "good", config=environment_parameter(place.folder / "good.tar.gz")
    )
    limit = "--backend-config=python,environment-limit-bytes=100000"
    with place.serve("--exit-on-error=false", limit, ready=False) as server:
        wait_until(
            lambda: (
                len(server.index()) == len(cases) + 1
                and not any(row["state"] == "LOADING" for row in server.index().values())
            ),
            "the models",
            server,
        )
        rows = {name: row for (name, _), row in server.index().items()}
        assert server.ask(WHERE, "good")[0] == 200
        assert children(server.pid) == server.stubs()
    reasons = {name: rows[name].get("reason", "") for name in cases}
    assert {n: reasons[n] for n, (_, text) in cases.items() if text not in reasons[n]} == {}
    # Those two were unpacked: it is what is in them that cannot be used.
    kept = {digest(place.folder / f"{name}.tar.gz") for name in ("good", "nested")}
    assert {entry.name for entry in place.entries()} == kept
    assert not (place.folder / "evil").exists()


def test_loads_that_fail_leave_no_descriptor(place):
    (place.folder / "text.tar.gz").write_text("text")
    (place.folder / "empty").mkdir()
    for name in ("text.tar.gz", "empty", "nothing"):
        config = (
            environment_parameter(place.folder / name) + "max_batch_size: 2 dynamic_batching {}"
        )
        write_code_model(place.models, name, config=config)
    flags = ("--model-control-mode=explicit", "--disable-auto-complete-config")
    with place.serve(*flags) as server:

        def load():
            for name in ("text.tar.gz", "empty", "nothing"):
                path = f"/v2/repository/models/{name}/load"
                assert server.request("POST", path)[0] == 400

        def count():
            return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

        load()
        before = count()
        for _ in range(3):
            load()
        wait_until(lambda: count() <= before, "the descriptors", server)


def test_a_backend_may_bring_a_packed_environment(place):
    model = write_code_model(place.models)
    backend = place.folder / "backends" / "mine"
    backend.mkdir(parents=True)
    (model / "1" / "model.py").rename(backend / "model.py")
    config = (model / "config.pbtxt").read_text()
    (model / "config.pbtxt").write_text(config.replace('"python"', '"mine"'))
    archive = pack(backend / "pb_exec_env_model.py.tar.gz", borrowing_environment())
    with place.serve(f"--backend-directory={place.folder / 'backends'}") as server:
        root = place.cache / digest(archive) / "environment"
        assert server.ask(WHERE) == (200, str(root))


def test_a_cache_that_others_can_write_to_is_refused(place):
    place.cache.mkdir()
    place.cache.chmod(0o777)
    archive = pack(place.folder / "e.tar.gz", borrowing_environment())
    write_code_model(place.models, config=environment_parameter(archive))
    with place.serve("--exit-on-error=false", ready=False) as server:
        wait_until(lambda: ("m", 1) in server.index(), "the model", server)
        wait_until(lambda: server.index()["m", 1]["state"] == "UNAVAILABLE", "its end", server)
        assert "others may write to it (mode 777); name a dir" in server.index()["m", 1]["reason"]
