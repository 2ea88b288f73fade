"""The Python stack of a process that crashes."""

import subprocess
import sys

import pytest

SOURCE = """
import os, signal, sys
from gpubridge.stub.crash_report import report_crashes
report_crashes()
sys.stderr = None
os.close(2)
def execute():
    signal.raise_signal(signal.{})
execute()
"""


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGILL"])
def test_each_signal_of_a_crash_writes_the_stack_and_ends_the_process(name):
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(name)], stderr=subprocess.PIPE, check=False
    )
    assert done.returncode < 0
    assert b"Fatal Python error: " in done.stderr
    assert b'File "<string>", line 8 in execute' in done.stderr
