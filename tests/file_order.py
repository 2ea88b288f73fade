"""The order in which workers take files, so that none is alone with a long one at the end. A plugin of pytest.

Tests of processes wait most of their time, others compute: workers take both kinds all the time, and begin
early what takes longest. One worker takes all files that import PyTorch, which takes seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

__all__ = ["LONGEST", "PYTORCH", "spread"]

_TESTS = Path(__file__).parent
_WAITING = _TESTS / "process"

LONGEST = (
    "process/test_dead_mounts.py",
    "process/test_fork_servers.py",
    "process/test_orphans.py",
    "unit/test_cuda_device_check.py",
    "process/test_examples.py",
    "process/test_one_file.py",
    "process/test_connection_limits.py",
    "process/test_device_images.py",
    "process/test_ensembles.py",
    "process/test_supervision.py",
    "codebase/test_docs.py",
    "process/test_lifecycle.py",
    "process/test_model_control.py",
    "process/test_packed_environments.py",
    "process/test_run.py",
    "process/test_status.py",
    "process/test_bls.py",
    "process/test_tls.py",
    "unit/test_model_types.py",
)
"""Files that take 8 seconds or more, the longest first."""
PYTORCH = (
    "process/test_backends.py",
    "unit/test_backend_pytorch.py",
    "unit/test_empty_tensors.py",
    "unit/test_leases.py",
    "unit/test_pb_utils_tensor.py",
    "unit/test_tensor_dlpack.py",
    "unit/test_tensor_dlpack_export.py",
)
"""Files whose tests import PyTorch themselves."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Return a scheduler that gives each file, and those of `PYTORCH` together, to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "pytorch" if file.removeprefix("tests/") in PYTORCH else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Order the files of a worker; those of one process stay as they are."""
    if hasattr(config, "workerinput"):
        places = {path: place for place, path in enumerate(spread(item.path for item in items))}
        items.sort(key=lambda item: places[item.path])


def spread(paths: Iterable[Path]) -> Sequence[Path]:
    """Return each path once: the longest within the first half, files that wait and others evenly."""
    files = dict.fromkeys(paths)
    longest = [path for name in LONGEST if (path := _TESTS / name) in files]
    others = [path for path in files if path not in longest]
    waiting = [path for path in others if _WAITING in path.parents]
    computing = [path for path in others if _WAITING not in path.parents]
    placed = [*_placed(longest, 0.5), *_placed(waiting), *_placed(computing)]
    return [path for _, path in sorted(placed, key=lambda each: each[0])]


def _placed(files: Sequence[Path], end: float = 1.0) -> Iterator[tuple[float, Path]]:
    return ((end * number / len(files), path) for number, path in enumerate(files))
