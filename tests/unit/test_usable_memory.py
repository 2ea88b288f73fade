"""The limits of memory follow what the server's container has."""

import os

import pytest

from gpubridge.host_shm.usable_memory import usable_memory
from tests.unit.server_settings import server_settings

MIB = 1 << 20
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = "0::/pods/one\n"
V1 = "5:cpu:/\n4:hugetlb,memory:/docker/one\n0::/docker/one\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"pods/one/memory.max": "max", "pods/memory.max": "104857600"}, 100 * MIB),
        (V2, {"pods/one/memory.max": "5242880", "pods/memory.max": "104857600"}, 5 * MIB),
        # A container sees its own group as the root of all.
        ("0::/\n", {"memory.max": "5242880"}, 5 * MIB),
        (V1, {"memory/docker/one/memory.limit_in_bytes": "5242880"}, 5 * MIB),
        (V1, {"memory/memory.limit_in_bytes": "5242880"}, 5 * MIB),
        (V1, {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE),
        (V2, {}, MACHINE),
        (None, {}, MACHINE),
    ],
)
def test_is_the_lowest_limit_of_all_groups(tmp_path, groups, files, expected):
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_memory(tmp_path / "cgroup", tmp_path) == expected


def limits(memory):
    return memory.request_arena_limit, memory.output_arena_limit, memory.response_store_limit


def test_limits_that_nobody_gave_are_parts_of_little_memory():
    memory = server_settings().memory
    assert limits(memory.within(160 * MIB)) == (40 * MIB, 40 * MIB, 10 * MIB)
    assert memory.within(4096 * MIB) == memory
    given = server_settings({"memory.request_arena_limit": 100 * MIB}).memory
    assert limits(given.within(160 * MIB)) == (100 * MIB, 40 * MIB, 10 * MIB)
