"""Hooks for all tests: plugins, reports of any text, ``--fast``, a heap that is cheap to search, Ctrl-C."""

import gc
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests import (
    file_order,
    flaky,
    forks,
    hangs,
    lanes,
    plane,
    run_folder,
    run_report,
    server_starts,
)

# Thousands of inputs, which pytest would look at one by one.
collect_ignore = ["fuzz/native"]
_UNIT = Path(__file__).parent / "unit"


def pytest_configure(config):
    """Choose the number of random examples; start processes without threads for linear algebra; take Ctrl-C.

    Such a thread spins for milliseconds after the import of NumPy, in each of thousands of processes.
    Shells have Ctrl-C ignored by what they start in the background, and by its children.
    """
    report = run_report.RunReport()
    for plugin in (file_order, flaky, forks, hangs, plane, run_folder, report, server_starts):
        config.pluginmanager.register(plugin)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        # Where GPUs are tested it may be absent.
        from tests.random_examples import choose_profile

        choose_profile(config)
    lanes.begin(config)
    # A collection of garbage finds none while tests are collected, and searches ever more.
    gc.disable()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Each worker collects all tests, which takes three times as long without bytecode.
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """Add ``--fast`` and the lanes."""
    lanes.add_options(parser)
    parser.addoption(
        "--fast",
        action="store_true",
        help="unit tests without simulated GPUs and servers, with fewer random examples",
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let one worker compile a file that was not compiled yet, while others wait for it."""
    with ExitStack() as stack:
        if isinstance(collector, pytest.Module) and not _is_compiled(collector.path):
            name = "-".join(collector.path.parts[-3:])
            stack.enter_context(run_folder.locked(run_folder.path() / f"{name}.lock"))
        return (yield)


def _is_compiled(path: Path) -> bool:
    tag = f"{sys.implementation.cache_tag}-pytest-{pytest.__version__}"
    return (path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc").exists()


def pytest_ignore_collect(collection_path, config):
    """Leave out the folders of which ``--fast`` runs nothing."""
    beside = collection_path.parent == _UNIT.parent and collection_path.is_dir()
    return (config.getoption("--fast") and beside and collection_path != _UNIT) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what ``--fast`` or a lane does not run; let one worker find constants for examples first.

    It reads all files for them, for seconds, and the others what it has kept.
    """
    lanes.select(config, items)
    if config.getoption("--fast"):
        left_out = [item for item in items if not _is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_fast(item)]
    found = run_folder.path() / "constants"
    with run_folder.locked(found.with_suffix(".lock")):
        if not found.exists():
            result = yield
            found.touch()
            return result
    return (yield)


def _is_fast(item) -> bool:
    slow = item.get_closest_marker("slow") is not None or "machine" in item.fixturenames
    return _UNIT in item.path.parents and not slow


def pytest_collection_finish():
    """Keep thousands of tests and their modules from being searched by each collection of garbage."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_not_searched():
    """Keep what earlier tests imported and left from being searched by each collection of garbage of a file."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Stop the servers that tests shared, if there are any, once no worker has one."""
    if not hasattr(session.config, "workerinput") and (run_folder.path() / "servers").exists():
        from tests.process import server_pool

        server_pool.close_idle_servers()


def pytest_runtest_protocol(item, nextitem):
    """Send one report of a test that passes in a worker: to send and read three takes as long as most tests."""
    if not hasattr(item.config, "workerinput"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    passed = all(report.passed for report in reports)
    for report in reports:
        if report.when == "call" or not passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Send no keywords, which nobody reads; escape lone surrogates: tests of bad texts have them in their logs."""
    report = yield
    if report:
        report["keywords"] = {}
    return _escaped(report)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_escaped(item) for item in value)
    return value
