"""Lines of the log: what clients and models say in them stays text."""

import logging

import pytest

from gpubridge.telemetry.logs import LogSettings, ServerLog, log_from_stub


@pytest.fixture
def lines(tmp_path):
    """Log in a format, and return what the file has then."""
    path = tmp_path / "log"

    def write(form, log):
        server_log = ServerLog(LogSettings(file=str(path), format=form))
        try:
            log(logging.getLogger("gpubridge.test"))
        finally:
            server_log.close()
        return path.read_text().split("\n")[:-1]

    return write


@pytest.mark.parametrize("form", ["default", "ISO8601"])
@pytest.mark.parametrize("end", ["\r", "\x0b", "\x0c", "\x85", "\u2028", "\x1b[2J", "\x00"])
def test_control_characters_are_escaped(lines, form, end):
    (line,) = lines(form, lambda logger: logger.error("model '%s' is gone", f"a{end}I1123 forged"))
    escaped = ascii(end)[1:-1]
    assert f"] model 'a{escaped}I1123 forged' is gone" in line


@pytest.mark.parametrize(
    "forged", ["E1123 03:00:00.0 1 x] gone", "2026-11-23T03:00:00Z E 1 x] gone"]
)
def test_no_line_can_be_forged(lines, forged):
    fields = {"level": 0, "text": f"At:\n\tplace\n{forged}", "file": f"/m/a\n{forged}", "line": 3}
    found = lines("default", lambda _: log_from_stub("m", "m_0", fields))
    assert found[1:] == [f" {forged}:3] [m_0] At:", "\tplace", f" {forged}"]
