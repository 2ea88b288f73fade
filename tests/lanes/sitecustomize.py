"""Begins the lanes of a process: what an interpreter imports at its start, with this folder on its path."""

import gc
import os
import sys

VARIABLE = "GPUBRIDGE_TEST_LANES"
GC, SWITCH = "gc", "switch"
LANES = {
    GC: "garbage is collected each few hundred allocations",
    SWITCH: "threads switch every microsecond",
}
_ALLOCATIONS = 300
_SECONDS = 1e-6


def begin():
    """Begin the lanes that a variable of the environment names."""
    lanes = os.environ.get(VARIABLE, "").split(",")
    if GC in lanes:
        _freeze = gc.freeze

        def freeze():
            # The collector then searches all generations after few new objects, not after a quarter more.
            _freeze()
            gc.collect()

        gc.freeze = freeze
        gc.set_threshold(_ALLOCATIONS, 1, 1)
    if SWITCH in lanes:
        sys.setswitchinterval(_SECONDS)


if __name__ == "sitecustomize":
    begin()
