"""Figures of zero-copy, sizes as people write them, and an nvidia-smi with odd output."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest

from gpubridge.bench.device_requests import PATHS
from gpubridge.bench.measurement import Measured, Point, read_sizes, size_text
from gpubridge.bench.pcie_meter import PcieMeter, PcieRate, gpu_memory_of, open_pcie_meter
from gpubridge.bench.report import draw, judge, table
from gpubridge.cuda_ipc import DeviceInfo

MIB = 1 << 20
HAND_ON, PLACE, CHAIN, HOST = PATHS
NOTHING = {"host": 0, "h2d": 0, "d2h": 0, "p2p": 0, "d2d": 0}
QUIET = PcieRate(0.0, 0.0)


def point(path=HAND_ON, *, pcie=QUIET, nbytes=64 * MIB, requests=1000, **copied):
    return Point(path, nbytes, requests, 1.0, 100.0, 200.0, {**NOTHING, **copied}, pcie, 600)


def measured(*points, no_pcie=""):
    host = point(HOST, pcie=PcieRate(32e9, 32e9), h2d=1, d2h=1)
    device = DeviceInfo(0, "GPU-1", "Some GPU", 1 << 30)
    return Measured(device, QUIET, [*points, host], no_pcie, "")


def test_quiet_paths_hold():
    moved = 64 * MIB * 1000
    verdict = judge(measured(point(d2d=moved), point(PLACE), point(CHAIN, d2d=2 * moved)))
    assert verdict.holds
    assert verdict.doubts == []
    assert "nothing on PCIe beyond commands" in verdict.text()


@pytest.mark.parametrize("kind", ["host", "h2d", "d2h", "p2p"])
def test_a_single_byte_that_the_bridge_moves_over_the_host_is_a_failure(kind):
    (failure,) = judge(measured(point(**{kind: 1}))).failures
    assert f"the bridge copied 1 bytes {kind}, expected none" in failure


def test_one_copy_too_many_on_the_device_is_a_failure():
    (failure,) = judge(measured(point(PLACE, d2d=64 * MIB))).failures
    assert "expected at most 0 (0 times the tensor)" in failure


def test_half_of_the_bytes_over_pcie_is_a_failure_and_commands_are_none():
    crossing = point(pcie=PcieRate(64e9, 0.0))
    (failure,) = judge(measured(crossing)).failures
    assert "PCIe saw 6.4e+10 bytes above idle" in failure
    assert judge(measured(point(pcie=PcieRate(16e6, 1e6), nbytes=65536))).holds


def test_a_meter_that_does_not_see_the_host_path_proves_nothing():
    found = measured(point())
    blind = replace(found, points=[point(), point(HOST, pcie=QUIET)])
    verdict = judge(blind)
    assert verdict.holds
    assert "saw 0% of what the host path moved" in verdict.doubts[0]
    assert "not confirmed by PCIe's" in verdict.text()


def test_no_meter_is_a_doubt():
    verdict = judge(measured(point(pcie=None), no_pcie="there is none"))
    assert (verdict.holds, verdict.doubts) == (True, ["PCIe was not watched: there is none"])


def test_the_table_is_of_one_request():
    text = table(measured(point(d2d=64 * MIB * 1000, pcie=PcieRate(5e6, 0.0))))
    (line,) = [line for line in text.splitlines() if line.startswith(HAND_ON.title)]
    words = line.removeprefix(HAND_ON.title).split()
    assert " ".join(words) == "64 MiB 1000 100 200 128 MiB 0 0 0 64 MiB 4.88 KiB 0 600"


def test_a_picture_without_matplotlib_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    target = tmp_path / "picture.png"
    assert "pip install matplotlib" in draw(measured(), judge(measured()), target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4", (4,)), ("64KiB, 1MiB,2GiB", (65536, MIB, 2 << 30)), ("1 MiB", (MIB,))],
)
def test_sizes_are_read(text, sizes):
    assert read_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1MB", "6", "-4", "1MiB,", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected sizes such as"):
        read_sizes(text)


def test_sizes_are_written_as_they_are_read():
    assert [size_text(n) for n in (4, 65536, MIB, 3 << 30)] == ["4 B", "64 KiB", "1 MiB", "3 GiB"]


def smi(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_columns_are_found_by_their_names(tmp_path, monkeypatch):
    smi(
        tmp_path,
        monkeypatch,
        'echo "#gpu  new  txpci  rxpci"; echo "# Idx  C  MB/s  MB/s"; echo "0 9 3 12"; sleep 60',
    )
    began = time.monotonic() - 2
    meter = open_pcie_meter("GPU-1")
    assert isinstance(meter, PcieMeter)
    with meter:
        assert meter.rate(began, time.monotonic()) == PcieRate(12e6, 3e6)
        assert meter.rate(time.monotonic(), time.monotonic() + 5) is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Not supported on the device(s)'", "Not supported on the device"),
        ("exit 0", "it ended and said nothing"),
        ("echo '# gpu sm'; echo '0 5'; sleep 60", "does not tell PCIe rates: 0 5"),
    ],
)
def test_a_nvidia_smi_without_rates_is_a_reason(tmp_path, monkeypatch, script, reason):
    smi(tmp_path, monkeypatch, script)
    found = open_pcie_meter("GPU-1")
    assert isinstance(found, str)
    assert reason in found


def test_memory_is_that_of_the_processes_asked_for(tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, 'printf "7, 100\\n7, 20\\n8, 300\\n9, [N/A]\\n"')
    assert gpu_memory_of([7, 9]) == {7: 120}
    assert "as in a container" in gpu_memory_of([5])
