"""Models in packed environments: unpacked once, kept, shared, begun anew, refused with the reason."""

import hashlib
import json
import shutil
import signal
from pathlib import Path

import pytest

from gpubridge.engine.environments.store import EnvironmentStore
from tests.process.controlled import only
from tests.process.environments import (
    borrowing_environment,
    environment_parameter,
    other_minors,
    pack,
    shared_environment,
)
from tests.process.server import (
    alive,
    descendants,
    is_fork_server,
    running_server,
    wait_until,
    write_code_model,
)

WHERE = "self.said = os.environ['VIRTUAL_ENV']"
UNPACKED = "is unpacked after"


class Place:
    """A folder with a repository, a cache, and the flag that names it."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.models = folder / "models"
        self.cache = cache

    def serve(self, *flags, **options):
        settings = (
            f"environment-cache={self.cache}",
            "environment-limit-bytes=1000000",
            "module-build-seconds=0",
        )
        config = [f"--backend-config=python,{setting}" for setting in settings]
        more = "--disable-auto-complete-config"
        return running_server(self.models, *config, more, *flags, **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("environments") / "cache"


@pytest.fixture
def place(tmp_path, cache):
    """A place whose cache others have used: their servers have the same flags."""
    return Place(tmp_path, cache)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_packed_environment_of_another_python_runs_the_model(place):
    folders = (shared_environment(minor) for minor in other_minors())
    folder = next(filter(None, folders), None)
    if folder is None:
        pytest.skip("no other Python from 3.9 on is on PATH")
    config = environment_parameter("$$TRITON_MODEL_DIRECTORY/environment.tar.gz")
    model = write_code_model(place.models, config=config)
    # Its large packages lie where they were made.
    own = place.folder / "own"
    ignored = shutil.ignore_patterns("site-packages")
    shutil.copytree(folder, own, symlinks=True, ignore=ignored)
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    (own / packages.relative_to(folder)).mkdir()
    (own / packages.relative_to(folder) / "borrowed.pth").write_text(str(packages))
    archive = pack(model / "environment.tar.gz", own)
    with place.serve() as server:
        code = "import json; self.said = json.dumps([sys.version_info[1], sys.prefix, np.__file__])"
        minor, prefix, numpy = json.loads(server.ask(code)[1])
        assert minor in other_minors()
        assert prefix == str(place.cache / digest(archive) / "environment")
        assert numpy.startswith(str(packages))
        assert server.log().count(UNPACKED) == 1
        assert server.log().count("Extracting Python execution env") == 1


def test_one_content_is_unpacked_once_for_all_models_servers_and_starts(place):
    one = pack(place.folder / "one.tar.gz", borrowing_environment(other=""))
    two = place.folder / "two.tar.gz"
    two.write_bytes(one.read_bytes())
    for name, path in {"a": one, "b": two}.items():
        write_code_model(place.models, name, config=environment_parameter(path))
    root = place.cache / digest(one) / "environment"
    with place.serve() as first, place.serve(*only("a"), own=True) as second:
        assert {server.ask(WHERE, "a") for server in (first, second)} == {(200, str(root))}
        assert first.ask(WHERE, "b") == (200, str(root))
        logs = [first.log(), second.log()]
    assert [log.count(UNPACKED) for log in logs] == [1, 0]
    assert place.cache.stat().st_mode & 0o777 == 0o700


def test_other_content_of_the_same_file_is_another_environment(place):
    archive = pack(place.folder / "e.tar.gz", borrowing_environment())
    model = write_code_model(place.models, config=environment_parameter(archive))
    with place.serve("--model-control-mode=explicit", "--load-model=m") as server:
        before = server.ask(WHERE)[1]
        pack(archive, borrowing_environment(more="more"))
        (model / "1" / "model.py").touch()
        assert server.request("POST", "/v2/repository/models/m/load")[0] == 200
        after = server.ask(WHERE)[1]
        assert before != after == str(place.cache / digest(archive) / "environment")
        assert [path.name for path in (Path(before) / "bin").iterdir()] == ["python3"]
        # The next stub finds it again when someone has deleted it meanwhile.
        shutil.rmtree(Path(after).parent)
        assert server.ask("os._exit(3)")[0] == 503
        wait_until(lambda: server.ask(WHERE) == (200, after), "another stub to start", server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_unpacking_ends_with_its_server_and_holds_up_no_other_model(place, number):
    mark = place.folder / "mark"
    script = f"import signal; open({str(mark)!r}, 'w').close(); signal.pause()"
    python = '#!/bin/sh\nexec "$(dirname "$0")/python3" "$@"\n'
    archive = pack(
        place.folder / "e.tar.gz", borrowing_environment(python=python, conda_unpack=script)
    )
    write_code_model(place.models, config=environment_parameter(archive))
    write_code_model(place.models, "other")
    with place.serve(ready=False) as server:
        wait_until(mark.exists, "the unpacking", server)
        wait_until(lambda: server.is_ready("other"), "the other model", server)
        assert server.ask("self.said = 'yes'", "other") == (200, "yes")
        working = descendants(server.pid)
        # What unpacks, its child, and the other model.
        assert [is_fork_server(pid) for pid in working].count(False) == 3
        assert server.stop(number) == (0 if number == signal.SIGTERM else -number)
        assert "Traceback" not in server.log()
    for pid in working:
        wait_until(lambda pid=pid: not alive(pid), "the end of what unpacks")
    entry = place.cache / digest(archive)
    assert entry.exists() == (number == signal.SIGKILL)
    # What a killed server has left goes when the next content is unpacked.
    EnvironmentStore(place.cache).remove_orphans()
    assert not entry.exists()


def test_loads_that_fail_leave_no_descriptor(place):
    (place.folder / "text.tar.gz").write_text("text")
    (place.folder / "empty").mkdir()
    large = pack(place.folder / "large", {"bin/python3": bytes(2_000_000)})
    names = ("text.tar.gz", "empty", "nothing", large.name)
    for name in names:
        config = environment_parameter(place.folder / name)
        batching = "max_batch_size: 2 dynamic_batching {}"
        write_code_model(place.models, name, config=config + batching)
    with place.serve("--model-control-mode=explicit") as server:

        def load():
            answers = [server.request("POST", f"/v2/repository/models/{n}/load") for n in names]
            assert [status for status, _, _ in answers] == [400] * 4
            assert b"expected at most 1000000 bytes" in answers[-1][2]

        def count():
            return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

        load()
        before = count()
        for _ in range(2):
            load()
        wait_until(lambda: count() <= before, "the descriptors", server)
