"""``gpubridge bench``: figures that a user can take on his own machine."""

from gpubridge.bench.command import add_bench_commands

__all__ = ["add_bench_commands"]
