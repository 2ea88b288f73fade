"""Workers take each file once, the longest early, and always some that wait and some that compute."""

import re
from pathlib import Path

from tests.file_order import LONGEST, PYTORCH, spread

TESTS = Path(__file__).parents[1]


def test_the_longest_are_early_and_both_kinds_run_all_the_time():
    paths = sorted(TESTS.rglob("test_*.py"))
    longest = [TESTS / name for name in LONGEST]
    order = spread([*paths, *paths])
    assert sorted(order) == paths
    assert not set(longest) - set(order[: len(order) // 2])
    assert [path for path in order if path in longest] == longest
    tenth = len(order) // 10
    for begin in range(0, len(order) - tenth, tenth):
        waiting = [TESTS / "process" in path.parents for path in order[begin : begin + tenth]]
        assert 0.1 < sum(waiting) / tenth < 0.6


def test_files_that_import_pytorch_are_known():
    imports = re.compile(r'^ +(import torch$|.*importorskip\("torch"\))', re.MULTILINE)
    folders = ("process", "unit")
    found = [path for name in folders for path in (TESTS / name).rglob("test_*.py")]
    found = [str(path.relative_to(TESTS)) for path in found if imports.search(path.read_text())]
    assert sorted(found) == sorted(PYTORCH)
