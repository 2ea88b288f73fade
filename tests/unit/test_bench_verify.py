"""The verdict on zero copies by the GPU's figures alone, and who lies to it."""

import json
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from gpubridge.bench.dmon_log import read_dmon_log
from gpubridge.bench.verify import main

START = 1_700_000_000.0
MIB = 1 << 20
REQUESTS = 1000
ROW = 6
PATHS = ("hand_on", "place", "chain", "host")
HEADING = "#Date       Time        gpu     sm  rxpci  txpci\n#YYYYMMDD   HH:MM:SS    Idx      %   MB/s   MB/s\n"


def time(seconds):
    return datetime.fromtimestamp(START + seconds, timezone.utc).isoformat()


class Run:
    """A measurement of 64 MiB by an honest bridge, as its parts: each test tells a lie in one of them."""

    def __init__(self):
        self.spans = {path: (10.0 + 10 * k, 10.0 + 10 * k + ROW) for k, path in enumerate(PATHS)}
        self.nbytes = dict.fromkeys(PATHS, 64 * MIB)
        self.requests = dict.fromkeys(PATHS, REQUESTS)
        # Bytes per second each way, as the counters and as dmon see them.
        rate = REQUESTS * 64 * MIB / ROW
        self.counted = {**dict.fromkeys(PATHS, (1e6, 1e6)), "host": (rate, rate)}
        self.sampled = dict(self.counted)
        self.has_log, self.has_counters, self.gpu = True, True, 0

    def rate(self, rates, moment):
        within = [p for p, (began, ended) in self.spans.items() if began <= moment < ended]
        return rates[within[0]] if within else (0.0, 0.0)

    def log(self):
        lines = []
        for second in range(60):
            received, sent = (round(each / 1e6) for each in self.rate(self.sampled, second - 0.02))
            at = datetime.fromtimestamp(START + second, timezone.utc)
            for gpu in (0, 1):
                shown = (received, sent) if gpu == self.gpu else (0, 0)
                lines.append(
                    f" {at:%Y%m%d   %H:%M:%S}      {gpu}      5  {shown[0]}  {shown[1]}\r\n"
                )
        return HEADING + "".join(lines) + " 2023"

    def counters(self):
        received, sent, lines = (1 << 32) - 5000, 17, []
        for tick in range(6000):
            at = tick / 100
            lines.append(f"{START + at:.4f} {START + at:.4f} {received} {sent}")
            rate = self.rate(self.counted, at)
            received, sent = (
                (n + int(r / 100)) % (1 << 32) for n, r in zip((received, sent), rate, strict=True)
            )
        return {"bits": 32, "link_bytes_per_second": 63e9, "readings": lines}

    def row(self, path):
        began, ended = self.spans[path]
        return {
            "title": path,
            "stays": path != "host",
            "bytes": self.nbytes[path],
            "requests": self.requests[path],
            "began": time(began),
            "ended": time(ended),
            "p50_us": 1e6 * ROW / REQUESTS,
            # What the bridge says is not believed.
            "copied_bytes": {"h2d": 10**12},
            "pcie_bytes": 10**12,
        }

    def verdict(self, folder):
        """Return the exit status and the verdict."""
        document = {
            "rows": [self.row(path) for path in self.spans],
            "pcie_idle_began": time(1),
            "pcie_idle_ended": time(2),
            "nvidia_smi_index": 0,
            "counters": self.counters() if self.has_counters else None,
            "holds": True,
        }
        (folder / "zero_copy.json").write_text(json.dumps(document))
        if self.has_log:
            (folder / "dmon.log").write_text(self.log())
        status = main([str(folder)])
        found = json.loads((folder / "verdict.json").read_text())
        return SimpleNamespace(
            status=status, holds=found["holds"], said="\n".join(found["findings"])
        )


@pytest.fixture
def run():
    return Run()


@pytest.mark.parametrize(
    ("counters", "log", "by"),
    [(True, True, "counters and dmon"), (True, False, "counters"), (False, True, "dmon")],
)
def test_an_honest_bridge_is_confirmed_by_what_there_is(run, tmp_path, capsys, counters, log, by):
    run.has_counters, run.has_log = counters, log
    found = run.verdict(tmp_path)
    assert (found.status, found.holds) == (0, True), found.said
    assert f"64 MiB: confirmed by {by}" in found.said
    host = next(line for line in found.said.splitlines() if "host" in line)
    assert "received 6.7" in host
    assert "bytes (100" in host or "bytes (99" in host
    assert "verdict: zero-copy: confirmed" in capsys.readouterr().out


def test_copies_that_the_counters_are_silent_about_are_seen_by_the_log(run, tmp_path):
    run.sampled["chain"] = (0.0, run.sampled["host"][1])
    found = run.verdict(tmp_path)
    assert (found.status, found.holds) == (1, False)
    assert "64 MiB, chain: dmon received" in found.said.splitlines()[0]


def test_copies_that_the_log_is_silent_about_are_seen_by_the_counters(run, tmp_path):
    run.counted["place"] = (run.counted["host"][0] / 10, 0.0)
    found = run.verdict(tmp_path)
    assert found.status == 1
    assert "64 MiB, place: counters received" in found.said.splitlines()[0]


@pytest.mark.parametrize("share", [0.0, 0.2, 4.5])
def test_a_meter_that_does_not_see_the_control_says_nothing(run, tmp_path, share):
    run.has_counters = False
    run.sampled["host"] = tuple(share * rate for rate in run.sampled["host"])
    run.sampled["place"] = run.counted["host"]
    found = run.verdict(tmp_path)
    assert (found.status, found.holds) == (2, None)
    assert "no meter saw 25% to 400% of what the host path moved" in found.said


def test_a_control_that_is_seen_in_one_direction_only_is_none(run, tmp_path):
    run.has_counters = False
    run.sampled["host"] = (2 * run.sampled["host"][0], 0.0)
    assert run.verdict(tmp_path).holds is None


def test_a_log_of_another_gpu_confirms_nothing(run, tmp_path):
    run.has_counters, run.gpu = False, 1
    assert run.verdict(tmp_path).holds is None


def test_a_log_of_another_time_confirms_nothing(run, tmp_path):
    run.has_counters = False
    run.spans = {path: (began + 600, ended + 600) for path, (began, ended) in run.spans.items()}
    found = run.verdict(tmp_path)
    assert found.holds is None
    assert "0 samples, expected at least 2" in found.said


def test_more_requests_than_fit_are_no_excuse_for_traffic(run, tmp_path):
    run.requests["place"] = 100 * REQUESTS
    found = run.verdict(tmp_path)
    assert found.status == 1
    assert "100000 requests of 6000 µs do not fit into 6.00 s" in found.said


def test_counters_that_may_have_wrapped_unnoticed_say_nothing(run, tmp_path, monkeypatch):
    run.has_log = False
    counters = run.counters()
    counters["readings"] = counters["readings"][::20]
    monkeypatch.setattr(run, "counters", lambda: counters)
    found = run.verdict(tmp_path)
    assert found.holds is None
    assert "counters of 32 bits may wrap" in found.said


@pytest.mark.parametrize("rows", [("hand_on", "place", "chain"), ("host",), ()])
def test_an_interrupted_run_confirms_no_size_that_is_not_whole(run, tmp_path, rows):
    run.spans = {path: run.spans[path] for path in rows}
    found = run.verdict(tmp_path)
    assert (found.status, found.holds) == (2, None), found.said


def test_data_that_could_pass_for_commands_is_not_confirmed(run, tmp_path):
    run.nbytes = dict.fromkeys(PATHS, 16 << 10)
    rate = REQUESTS * (16 << 10) / ROW
    run.counted = {**dict.fromkeys(PATHS, (rate, rate)), "host": (2 * rate, 2 * rate)}
    run.sampled = dict(run.counted)
    found = run.verdict(tmp_path)
    assert (found.status, found.holds) == (2, None)
    assert "tells data from commands" in found.said


def test_one_size_confirms_nothing_of_another(run, tmp_path):
    run.nbytes["place"] = MIB
    found = run.verdict(tmp_path)
    assert found.holds is None
    assert "1 MiB: the host path, the control, was not measured" in found.said
    assert "64 MiB: confirmed" in found.said


@pytest.mark.parametrize("written", [None, "{", "{}"])
def test_a_folder_without_a_measurement_is_refused(tmp_path, capsys, written):
    if written is not None:
        (tmp_path / "zero_copy.json").write_text(written)
    assert main([str(tmp_path)]) == 2
    assert "expected zero_copy.json of gpubridge bench zero-copy" in capsys.readouterr().err


def test_lines_without_rates_are_left_out():
    lines = "20231114 22:13:20 0 5 7 9\n20231114 22:13:21 0 - - -\n\n20231114 22:13:2"
    assert read_dmon_log(HEADING + lines, 0) == [(START, 7e6, 9e6)]
    assert read_dmon_log("nvidia-smi is not there", 0) == []
