"""Packed environments, unpacked by processes: begun anew, at the same time, refused with the reason."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpubridge.engine.environments.provider import PARAMETER, ModelEnvironments
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError
from tests.process.environments import borrowing_environment, pack

PYTHON = '#!/bin/sh\nexec "$(dirname "$0")/python3" "$@"\n'


def roots(folder, *archives, backend_file=None):
    """Return where the models' environments are, or the texts of errors; all are asked for at once."""

    async def work():
        environments = ModelEnvironments(folder / "cache", 100_000, LoadThreads())
        configs = [
            SimpleNamespace(
                name="m",
                backend_file=backend_file,
                parameters={PARAMETER: str(path)} if path else {},
            )
            for path in archives
        ]
        found = await asyncio.gather(
            *(environments.of_model(folder, config) for config in configs), return_exceptions=True
        )
        await environments.close()
        return [each.message if isinstance(each, BridgeError) else each.root for each in found]

    return asyncio.run(work())


def entries(folder):
    return sorted(path for path in (folder / "cache").glob("?" * 64) if path.is_dir())


def test_an_interrupted_unpacking_starts_over(tmp_path):
    archive = pack(tmp_path / "e.tar.gz", borrowing_environment())
    (root,) = roots(tmp_path, archive)
    (root.parent / "complete").unlink()
    orphan = tmp_path / "cache" / ("0" * 64)
    for entry in (root.parent, orphan):
        (entry / "environment").mkdir(parents=True, exist_ok=True)
        (entry / "environment" / "half").touch()
        entry.with_name(entry.name + ".lock").touch()
    assert roots(tmp_path, archive) == [root]
    assert [path.name for path in root.iterdir()] == ["bin"]
    assert entries(tmp_path) == [root.parent]


def test_several_are_unpacked_at_the_same_time(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one at a time on one processor")
    # Each waits for the other: to open a pipe takes two.
    pipes = [str(tmp_path / name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)
    archives = []
    for name, modes in (("a", "rw"), ("b", "wr")):
        script = f"for way in {list(zip(pipes, modes, strict=True))}: open(*way).close()"
        script += "; open(__file__ + '.ran', 'w').close()"
        files = borrowing_environment(python=PYTHON, conda_unpack=script)
        archives.append(pack(tmp_path / f"{name}.tar.gz", files))
    # It is run where the environment is.
    assert all((root / "bin" / "conda-unpack.ran").exists() for root in roots(tmp_path, *archives))


def test_a_backend_may_bring_a_packed_environment(tmp_path):
    archive = pack(tmp_path / "pb_exec_env_model.py.tar.gz", borrowing_environment())
    found = roots(tmp_path, None, archive, backend_file=tmp_path / "model.py")
    assert found == [entries(tmp_path)[0] / "environment"] * 2


def bad_archives(folder):
    """Paths of archives that cannot be used, each with what is to be said of it."""
    (folder / "text.tar.gz").write_bytes(b"text")
    os.mkfifo(folder / "pipe")
    failing = borrowing_environment(
        python="#!/bin/sh\necho no prefix >&2; exit 3\n", conda_unpack=""
    )
    nested = {"mine/bin/python3": b""}
    large = {"bin/python3": bytes(200_000)}
    return {
        folder / "no.tar.gz": "no.tar.gz does not exist. The Python environment should",
        folder / "text.tar.gz": "is no archive: expected a tar archive, packed with",
        folder / "pipe": "is neither a directory nor a file",
        Path("good.tar.gz"): "Failed to get the canonical path for good.tar.gz.",
        pack(
            folder / "failing.tar.gz", failing
        ): "its bin/conda-unpack failed: it ended with code 3: no p",
        pack(folder / "nested.tar.gz", nested): (
            "holds no bin/python3: expected a virtual environment (venv, uv or conda),"
        ),
        pack(folder / "large.tar.gz", large): (
            "expected at most 100000 bytes in all, got 0 and 200000 more; raise"
        ),
    }


def test_an_archive_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    cases = bad_archives(tmp_path)
    found = dict(zip(cases, roots(tmp_path, *cases), strict=True))
    assert {path: found[path] for path, text in cases.items() if text not in found[path]} == {}
    # That one was unpacked: it is what is in it that cannot be used.
    (entry,) = entries(tmp_path)
    assert (entry / "environment" / "mine").is_dir()
