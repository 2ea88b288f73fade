"""Figures of zero-copy, sizes as people write them, and an nvidia-smi with odd output."""

import json
import sys
import time
from dataclasses import replace

import pytest

from gpubridge import cli
from gpubridge.bench.device_requests import PATHS
from gpubridge.bench.dmon_meter import DmonMeter, PcieRate, open_dmon_meter
from gpubridge.bench.measurement import Measured, Point, read_sizes, size_text
from gpubridge.bench.nvml import NotCounted, PcieCounters
from gpubridge.bench.pcie_meter import ByteCounts, Reading, open_pcie_meter
from gpubridge.bench.processes import processes_on
from gpubridge.bench.report import draw, judge, table
from gpubridge.cli import bench as command
from gpubridge.cuda_ipc import DeviceInfo

MIB = 1 << 20
HAND_ON, PLACE, CHAIN, HOST = PATHS
NOTHING = {"host": 0, "h2d": 0, "d2h": 0, "p2p": 0, "d2d": 0}
QUIET = PcieRate(0.0, 0.0)


def point(path=HAND_ON, *, pcie=QUIET, nbytes=64 * MIB, requests=1000, **copied):
    return Point(
        path,
        nbytes,
        requests,
        0.0,
        1.0,
        100.0,
        200.0,
        {**NOTHING, **copied},
        600,
        pcie,
        "no reading",
    )


def measured(*points, no_pcie="", others=()):
    host = point(HOST, pcie=PcieRate(32e9, 32e9), h2d=1, d2h=1)
    device = DeviceInfo(0, "GPU-1", "Some GPU", 1 << 30)
    return Measured(device, QUIET, [*points, host], no_pcie, "", others)


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


def test_traffic_of_other_processes_is_no_failure():
    verdict = judge(measured(point(pcie=PcieRate(64e9, 0.0)), others=[17, 4]))
    assert verdict.holds
    assert "theirs, too: 17, 4" in verdict.doubts[0]
    assert "PCIe saw 6.4e+10 bytes above idle" in verdict.doubts[1]
    assert not judge(measured(point(h2d=1), others=[17])).holds


@pytest.mark.parametrize(
    ("seen", "said"), [(0.0, "saw 0% of"), (14e9, "saw 10% of"), (1e12, "saw 745% of")]
)
def test_each_size_has_its_control(seen, said):
    """One that is seen says nothing of the size beside it."""
    small = [point(nbytes=MIB), point(HOST, nbytes=MIB, pcie=PcieRate(1e9, 1e9))]
    found = measured(*small, point())
    blind = replace(found, points=[*small, point(), point(HOST, pcie=PcieRate(seen, 0.0))])
    verdict = judge(blind)
    assert verdict.holds
    (doubt,) = verdict.doubts
    assert doubt.startswith("at 64 MiB PCIe's meter")
    assert said in doubt
    assert "not confirmed by PCIe's" in verdict.text()


def test_the_smallest_size_is_commands():
    found = measured(point(nbytes=4), point(HOST, nbytes=4, pcie=PcieRate(4e6, 4e6)))
    assert judge(found).doubts == []


def test_a_row_without_a_figure_says_why():
    (doubt,) = judge(measured(point(pcie=None))).doubts
    assert doubt.endswith("64 MiB: no figure of PCIe's meter: no reading")


def test_no_meter_is_a_doubt():
    verdict = judge(measured(point(pcie=None), no_pcie="there is none"))
    assert (verdict.holds, verdict.doubts) == (True, ["PCIe was not watched: there is none"])


def test_an_interrupt_leaves_the_rows_before_it(tmp_path, monkeypatch, capsys):
    def measure(*_, keep, **__):
        keep(measured(point()))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_device", lambda: None)
    monkeypatch.setattr(command, "_measure", lambda *given: measure(keep=given[-1].keep))
    words = ["bench", "zero-copy", "--output", str(tmp_path)]
    assert cli.main(words) == 130
    told = capsys.readouterr()
    assert "interrupted" in told.err
    assert "verdict: zero-copy" in told.out
    written = json.loads((tmp_path / "zero_copy.json").read_text())
    assert [row["path"] for row in written["rows"]] == ["hand_on", "host"]


@pytest.mark.parametrize("text", ["hand_on,nowhere", ""])
def test_unknown_paths_are_refused(text, capsys):
    assert cli.main(["bench", "zero-copy", "--paths", text]) != 0
    assert "expected some of hand_on,place,chain,host" in capsys.readouterr().err


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
    ("text", "sizes"), [("4", (4,)), ("64KiB, 1MiB,2GiB", (65536, MIB, 2 << 30)), ("1 MiB", (MIB,))]
)
def test_sizes_are_read(text, sizes):
    assert read_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1MB", "6", "-4", "1MiB,", "0"])
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ValueError, match="expected sizes such as"):
        read_sizes(text)


def test_sizes_are_written_as_they_are_read():
    assert [size_text(n) for n in (4, 65536, MIB, 3 << 30)] == ["4 B", "64 KiB", "1 MiB", "3 GiB"]


def smi(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


LINES = 'echo "#gpu  new  txpci  rxpci"; echo "# Idx  C  MB/s  MB/s"; '


def test_columns_are_found_by_their_names(tmp_path, monkeypatch):
    smi(
        tmp_path,
        monkeypatch,
        LINES + 'for n in 1 2 3 4 5 6 7 8 9 10; do echo "0 9 3 12"; done; sleep 60',
    )
    began = time.monotonic() - 2
    meter = open_dmon_meter("GPU-1")
    assert isinstance(meter, DmonMeter)
    try:
        meter.wait_for(10, began, 60)
        assert meter.rate(began, time.monotonic()) == PcieRate(12e6, 3e6)
        now = time.monotonic()
        assert meter.rate(now, now + 5) == "nvidia-smi dmon gave 0 samples, expected at least 10"
    finally:
        meter.close()


def test_nine_samples_are_too_few(tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, LINES + 'for n in 1 2 3 4 5 6 7 8 9; do echo "0 9 3 12"; done; exit')
    began = time.monotonic() - 2
    meter = open_dmon_meter("GPU-1")
    try:
        meter.wait_for(10, began, 60)
        assert "9 samples, expected at least 10" in meter.rate(began, time.monotonic())
    finally:
        meter.close()


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


def test_processes_are_those_of_the_device(tmp_path, monkeypatch):
    script = 'test "$4" = GPU-1 || exit 9; printf "7, 100\\n7, 20\\n8, 300\\n9, [N/A]\\n"'
    smi(tmp_path, monkeypatch, script)
    assert processes_on("GPU-1") == {7: 120, 8: 300, 9: 0}
    assert "does not tell" in processes_on("GPU-2")


def test_a_part_of_a_gpu_has_no_meter(tmp_path, monkeypatch):
    """Nor is there another one: dmon tells of the whole GPU."""
    smi(tmp_path, monkeypatch, LINES + 'echo "0 9 3 12"; sleep 60')
    with pytest.raises(NotCounted) as refused:
        PcieCounters("MIG-1")
    assert refused.value.unmetered
    found = open_pcie_meter("MIG-1")
    assert isinstance(found, str)
    assert "a part of a GPU (MIG)" in found


def counts(*values, fastest=10e9, step=0.01):
    found = ByteCounts(fastest)
    for number, (received, sent) in enumerate(values):
        at = number * step
        found.add(Reading(at, at + step / 10, received, sent))
    return found


def test_a_counter_that_wraps_goes_on():
    top = 1 << 32
    found = counts((top - 30, 0), (top - 10, 5), (10, 10), (40, 15))
    assert found.bits == 32
    rate = found.rate(0, 1)
    assert (round(rate.received * 0.03), round(rate.sent * 0.03)) == (70, 15)


@pytest.mark.parametrize(
    ("values", "bits"),
    [([0, 5], 32), ([1 << 31, 3], 32), ([1 << 33, 1 << 34], 64), ([(1 << 40) - 5, 5], 40)],
)
def test_the_width_is_what_the_readings_show(values, bits):
    assert counts(*((value, 0) for value in values)).bits == bits


def test_readings_that_lie_too_far_apart_are_refused():
    """Counters of 32 bits wrap in 429 ms of this link."""
    values = [(0, 0), (100, 0)]
    assert isinstance(counts(*values, step=0.3).rate(0, 1), PcieRate)
    assert "429 ms" in counts(*values, step=0.5).rate(0, 1)
    wide = [(1 << 33, 0), (1 << 34, 0)]
    assert isinstance(counts(*wide, step=0.5).rate(0, 1), PcieRate)


def test_only_readings_within_a_row_count():
    found = counts((0, 0), (1000, 0), (1001, 0), (1003, 0), (9000, 0))
    assert round(found.rate(0.005, 0.035).received * 0.02) == 3
    assert "0 times" in found.rate(5, 6)
