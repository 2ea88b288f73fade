"""Lanes: the tests of coroutines and calls, while garbage is collected or threads switch all the time.

``--gc-often`` has the collector search each few hundred allocations, so that what waits and is held by
nobody is lost; ``--switch-often`` has threads switch every microsecond. Both also reach the servers and
stubs that tests start: `tests/lanes/sitecustomize.py`. Each runs `FILES` alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.lanes import sitecustomize

__all__ = ["FILES", "add_options", "begin", "select"]

FILES = (
    "process/test_bls.py",
    "process/test_bls_memory.py",
    "process/test_decoupled.py",
    "process/test_ensemble_decoupled.py",
    "process/test_every_call.py",
    "process/test_hang_ups.py",
    "process/test_one_file.py",
    "process/test_openai.py",
    "process/test_openai_client.py",
    "process/test_rescheduling.py",
    "unit/test_bls_records.py",
    "unit/test_call_channel.py",
    "unit/test_cancelled_batches.py",
    "unit/test_pb_utils_request_response.py",
    "unit/test_response_credit.py",
    "unit/test_response_sender.py",
    "unit/test_stub_call_histories.py",
    "unit/test_stub_calls.py",
    "unit/test_stub_calls_held.py",
    "unit/test_stub_coroutines.py",
)
_LANES = {"--gc-often": sitecustomize.GC, "--switch-often": sitecustomize.SWITCH}
_TESTS = Path(__file__).parent.parent


def add_options(parser) -> None:
    """Add the option of each lane."""
    for option, lane in _LANES.items():
        parser.addoption(
            option,
            action="store_true",
            help=f"only tests of coroutines and calls, while {sitecustomize.LANES[lane]}",
        )


def begin(config) -> None:
    """Begin the lanes that are asked for: here, and in each process that tests start."""
    lanes = [lane for option, lane in _LANES.items() if config.getoption(option)]
    if not lanes:
        return
    os.environ[sitecustomize.VARIABLE] = ",".join(lanes)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sitecustomize.begin()


def select(config, items) -> None:
    """Leave out the tests of other files, if there is a lane."""
    if any(map(config.getoption, _LANES)):
        files = {_TESTS / name for name in FILES}
        left_out = [item for item in items if item.path not in files]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.path in files]
